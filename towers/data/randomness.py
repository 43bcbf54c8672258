"""Random numbers that are functions of (seed, what they are for, a counter).

Every stateless operation names its algorithm, because the default one gives other
numbers under XLA.
"""

import zlib
from collections.abc import Sequence

import tensorflow as tf

ALGORITHM = "philox"


def key(seed: int, purpose: str, counter: tf.Tensor) -> tf.Tensor:
    """int64 [2]: the key of one draw; other purposes and counters give other draws."""
    purpose_and_seed = (zlib.crc32(purpose.encode()) << 31) ^ seed
    return tf.stack(
        [tf.constant(purpose_and_seed, tf.int64), tf.cast(counter, tf.int64)]
    )


def uniform(
    seed: int, purpose: str, counter: tf.Tensor, shape: Sequence[int]
) -> tf.Tensor:
    """float32 of the shape, uniform in [0, 1)."""
    return tf.random.stateless_uniform(
        shape, key(seed, purpose, counter), alg=ALGORITHM
    )


def permutation(seed: int, purpose: str, counter: tf.Tensor, length: int) -> tf.Tensor:
    """int64 [length]: the numbers 0 .. length - 1 in random order."""
    return tf.random.experimental.stateless_shuffle(
        tf.range(length, dtype=tf.int64), key(seed, purpose, counter), alg=ALGORITHM
    )
