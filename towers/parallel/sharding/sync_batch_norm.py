"""Batch normalization with the moments of the whole batch, over several devices.

Every device computes the moments of its images; one combines them (Chan et al. 1979)
with the moments of its neighbors and of other processes. `Walk` normalizes with the
result on every device.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.cluster.workers import ALONE, Workers
from towers.parallel.sharding.device_tape import DeviceTape, Value


def combined_moments(
    tape: DeviceTape,
    values: Sequence[Value],
    home: str,
    workers: Workers = ALONE,
    batch_size: int = 0,
) -> list[Value]:
    """Mean and variance over the images of all values, per channel, on a device.

    Args:
        values: the same channels of each device's images, [images, ..., channels].
        home: where the moments are combined.
        workers: those that have the other images of the batch.
        batch_size: images of all workers; needed where there are several.
    """
    images = [value.tensor.shape[0] for value in values]
    weights = [count / sum(images) for count in images]
    moments = []
    for value in values:
        for moment in tape.apply(value.device, _moments, [value]):
            moments.append(tape.move(moment, home))
    combined = tape.apply(
        home, functools.partial(union_moments, weights=weights), moments
    )
    if workers.size == 1:
        return combined
    share = sum(images) / batch_size
    over_workers = functools.partial(_over_workers, workers=workers, share=share)
    return tape.apply(home, over_workers, combined)


def _moments(x):
    return wide_moments(x, list(range(len(x.shape) - 1)))


def wide_moments(
    x: tf.Tensor, axes: Sequence[int], keepdims: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over axes; of 16-bit types in float32."""
    if x.dtype in (tf.bfloat16, tf.float16):
        x = tf.cast(x, tf.float32)
    return tf.nn.moments(x, axes, keepdims=keepdims)


def union_moments(
    *moments: tf.Tensor, weights: Sequence[float]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of the union of sets, from mean, variance, ... of each."""
    means, variances = moments[0::2], moments[1::2]
    mean = tf.add_n([w * m for w, m in zip(weights, means, strict=True)])
    squares = [v + tf.square(m - mean) for m, v in zip(means, variances, strict=True)]
    return mean, tf.add_n([w * s for w, s in zip(weights, squares, strict=True)])


def _over_workers(mean, variance, *, workers, share):
    """Mean and variance over all workers. In float64, because the mean square is the
    difference of two numbers that may be large and close to each other."""
    mean_64, variance_64 = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
    sums = [share * mean_64, share * (variance_64 + tf.square(mean_64))]
    mean_64, squares = workers.sum(sums)
    variance_64 = squares - tf.square(mean_64)
    return tf.cast(mean_64, mean.dtype), tf.cast(variance_64, variance.dtype)
