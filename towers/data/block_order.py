"""Orders of an epoch for images that are read in blocks, such as row groups."""

import numpy as np
import tensorflow as tf

from towers.data.randomness import permutation
from towers.data.sources import Source


class BlockOrder:
    """Orders in which every example comes once, and the examples of a block near each
    other: the blocks are shuffled, and each example moves back by a random part of the
    window.

    Args:
        blocks: integers [num_examples], ascending.
        window: blocks that an example may be moved by.
    """

    def __init__(self, blocks: np.ndarray, window: float):
        _, numbers = np.unique(blocks, return_inverse=True)
        self._num_blocks, self._window = int(numbers.max()) + 1, window
        with tf.device("CPU:0"):
            self._blocks = tf.constant(numbers, tf.int64)

    def __call__(self, seed: int, epoch: tf.Tensor) -> tf.Tensor:
        """int64 [num_examples]: a function of the seed and the epoch."""
        num_examples = len(self._blocks)
        examples = permutation(seed, "order", epoch, num_examples)
        ranks = permutation(seed, "order of blocks", epoch, self._num_blocks)
        places = tf.gather(ranks, tf.gather(self._blocks, examples))
        moves = tf.range(num_examples, dtype=tf.float64) * (self._window / num_examples)
        keys = tf.cast(places, tf.float64) + moves
        return tf.gather(examples, tf.argsort(keys, stable=True))


def block_order(source: Source, buffer_mb: float) -> BlockOrder | None:
    """The order for a source whose images are read in blocks that take more memory, all
    together, than `buffer_mb` megabytes; None where each is shuffled with all others.
    """
    blocks = getattr(source, "blocks", None)
    if blocks is None:
        return None
    window = buffer_mb * 1e6 / source.block_bytes
    return None if window >= len(np.unique(blocks)) else BlockOrder(blocks, window)
