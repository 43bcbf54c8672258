"""Random numbers that are functions of (seed, purpose, counter).

Every stateless operation names its algorithm, because the default one gives other
numbers under XLA. So does the conversion to floats (tried with TensorFlow 2.21), which
is therefore written out; a shuffle does not compile there at all.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence

import tensorflow as tf

Shape = Sequence[int]

ALGORITHM = "philox"
_PHILOX = 1  # its number in raw operations


def key(seed: int, purpose: str, counter: tf.Tensor) -> tf.Tensor:
    """Return the seed of one draw, int64 [2], of a purpose and a counter."""
    first = (zlib.crc32(purpose.encode()) << 31) ^ seed
    return tf.stack([tf.constant(first, tf.int64), tf.cast(counter, tf.int64)])


def _key_and_counter(seed):
    """Compute StatelessRandomGetKeyCounter, uint64 [1] twice, not in host memory."""
    mix = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[4],
        key=tf.constant([0x02461E293EC8F720], tf.uint64),
        counter=tf.bitcast(seed, tf.uint64),
        alg=_PHILOX,
        dtype=tf.uint32,
    )
    both = tf.bitcast(tf.reshape(mix, [2, 2]), tf.uint64)  # the lower half comes first
    return both[:1], both[1:]


def _bits(shape, philox_key, low, high):
    """Compute `tf.random.stateless_uniform` of uint32 from a counter's two halves."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape,
        key=philox_key,
        counter=tf.concat([tf.constant([low], tf.uint64), high], 0),
        alg=_PHILOX,
        dtype=tf.uint32,
    )


def uniform(seed: int, purpose: str, counter: tf.Tensor, shape: Shape) -> tf.Tensor:
    """Return float32 of the shape, uniform over the multiples of 2**-23 in [0, 1)."""
    return _fractions(random_bits(seed, purpose, counter, shape))


def random_bits(seed: int, purpose: str, counter: tf.Tensor, shape: Shape) -> tf.Tensor:
    """Return uint32 of the shape, all values equally likely."""
    philox_key, high = _key_and_counter(key(seed, purpose, counter))
    return _bits(shape, philox_key, 0, high)


def uniform_rows(
    seed: int, purpose: str, counter: tf.Tensor, shape: Shape, rows: Sequence[range]
) -> tf.Tensor:
    """Return some rows of `uniform`, float32 [number of rows, *shape]; draw no others.

    Philox makes four numbers of each value of a counter that it counts up (Salmon et
    al. 2011), so that drawing can begin anywhere.
    """
    length = math.prod(shape)
    philox_key, high = _key_and_counter(key(seed, purpose, counter))
    pieces = []
    for some in rows:
        skipped = some.start * length // 4
        bits = _bits([some.stop * length - 4 * skipped], philox_key, skipped, high)
        pieces.append(bits[some.start * length - 4 * skipped :])
    return _fractions(tf.reshape(tf.concat(pieces, 0), [-1, *shape]))


def hashed(
    seed: int, purpose: str, counters: Sequence[tf.Tensor], count: int
) -> tf.Tensor:
    """Return numbers that depend on each example's own counters, float32 [n, count].

    They are uniform over the multiples of 2**-23 in [0, 1). Counters are int64 [n]
    each, below 2**32, the seed is below 2**63. They go through the finalizer of
    MurmurHash3 (Appleby 2011, public domain), in integers only.
    """
    bits = tf.range(count, dtype=tf.int32)[None, :]
    purpose_key = zlib.crc32(purpose.encode())
    bits = _mixed(tf.cast(bits, tf.uint32) ^ tf.constant(purpose_key, tf.uint32))
    for part in (seed & 0xFFFFFFFF, seed >> 32):
        bits = _mixed(bits ^ tf.constant(part, tf.uint32))
    for counter in counters:
        bits = _mixed(bits ^ tf.cast(counter, tf.uint32)[:, None])
    return _fractions(bits)


def _mixed(bits):
    bits += tf.constant(0x9E3779B9, tf.uint32)  # or 0 would stay 0
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits ^= tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))
        bits *= tf.constant(factor, tf.uint32)
    return bits


def _fractions(bits):
    lowest = tf.bitwise.bitwise_and(bits, tf.constant(2**23 - 1, tf.uint32))
    return tf.cast(lowest, tf.float32) * 2.0**-23


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """The random numbers of one step, uniform in [0, 1)."""

    seed: int
    step: tf.Tensor
    indices: tf.Tensor  # int64 [n], the examples of the images
    # int64 [n], a number that differs whenever an example comes again: its epoch, or
    # another one with repeats or for draws with replacement.
    views: tf.Tensor
    rows: Sequence[range] | None = None  # see `Share.rows`; None for all images

    def __call__(self, purpose: str, shape: Shape) -> tf.Tensor:
        """Return float32 of the shape [images, ...]; new in each step."""
        if self.rows is None:
            return uniform(self.seed, purpose, self.step, shape)
        return uniform_rows(self.seed, purpose, self.step, shape[1:], self.rows)

    def per_example(self, purpose: str, count: int) -> tf.Tensor:
        """Return float32 [n, count], for each example the same in every epoch."""
        return hashed(self.seed, purpose, [self.indices], count)

    def per_view(self, purpose: str, count: int) -> tf.Tensor:
        """Return float32 [n, count], for each example new in every epoch."""
        return hashed(self.seed, purpose, [self.indices, self.views], count)


def permutation(seed: int, purpose: str, counter: tf.Tensor, length: int) -> tf.Tensor:
    """Return the numbers 0 .. length - 1 in random order, int64 [length]."""
    return tf.random.experimental.stateless_shuffle(
        tf.range(length, dtype=tf.int64), key(seed, purpose, counter), alg=ALGORITHM
    )
