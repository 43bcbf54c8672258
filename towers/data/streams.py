"""How this library runs `tf.data`: threads of its own, and no tuning.

`tf.data` tunes its parallelism in a thread that sleeps for up to a minute, and whoever
drops an iterator waits for that thread. It is woken for that, but now and then misses
the call (seen with TensorFlow 2.21: of 60 iterators six seconds old one took 2.7 s and
one 0.4 s to drop, older ones up to 43 s). So nothing is tuned here, and the numbers are
written down.
"""

import os

import tensorflow as tf

# Of a stream, for itself. On few cores TensorFlow's own threads are so few that calls
# which wait, as for a disk, would keep the other stages and the step waiting too.
NUM_THREADS = max(8, os.cpu_count())

# Calls of one stage at the same time: enough to hide what waits, few enough for memory,
# as each holds a batch.
NUM_CALLS = max(4, os.cpu_count() // 4)


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set, run as above."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = NUM_THREADS
    return dataset.with_options(options)
