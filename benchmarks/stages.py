"""Stages of the input that wait, as for a disk, or decode, as image files need it."""

import dataclasses
import threading
import time

import numpy as np
import tensorflow as tf

from towers.data.augment import Augment
from towers.data.batches import TrainBatches
from towers.data.sources import Source

NUM_JPEGS, JPEG_SIZE = 256, 160


class Waiting:
    """A stage that takes its time in each call, and no processor.

    Args:
        secs: how long a call takes.
        one_at_a_time: whether calls are served one after the other, as they come.
    """

    def __init__(self, secs: float, one_at_a_time: bool = True):
        self._secs, self._one_at_a_time = secs, one_at_a_time
        self._free_at, self._lock = 0.0, threading.Lock()

    def before(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, after the wait."""

        def wait():
            with self._lock:
                now = time.monotonic()
                begun = max(now, self._free_at) if self._one_at_a_time else now
                self._free_at = done = begun + self._secs
            time.sleep(done - now)
            return np.int32(0)

        with tf.control_dependencies([tf.numpy_function(wait, [], tf.int32)]):
            return tf.identity(tensor)


class WaitingSource:
    """A source whose reads wait first."""

    def __init__(self, source: Source, stage: Waiting):
        self.num_examples = source.num_examples
        self.image_shape = source.image_shape
        self._source, self._stage = source, stage

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._source.read(self._stage.before(indices))


class JpegSource:
    """Images of noise that lie in memory as JPEG files, larger than they are read;
    with the labels of another source."""

    def __init__(self, source: Source):
        self.num_examples = source.num_examples
        self.image_shape = source.image_shape
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


def reading_waits(
    batches: TrainBatches, secs: float, one_at_a_time: bool = True
) -> TrainBatches:
    """The same batches, each read in so many seconds more."""
    source = WaitingSource(batches.source, Waiting(secs, one_at_a_time))
    return dataclasses.replace(batches, source=source)


def processing_waits(batches: TrainBatches, secs: float) -> TrainBatches:
    """The same batches, each augmented in so many seconds more."""
    stage, augment = Waiting(secs), batches.augment

    def train(images, draw):
        return augment.train(stage.before(images), draw)

    return dataclasses.replace(
        batches, augment=Augment(train, augment.evaluate, augment.image_shape)
    )


def reading_decodes(batches: TrainBatches) -> TrainBatches:
    """Batches of as many images, each decoded and scaled down when it is read."""
    return dataclasses.replace(batches, source=JpegSource(batches.source))
