"""Options of `tf.data`: a private thread pool and no autotuning.

`tf.data` tunes its parallelism in a thread that sleeps for up to a minute, and deleting
an iterator waits for that thread. It is woken for that, but occasionally misses the
call (TensorFlow 2.21: of 60 iterators six seconds old one took 2.7 s and one 0.4 s to
delete, older ones up to 43 s). So autotuning is off, and the numbers are fixed here.
"""

import os

import tensorflow as tf

# Of one stream. On few cores TensorFlow's own threads are so few that calls
# which wait, as for a disk, would delay the other stages and the step too.
NUM_THREADS = max(8, os.cpu_count())

# Calls of one stage at the same time: enough to hide waiting, few enough for memory, as
# each holds a batch.
NUM_CALLS = max(4, os.cpu_count() // 4)

# For the functions of maps: AutoGraph, which would rewrite `if` and `for`, takes longer
# than tracing them.
plain = tf.autograph.experimental.do_not_convert


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set, run as above."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = NUM_THREADS
    return dataset.with_options(options)
