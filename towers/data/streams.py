"""Threads that read images, and options of `tf.data`: a private thread pool, no tuning.

`tf.data` tunes its parallelism in a thread that sleeps for up to a minute, and deleting
an iterator waits for that thread. It is woken for that, but occasionally misses the
call (TensorFlow 2.21: of 60 iterators six seconds old one took 2.7 s and one 0.4 s to
delete, older ones up to 43 s). So autotuning is off, and the numbers are fixed here.
"""

import contextlib
import functools
import queue
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

NUM_CALLS = max(4, num_cores() // 4)  # batches that one stage makes at the same time

# Maximum memory of the batches that are read at the same time, in bytes.
MAX_BATCH_BYTES = 10**9

# For the functions of maps: AutoGraph takes longer than tracing them.
plain = tf.autograph.experimental.do_not_convert

_calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_starting = threading.Lock()


@functools.cache
def _start_readers():
    for _ in range(NUM_READERS):
        threading.Thread(target=_read_images, daemon=True).start()


def _read_images():
    while True:
        _calls.get()()


def num_reads(num_images: int, num_bytes: int) -> int:
    """Return how many batches of this size to read at once to keep readers busy."""
    busy = max(NUM_CALLS, 1 - (-NUM_READERS // num_images))
    return max(1, min(busy, MAX_BATCH_BYTES // num_bytes))


def call_in_readers(function: Callable[[int], None], count: int) -> None:
    """Call a function with 0 to count - 1, each in the next idle reader.

    All streams share the readers. The first error ends the calls, and is raised.
    """
    with _starting:
        _start_readers()
    numbers = iter(range(count))
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    has_failed = threading.Event()

    def work():
        error = None
        try:
            for number in numbers:
                if has_failed.is_set():
                    break
                if not threading.main_thread().is_alive():
                    raise RuntimeError("the interpreter ends")
                function(number)
        except BaseException as caught:
            error = caught
            has_failed.set()
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
        """Take `num_bytes` while the block runs, once they are left."""

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
    """Return the data set with a private thread pool and without autotuning."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = NUM_THREADS
    return dataset.with_options(options)
