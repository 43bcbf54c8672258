"""Random numbers that are functions of (seed, what they are for, a counter).

They are the same in an eager call, in a graph and under XLA. Of TensorFlow's stateless
operations only whole random integers of a named algorithm are, and only where both
halves of the seed fit in 32 bits (tried with 2.21): the default algorithm is another
one under XLA, so is the conversion to floats, and a shuffle does not compile there.
"""

import zlib
from collections.abc import Sequence

import tensorflow as tf

ALGORITHM = "philox"


def key(seed: int, purpose: str, counter: tf.Tensor) -> tf.Tensor:
    """int64 [2]: the key of one draw; other purposes and counters give other draws."""
    purpose_and_seed = zlib.crc32(f"{purpose}/{seed}".encode())
    return tf.stack(
        [tf.constant(purpose_and_seed, tf.int64), tf.cast(counter, tf.int64)]
    )


def bits(
    seed: int, purpose: str, counter: tf.Tensor, shape: Sequence[int]
) -> tf.Tensor:
    """uint32 of the shape, uniform over all its values."""
    return tf.random.stateless_uniform(
        shape,
        key(seed, purpose, counter),
        minval=None,
        maxval=None,
        dtype=tf.uint32,
        alg=ALGORITHM,
    )


def uniform(
    seed: int, purpose: str, counter: tf.Tensor, shape: Sequence[int]
) -> tf.Tensor:
    """float32 of the shape, uniform over the multiples of 2**-24 in [0, 1)."""
    drawn = tf.bitwise.right_shift(
        bits(seed, purpose, counter, shape), tf.constant(8, tf.uint32)
    )
    return tf.cast(drawn, tf.float32) * 2.0**-24


def permutation(seed: int, purpose: str, counter: tf.Tensor, length: int) -> tf.Tensor:
    """int64 [length]: the numbers 0 .. length - 1 in random order."""
    drawn = tf.bitcast(bits(seed, purpose, counter, [length]), tf.int32)
    return tf.cast(tf.argsort(drawn, stable=True), tf.int64)
