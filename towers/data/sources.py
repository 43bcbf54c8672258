"""Indexable sources of labelled images, and the data set that two of them make."""

import dataclasses
from typing import Protocol

import numpy as np
import tensorflow as tf


class Source(Protocol):
    """Labelled images that can be read in any order.

    `read` is made of TensorFlow operations, so the same source is read by `tf.data`
    and inside a compiled step.
    """

    num_examples: int
    image_shape: tuple[int, int, int]

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """int64 [n] -> uint8 images [n, height, width, channels], int32 labels [n]."""
        ...


class ArraySource:
    """A source that lies in host memory.

    Args:
        images: uint8 [num_examples, height, width, channels].
        labels: integers [num_examples].
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        if images.dtype != np.uint8 or images.ndim != 4:
            raise ValueError(
                "images must be uint8 [n, height, width, channels], "
                f"got {images.dtype} {list(images.shape)}"
            )
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        self.num_examples = len(images)
        self.image_shape = tuple(images.shape[1:])
        with tf.device("CPU:0"):
            self._images = tf.constant(images)
            self._labels = tf.constant(labels, tf.int32)

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(self._images, indices), tf.gather(self._labels, indices)


class Subset:
    """The examples of another source whose indices are listed."""

    def __init__(self, source: Source, indices: np.ndarray):
        self.num_examples = len(indices)
        self.image_shape = source.image_shape
        self._source = source
        with tf.device("CPU:0"):
            self._indices = tf.constant(indices, tf.int64)

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._source.read(tf.gather(self._indices, indices))


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A training and a test source, and what a trainer must know of them.

    `mean` and `deviation` are those of the training images, per channel, in units of
    0..255. `found` says in words where the data came from, for the start banner.
    """

    name: str
    train: Source
    test: Source
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    found: str


def channel_moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 [n, h, w, c], 0..255."""
    values = np.arange(256.0)
    means, deviations = [], []
    for channel in range(images.shape[-1]):
        counts = np.zeros(256)
        # In pieces: the counting makes wide copies, which should stay in the cache.
        for first in range(0, len(images), 64):
            piece = images[first : first + 64, ..., channel]
            counts += np.bincount(piece.reshape(-1), minlength=256)
        mean = float(counts @ values / counts.sum())
        means.append(mean)
        deviations.append(float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum())))
    return tuple(means), tuple(deviations)
