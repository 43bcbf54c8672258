"""Operations that are faster on CPUs than TensorFlow's own, or more exact."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers.messages import one_line


def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Add a bias [channels] to floats [..., channels].

    On a CPU TensorFlow sums the gradient of a bias in the type of x, and in bfloat16 a
    sum of ones ends at 256; here it is summed in float32.
    """
    if x.dtype != tf.bfloat16:
        return tf.nn.bias_add(x, bias)

    @tf.custom_gradient
    def add(x, bias):
        return tf.nn.bias_add(x, bias), lambda upstream: (upstream, sum_rows(upstream))

    return add(x, bias)


def sum_rows(x: tf.Tensor) -> tf.Tensor:
    """Sum [..., channels] to [channels], as a product: it sums bfloat16 in float32."""
    rows = tf.reshape(x, [-1, x.shape[-1]])
    return tf.matmul(tf.ones([1, tf.shape(rows)[0]], x.dtype), rows)[0]


@tf.custom_gradient
def dense(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Return x kernel + bias, with the gradient of `add_bias`."""
    inputs, units = kernel.shape
    rows = tf.reshape(x, [-1, inputs])
    shape = tf.concat([tf.shape(x)[:-1], [units]], 0)

    def gradient(upstream):
        upstream = tf.reshape(upstream, [-1, units])
        by_rows = tf.matmul(upstream, kernel, transpose_b=True)
        return (
            tf.reshape(by_rows, tf.shape(x)),
            tf.matmul(rows, upstream, transpose_a=True),
            sum_rows(upstream),
        )

    y = tf.nn.bias_add(tf.matmul(rows, kernel), bias)
    return tf.reshape(y, shape), gradient


def gelu(x: tf.Tensor, device_kind: str = "CPU") -> tf.Tensor:
    """Return x times the normal distribution function of x.

    TensorFlow's operations make a dozen passes over the memory; XLA fuses them into
    one, on a CPU in a sixth of the time. If XLA does not work on a GPU, they are used
    after all. 16-bit types are computed in float32.
    """
    if device_kind == "GPU" and xla_fault("GPU"):
        return tf.cast(tf.nn.gelu(widened(x), approximate=False), x.dtype)
    return _fused_gelu(x)


def _gelu(x):
    wide = widened(x)
    return tf.cast(wide * _normal_cdf(wide), x.dtype)


def _gelu_gradient(x, upstream):
    wide = widened(x)
    density = tf.exp(-0.5 * wide * wide) * (2 * math.pi) ** -0.5
    slope = _normal_cdf(wide) + wide * density
    return tf.cast(widened(upstream) * slope, x.dtype)


def _silu(x):
    wide = widened(x)
    return tf.cast(wide * tf.sigmoid(wide), x.dtype)


def _silu_gradient(x, upstream):
    wide = widened(x)
    share = tf.sigmoid(wide)
    slope = share * (1 + wide * (1 - share))
    return tf.cast(widened(upstream) * slope, x.dtype)


def _hard_silu(x):
    wide = widened(x)
    return tf.cast(wide * _clipped(wide + 3) / 6, x.dtype)


def _hard_silu_gradient(x, upstream):
    wide = widened(x)
    is_between = tf.cast(tf.abs(wide) < 3, wide.dtype)
    slope = _clipped(wide + 3) / 6 + is_between * wide / 6
    return tf.cast(widened(upstream) * slope, x.dtype)


def _clipped(x):
    return tf.clip_by_value(x, tf.zeros([], x.dtype), tf.constant(6, x.dtype))


def _clipped_gradient(x, upstream):
    return tf.where((x > 0) & (x < 6), upstream, tf.zeros([], x.dtype))


def _fused(forward, back):
    """Return an elementwise function and its gradient, each compiled by XLA."""
    forward, back = (
        tf.function(x, jit_compile=True, autograph=False) for x in (forward, back)
    )

    @tf.custom_gradient
    def activate(x):
        return forward(x), lambda upstream: back(x, upstream)

    return activate


_fused_gelu = _fused(_gelu, _gelu_gradient)
_relu6 = _fused(_clipped, _clipped_gradient)

# CPU forms of Keras functions, by name. TensorFlow's relu6 is slow in 16 bits only.
FUSED_ACTIVATIONS = {
    "gelu": gelu,
    "hard_silu": _fused(_hard_silu, _hard_silu_gradient),
    "relu6": lambda x: _relu6(x) if x.dtype.size < 4 else tf.nn.relu6(x),
    "silu": _fused(_silu, _silu_gradient),
}


@functools.cache
def xla_fault(device_kind: str) -> str:
    """Return why XLA fails on devices, such as a lack of `ptxas`; empty if it works."""
    trial = tf.function(lambda x: x + 1.0, jit_compile=True, autograph=False)
    for device in tf.config.list_logical_devices(device_kind)[:1]:
        try:
            with tf.init_scope(), tf.device(device.name):
                trial(tf.zeros([])).numpy()
        except tf.errors.OpError as error:
            return one_line(error, 120)
    return ""


def _normal_cdf(x):
    return 0.5 + 0.5 * tf.math.erf(x * 0.5**0.5)


def widened(x: tf.Tensor) -> tf.Tensor:
    """Cast 16-bit floats to float32."""
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def layer_normalization(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Normalize floats over the last axis, with XLA and sums that are products."""

    @tf.custom_gradient
    def normalize(x, scale, offset):
        y, *moments = _layer_normalization(x, scale, offset, epsilon)

        def gradient(upstream):
            by_x, by_scale = _layer_normalization_gradient(x, scale, upstream, *moments)
            rows = list(range(len(x.shape) - 1))
            by_scale, by_offset = (
                tf.cast(tf.reduce_sum(y, rows), scale.dtype)
                for y in (by_scale, widened(upstream))
            )
            return by_x, by_scale, by_offset

        return y, gradient

    return normalize(x, scale, offset)


@tf.function(jit_compile=True, autograph=False)
def _layer_normalization(x, scale, offset, epsilon):
    """Return the result, the means, and the factors to a variance of 1."""
    wide = widened(x)
    channels = x.shape[-1]
    mean = channel_sum(wide) / channels
    centered = wide - mean
    factor = tf.math.rsqrt(channel_sum(centered * centered) / channels + epsilon)
    y = centered * factor * widened(scale) + widened(offset)
    return tf.cast(y, x.dtype), mean, factor


@tf.function(jit_compile=True, autograph=False)
def _layer_normalization_gradient(x, scale, upstream, mean, factor):
    """Return the gradient of x, and terms whose sum is the gradient of the scale."""
    normalized = (widened(x) - mean) * factor
    upstream, scale = widened(upstream), widened(scale)
    by_scale = upstream * normalized
    mean, share = (channel_sum(y, scale) / x.shape[-1] for y in (upstream, by_scale))
    by_x = factor * (upstream * scale - mean - share * normalized)
    return tf.cast(by_x, x.dtype), by_scale


def channel_sum(x: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Sum [..., channels] to [..., 1] with weights, by default 1, as a product."""
    if weights is None:
        weights = tf.ones([x.shape[-1]], x.dtype)
    return tf.linalg.matvec(x, weights)[..., None]


def local_response_normalization(
    x: tf.Tensor,
    depth_radius: int,
    bias: float,
    alpha: float,
    beta: float,
    groups: int = 1,
    before: Sequence[tf.Tensor] = (),
    after: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Compute `tf.nn.lrn` in any float type.

    The sum over neighboring channels is a product with a band matrix of ones, faster on
    a CPU than TensorFlow's own kernel. If x is a slice of the channels, `before` and
    `after` are those next to it; they are read and not normalized.
    """
    pieces = [*before, x, *after]
    center = len(before)
    sizes = [piece.shape[-1] for piece in pieces]
    bands = channel_bands(sizes, center, depth_radius, groups, x.dtype)

    def product(values, band, transpose=False):
        flat = tf.reshape(values, [-1, values.shape[-1]])
        summed = tf.matmul(flat, band, transpose_b=transpose)
        shape = tf.concat([tf.shape(values)[:-1], [summed.shape[-1]]], 0)
        return tf.reshape(summed, shape)

    def power(denominator):
        if beta == 0.75:
            # Two square roots cost a tenth of a general power.
            root = tf.math.rsqrt(denominator)
            return root * tf.sqrt(root)
        return denominator ** tf.constant(-beta, denominator.dtype)

    @tf.custom_gradient
    def normalize(*pieces):
        x = pieces[center]
        sums = [product(p * p, b) for p, b in zip(pieces, bands, strict=True)]
        denominator = bias + alpha * (tf.add_n(sums) if len(sums) > 1 else sums[0])
        scale = power(denominator)

        def gradient(upstream):
            inner = upstream * x * scale / denominator
            gradients = [
                (-2 * alpha * beta) * p * product(inner, b, transpose=True)
                for p, b in zip(pieces, bands, strict=True)
            ]
            gradients[center] += upstream * scale
            return gradients

        return x * scale, gradient

    return normalize(*pieces)


def channel_bands(sizes, center, depth_radius, groups, dtype):
    """Return matrices of ones for channels within the radius of a center channel."""
    pieces = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    bands = []
    for piece in pieces:
        is_near = np.abs(piece[:, None] - pieces[center]) <= depth_radius
        if groups > 1:
            first, second = (
                p * groups // sizes[center] for p in (piece, pieces[center])
            )
            is_near &= first[:, None] == second
        bands.append(tf.constant(is_near, dtype))
    return bands
