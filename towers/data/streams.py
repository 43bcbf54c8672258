"""Threads that read images, and options of `tf.data`: a private thread pool, no tuning.

`tf.data` tunes its parallelism in a thread that sleeps for up to a minute, and deleting
an iterator waits for that thread. It is woken for that, but occasionally misses the
call (TensorFlow 2.21: of 60 iterators six seconds old one took 2.7 s and one 0.4 s to
delete, older ones up to 43 s). So autotuning is off, and the numbers are fixed here.
"""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

from towers.threads import num_cores

# Images that are read at the same time. On few cores more than one for each, as a read
# may wait for a disk.
NUM_READERS = max(4, num_cores())

# Threads of one stream. On few cores TensorFlow's own are so few that calls which wait
# would delay the other stages and the step too.
NUM_THREADS = max(8, num_cores())

# Batches that one stage makes at the same time.
NUM_CALLS = max(4, num_cores() // 4)

# Memory of the batches that are read at the same time.
MAX_BATCH_BYTES = 10**9

# Between checks for other references to the iterators that are to be deleted.
PAUSE_SECS = 0.5

# For the functions of maps: AutoGraph, which would rewrite `if` and `for`, takes longer
# than tracing them.
plain = tf.autograph.experimental.do_not_convert

_calls, _dropped = queue.SimpleQueue(), queue.SimpleQueue()
_starting, _started = threading.Lock(), []


def _start_readers():
    """Starts the threads that read images, and one that deletes iterators: deleting
    waits for the reads of the iterator, so a reader that collects garbage would wait
    for itself.
    """
    with _starting:
        if _started:
            return
        tf.data.Iterator.__del__ = lambda self: _dropped.put(
            vars(self).pop("_iterator_resource", None)
        )
        for run in [_read_images] * NUM_READERS + [_delete_iterators]:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            _started.append(thread)


def _read_images():
    while True:
        _calls.get()()


def _delete_iterators():
    """The last reference to a resource deletes it. The traceback of a failed step has
    references too, and may be garbage that a reader is collecting.
    """
    resources = []
    while True:
        with contextlib.suppress(queue.Empty):
            resources.append(_dropped.get(timeout=PAUSE_SECS if resources else None))
        resources = [
            x
            for x in resources
            if tf.is_tensor(x)
            and not tf.is_symbolic_tensor(x)
            and sys.getrefcount(x) > 3  # of the list, of x and of the argument
        ]


def num_reads(num_images: int, num_bytes: int) -> int:
    """Batches, of these images and bytes, that are read at the same time: as many as
    keep all readers busy, in MAX_BATCH_BYTES.
    """
    busy = max(NUM_CALLS, 1 - (-NUM_READERS // num_images))
    return max(1, min(busy, MAX_BATCH_BYTES // num_bytes))


def call_in_readers(function: Callable[[int], None], count: int) -> None:
    """Calls a function with 0 to count - 1, each in the next idle reader. All streams
    share the readers. An error ends the calls, and is raised.
    """
    _start_readers()
    numbers, ended, has_failed = iter(range(count)), queue.SimpleQueue(), []

    def work():
        error = None
        try:
            for number in numbers:
                if has_failed:
                    break
                if not threading.main_thread().is_alive():
                    raise RuntimeError("the interpreter ends")
                function(number)
        except BaseException as caught:
            error = caught
            has_failed.append(True)
        ended.put(error)

    num_workers = min(count, NUM_READERS)
    for _ in range(num_workers):
        _calls.put(work)
    errors = [ended.get() for _ in range(num_workers)]
    for error in errors:
        if error is not None:
            try:
                raise error
            finally:
                del error, errors  # no cycle with the traceback


class Memory:
    """A budget of bytes that threads share; one thread alone may exceed it."""

    def __init__(self, num_bytes: int):
        self._all, self._taken = num_bytes, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        """Waits until `num_bytes` are left, and takes them while the block runs."""

        def is_left():
            return not self._taken or self._taken + num_bytes <= self._all

        with self._changed:
            self._changed.wait_for(is_left)
            self._taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= num_bytes
                self._changed.notify_all()


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set with a private thread pool and without autotuning, see above."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = NUM_THREADS
    return dataset.with_options(options)
