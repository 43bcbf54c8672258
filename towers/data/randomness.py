"""Random numbers that are functions of (seed, what they are for, a counter).

Every stateless operation names its algorithm, because the default one gives other
numbers under XLA. So does the conversion to floats (tried with TensorFlow 2.21), which
is therefore written out; a shuffle does not compile there at all.
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
    """float32 of the shape, uniform over the multiples of 2**-23 in [0, 1)."""
    bits = tf.random.stateless_uniform(
        shape,
        key(seed, purpose, counter),
        minval=None,
        maxval=None,
        dtype=tf.uint32,
        alg=ALGORITHM,
    )
    lowest = tf.bitwise.bitwise_and(bits, tf.constant(2**23 - 1, tf.uint32))
    return tf.cast(lowest, tf.float32) * 2.0**-23


def permutation(seed: int, purpose: str, counter: tf.Tensor, length: int) -> tf.Tensor:
    """int64 [length]: the numbers 0 .. length - 1 in random order."""
    return tf.random.experimental.stateless_shuffle(
        tf.range(length, dtype=tf.int64), key(seed, purpose, counter), alg=ALGORITHM
    )
