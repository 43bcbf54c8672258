"""Layers over the channels of a group's devices, each of which holds a slice.

Every device fetches those channels of its neighbors that its output needs. Moments of
normalizations over several devices are here too.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.models.layers import cpu_kernels, normalization
from towers.parallel.sharding.device_tape import DeviceTape, Value
from towers.parallel.workers import Workers


def local_response_normalization(
    tape: DeviceTape,
    layer: normalization.LocalResponseNormalization,
    values: Sequence[Value],
) -> list[Value]:
    """Fetch the channels within the radius of each slice; all make one group."""
    radius, starts, outputs = layer.depth_radius, _starts(values), []
    for value, start, stop in zip(values, starts, starts[1:], strict=False):
        low, high = max(0, start - radius), min(starts[-1], stop + radius)
        before = _fetched(tape, values, low, start, value.device)
        after = _fetched(tape, values, stop, high, value.device)

        index = len(before)

        def normalize(*pieces, index=index):
            return cpu_kernels.local_response_normalization(
                pieces[index],
                radius,
                layer.bias,
                layer.alpha,
                layer.beta,
                before=pieces[:index],
                after=pieces[index + 1 :],
            )

        outputs += tape.apply(value.device, normalize, [*before, value, *after])
    return outputs


def channel_moments(tape: DeviceTape, values: Sequence[Value]) -> list[list[Value]]:
    """Return mean and variance over all channels, [..., 1] each, per shard."""
    parts = [value for value in values if value.tensor.shape[-1]]
    sizes = [value.tensor.shape[-1] for value in parts]
    weights = [size / sum(sizes) for size in sizes]
    moments_of = functools.partial(wide_moments, axes=[-1], keepdims=True)
    moments = [x for part in parts for x in tape.apply(part.device, moments_of, [part])]
    combine = functools.partial(union_moments, weights=weights)
    return [
        tape.apply(device, combine, [tape.move(x, device) for x in moments])
        for device in (value.device for value in values)
    ]


def combined_moments(
    tape: DeviceTape,
    values: Sequence[Value],
    home: str,
    workers: Workers,
    batch_size: int,
) -> list[Value]:
    """Return mean and variance per channel over all images, combined on `home`.

    Values are of the groups of this worker; all workers have `batch_size` images. Every
    device computes its own moments first (Chan et al. 1979).
    """
    images = [value.tensor.shape[0] for value in values]
    weights = [count / sum(images) for count in images]
    moments = [x for v in values for x in tape.apply(v.device, _moments, [v])]
    moments = [tape.move(moment, home) for moment in moments]
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
    """Return mean and variance over axes, in float32 for 16-bit types."""
    if x.dtype in (tf.bfloat16, tf.float16):
        x = tf.cast(x, tf.float32)
    return tf.nn.moments(x, axes, keepdims=keepdims)


def union_moments(
    *moments: tf.Tensor, weights: Sequence[float]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance of the union of sets, from mean, variance, ..."""
    means, variances = moments[0::2], moments[1::2]
    mean = tf.add_n([w * m for w, m in zip(weights, means, strict=True)])
    squares = [v + tf.square(m - mean) for m, v in zip(means, variances, strict=True)]
    return mean, tf.add_n([w * s for w, s in zip(weights, squares, strict=True)])


def _over_workers(mean, variance, *, workers, share):
    """Return mean and variance over all workers, computed in float64.

    The variance is the difference of two numbers that may be large and close.
    """
    mean_64, variance_64 = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
    sums = [share * mean_64, share * (variance_64 + tf.square(mean_64))]
    mean_64, squares = workers.sum(sums)
    variance_64 = squares - tf.square(mean_64)
    return tf.cast(mean_64, mean.dtype), tf.cast(variance_64, variance.dtype)


def concatenated(*pieces: tf.Tensor) -> tf.Tensor:
    """Concatenate pieces along the channels."""
    return tf.concat(pieces, -1) if len(pieces) > 1 else pieces[0]


def channels(tensor: tf.Tensor, first: int, last: int) -> tf.Tensor:
    """Return tensor[..., first:last], with a gradient three times as fast."""
    begin = [0] * (len(tensor.shape) - 1) + [first]
    size = [-1] * (len(tensor.shape) - 1) + [last - first]
    return tf.slice(tensor, begin, size)


def _fetched(tape, values, low, high, device):
    """Return channels [low, high) of the full tensor, in pieces on a device."""
    starts, pieces = _starts(values), []
    for value, start, stop in zip(values, starts, starts[1:], strict=False):
        first, last = max(low, start) - start, min(high, stop) - start
        if first >= last:
            continue
        piece = value
        if last - first < stop - start:
            cut = functools.partial(channels, first=first, last=last)
            [piece] = tape.apply(value.device, cut, [value])
        pieces.append(tape.move(piece, device))
    return pieces


def _starts(values):
    """Return the first channel of each shard, and the number of all channels."""
    sizes = [value.tensor.shape[-1] for value in values]
    return [sum(sizes[:shard]) for shard in range(len(sizes) + 1)]
