"""Streams have threads of their own, and nobody waits for one that is dropped."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import tensorflow as tf
from pictures import png, random_pixels

from towers.data.files.cached import CachedSource
from towers.data.files.image_files import ImageOptions
from towers.data.streams import without_tuning
from towers.tf_internals import delete_in_thread


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_reader_that_collects_an_iterator_does_not_wait_for_its_own_read(has_failed):
    """Nor where the traceback of a failed step refers to the iterator too."""
    collected_by, dropped, over = [], threading.Event(), threading.Event()

    class Collecting:
        """Files whose reading collects garbage."""

        def __len__(self):
            return 1000

        def read(self, index):
            if index >= 10:  # behind the first batch, for which the test waits
                dropped.wait(30)
            # Nothing happens while another thread collects.
            while dropped.is_set() and not collected_by:
                gc.collect()
            if threading.get_ident() in collected_by:
                over.set()
            return png(random_pixels(0)), 0

    class Cycle:
        pass

    class Last:
        def __del__(self):
            time.sleep(0.1)  # other threads run between the iterator's end and this

    @tf.function
    def step(iterator):
        _, labels = next(iterator)
        tf.debugging.assert_positive(labels)

    source = CachedSource(Collecting(), (8, 6, 3), ImageOptions(image_cache_mb=0))
    numbers = tf.data.Dataset.range(1000).batch(10)
    reads = numbers.map(source.read, num_parallel_calls=1).prefetch(2)
    gc.disable()  # in all other threads
    try:
        cycle = Cycle()
        iterator = iter(without_tuning(reads))
        cycle.itself, cycle.iterator = cycle, delete_in_thread(iterator)
        del iterator
        if has_failed:
            try:
                step(cycle.iterator)
            except tf.errors.InvalidArgumentError as error:
                cycle.error = error
        else:
            next(cycle.iterator)
        cycle.last = Last()
        cycle.last.cycle = cycle
        weakref.finalize(cycle, lambda: collected_by.append(threading.get_ident()))
        del cycle
        dropped.set()
        assert over.wait(30)
    finally:
        gc.enable()


ENDS_WHILE_DELETING = """
import tensorflow as tf
from towers.data.streams import without_tuning
from towers.tf_internals import delete_in_thread

def compute_long(number):
    matrix = tf.random.stateless_normal([1000, 1000], [1, number])
    for _ in range(150):
        matrix @= matrix
    return matrix

dataset = tf.data.Dataset.range(100).map(compute_long, num_parallel_calls=4)
iterator = delete_in_thread(iter(without_tuning(dataset.prefetch(2))))
next(iterator)
del iterator
"""


@pytest.mark.slow
def test_a_process_that_ends_waits_until_iterators_are_deleted():
    """The interpreter would end with a segmentation fault."""
    command = [sys.executable, "-c", ENDS_WHILE_DELETING]
    assert subprocess.run(command, check=False).returncode == 0
