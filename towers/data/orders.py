"""Orders of an epoch: with balanced classes, or of images that are read in blocks."""

from typing import Any

import numpy as np
import tensorflow as tf

from towers.data.randomness import permutation, random_bits
from towers.data.sources import blocks_of


class BalancedOrder:
    """Orders of an epoch in which all classes are equally likely, with replacement.

    Images without a label in label sets are one more class.
    """

    def __init__(self, labels: np.ndarray):
        self._num_examples = len(labels)
        if labels.ndim == 2:
            labels = np.column_stack([labels, ~labels.any(1)])
            labels, by_class = np.nonzero(labels.T)
        else:
            by_class = np.argsort(labels, kind="stable")
        _, counts = np.unique(labels, return_counts=True)
        with tf.device("CPU:0"):
            self._by_class = tf.constant(by_class, tf.int64)
            self._firsts = tf.constant(np.cumsum(counts) - counts, tf.int64)
            self._counts = tf.constant(counts, tf.int64)

    def __call__(self, seed: int, epoch: tf.Tensor) -> tf.Tensor:
        """Return int64 [num_examples], a function of the seed and the epoch."""
        shape = [self._num_examples, 2]
        bits = tf.cast(random_bits(seed, "balanced order", epoch, shape), tf.int64)
        classes = bits[:, 0] % len(self._counts)
        positions = bits[:, 1] % tf.gather(self._counts, classes)
        return tf.gather(self._by_class, tf.gather(self._firsts, classes) + positions)


class BlockOrder:
    """Orders in which examples come once, near the others of their block.

    The blocks are shuffled, and each example moves back by a random part of `window`
    blocks.
    """

    def __init__(self, blocks: np.ndarray, window: float):
        _, numbers = np.unique(blocks, return_inverse=True)
        self._num_blocks, self._window = int(numbers.max()) + 1, window
        with tf.device("CPU:0"):
            self._blocks = tf.constant(numbers, tf.int64)

    def __call__(self, seed: int, epoch: tf.Tensor) -> tf.Tensor:
        """Return int64 [num_examples], a function of the seed and the epoch."""
        num_examples = len(self._blocks)
        examples = permutation(seed, "order", epoch, num_examples)
        ranks = permutation(seed, "order of blocks", epoch, self._num_blocks)
        positions = tf.gather(ranks, tf.gather(self._blocks, examples))
        moves = tf.range(num_examples, dtype=tf.float64) * (self._window / num_examples)
        keys = tf.cast(positions, tf.float64) + moves
        return tf.gather(examples, tf.argsort(keys, stable=True))


def block_order(source: Any, buffer_mb: float) -> BlockOrder | None:
    """Return the order for a source of blocks; None if `buffer_mb` holds them all."""
    blocks = blocks_of(source)
    if blocks is None:
        return None
    window = buffer_mb * 1e6 / source.block_bytes
    return None if window >= len(np.unique(blocks)) else BlockOrder(blocks, window)
