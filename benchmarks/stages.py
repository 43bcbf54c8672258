"""Stages of the input that wait, as for a disk, or decode, as image files need it."""

import dataclasses
import threading
import time

import keras
import numpy as np
import tensorflow as tf

from towers.data.batches import TrainBatches
from towers.data.sources import Source

NUM_JPEGS, JPEG_SIZE = 256, 160


class Waiting:
    """A stage that takes its time in each call, and no processor.

    Args:
        secs: the time of a call.
        one_at_a_time: calls are served one after the other, as they come.
    """

    def __init__(self, secs: float, one_at_a_time: bool = True):
        self._secs, self._one_at_a_time = secs, one_at_a_time
        self._free_at, self._lock = 0.0, threading.Lock()

    def before(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, after the wait."""

        def wait():
            with self._lock:
                start = called = time.monotonic()
                if self._one_at_a_time:
                    start = max(start, self._free_at)
                self._free_at = end = start + self._secs
            time.sleep(end - called)
            return np.int32(0)

        with tf.control_dependencies([tf.numpy_function(wait, [], tf.int32)]):
            return tf.identity(tensor)


class WaitingLayer(keras.layers.Layer):
    """A layer whose forward pass waits."""

    def __init__(self, secs: float, **kwargs):
        super().__init__(**kwargs)
        self._stage = Waiting(secs)

    def call(self, x):
        return self._stage.before(x)

    def compute_output_shape(self, input_shape):
        return input_shape


class WaitingSource:
    """A source whose reads wait first."""

    def __init__(self, source: Source, stage: Waiting):
        self.num_examples, self.image_shape = source.num_examples, source.image_shape
        self._source, self._stage = source, stage

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._source.read(self._stage.before(indices))


class JpegSource:
    """Images of noise that lie in memory as JPEG files, larger than they are read;
    with the labels of another source."""

    def __init__(self, source: Source):
        self.num_examples, self.image_shape = source.num_examples, source.image_shape
        self._source = source
        rng = np.random.default_rng(0)
        tiles = rng.integers(0, 256, [NUM_JPEGS, 8, 8, 3], np.uint8)
        repeats = JPEG_SIZE // 8
        images = tiles.repeat(repeats, axis=1).repeat(repeats, axis=2)
        self._files = tf.stack([tf.io.encode_jpeg(image) for image in images])

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        height, width, channels = self.image_shape

        def decode(file):
            image = tf.io.decode_jpeg(file, channels=channels)
            return tf.image.resize(image, [height, width], method="area")

        images = tf.map_fn(
            decode,
            tf.gather(self._files, indices % NUM_JPEGS),
            fn_output_signature=tf.TensorSpec(self.image_shape, tf.float32),
        )
        return tf.cast(images, tf.uint8), self._source.read(indices)[1]


def reading_waits(batches: TrainBatches, *wait) -> TrainBatches:
    """The same batches, each read after a wait."""
    source = WaitingSource(batches.source, Waiting(*wait))
    return dataclasses.replace(batches, source=source)


def processing_waits(batches: TrainBatches, *wait) -> TrainBatches:
    """The same batches, each augmented after a wait."""
    stage, augment = Waiting(*wait), batches.augment

    def train(images, draw):
        return augment.train(stage.before(images), draw)

    return dataclasses.replace(
        batches, augment=dataclasses.replace(augment, train=train)
    )
