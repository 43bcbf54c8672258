"""Streams have threads of their own, and nobody waits for one that is dropped."""

import time

import pytest
import small_runs
import tensorflow as tf

from towers.data.augment import create_augment
from towers.data.batches import EvalBatches, TrainBatches
from towers.data.streams import NUM_THREADS, without_tuning


def streams():
    found = small_runs.small_data()
    augment = create_augment(
        "none", found.train.image_shape, found.mean, found.deviation
    )
    yield TrainBatches(found.train, augment, seed=0, images_per_step=5).stream(3)
    yield EvalBatches(found.test, augment, 5).stream()


def test_no_stream_is_tuned():
    for stream in streams():
        assert stream.options().autotune.enabled is False
        assert stream.options().threading.private_threadpool_size == NUM_THREADS


def test_the_elements_are_those_that_were_given():
    numbers = tf.data.Dataset.range(7).batch(3)
    actual = list(without_tuning(numbers).as_numpy_iterator())
    assert [x.tolist() for x in actual] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.slow
def test_an_old_iterator_is_dropped_at_once():
    """With the tuner, one of 30 took seconds."""
    iterators = [iter(next(streams())) for _ in range(60)]
    for iterator in iterators:
        next(iterator)
    time.sleep(6)
    while iterators:
        started = time.monotonic()
        iterators.pop()
        assert time.monotonic() - started < 0.3
