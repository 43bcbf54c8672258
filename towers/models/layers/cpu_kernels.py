"""Operations for CPUs: faster there than TensorFlow's own, or without their faults.

Convolutions are in `cpu_convolutions`.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers.messages import one_line


def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Floats [..., channels] and a bias [channels] for each of their last axis.

    On a CPU TensorFlow adds up the gradient of a bias in bfloat16 where x is, in which
    a sum of ones ends at 256; here it is summed in float32.
    """
    if x.dtype != tf.bfloat16:
        return tf.nn.bias_add(x, bias)

    @tf.custom_gradient
    def add(x, bias):
        return tf.nn.bias_add(x, bias), lambda upstream: (upstream, sum_rows(upstream))

    return add(x, bias)


def sum_rows(x: tf.Tensor) -> tf.Tensor:
    """[..., channels] to [channels], as a product with ones, whose sums are float32 in
    bfloat16 too.
    """
    rows = tf.reshape(x, [-1, x.shape[-1]])
    return tf.matmul(tf.ones([1, tf.shape(rows)[0]], x.dtype), rows)[0]


@tf.custom_gradient
def dense(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """X kernel + bias of floats [..., inputs], with a kernel [inputs, units].

    With nothing reshaped between the two, TensorFlow adds the bias within the product.
    The gradient of the bias is as in `add_bias`.
    """
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
    """X times the normal distribution function of x, of floats of any shape.

    As TensorFlow composes it, it is a dozen passes over the memory, forward and back;
    XLA fuses each into one, on a CPU in a sixth of the time, which is the time of a
    rectifier. On a GPU where XLA does not work it is TensorFlow's operations, and the
    gradient keeps x alone. 16-bit types are computed in float32.
    """
    forward, back = _gelu, _gelu_gradient
    if not (device_kind == "GPU" and xla_fault("GPU")):
        forward, back = _COMPILED_GELU

    @tf.custom_gradient
    def activate(x):
        return forward(x), lambda upstream: back(x, upstream)

    return activate(x)


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


def _compiled(*calls):
    return [tf.function(x, jit_compile=True, autograph=False) for x in calls]


def _fused(forward, back):
    """An elementwise function with its gradient, each in one pass over the memory."""
    forward, back = _compiled(forward, back)

    @tf.custom_gradient
    def activate(x):
        return forward(x), lambda upstream: back(x, upstream)

    return activate


_COMPILED_GELU = _compiled(_gelu, _gelu_gradient)
_relu6 = _fused(_clipped, _clipped_gradient)

# Functions of Keras by name, for CPUs. TensorFlow's relu6 is slow in 16 bits alone.
FUSED_ACTIVATIONS = {
    "gelu": gelu,
    "hard_silu": _fused(_hard_silu, _hard_silu_gradient),
    "relu6": lambda x: _relu6(x) if x.dtype.size < 4 else tf.nn.relu6(x),
    "silu": _fused(_silu, _silu_gradient),
}


@functools.cache
def xla_fault(device_kind: str) -> str:
    """Why XLA compiles nothing for the devices of a kind, in a line; empty where it
    does, and where there is no such device.

    For GPUs it needs programs that an installation may lack, such as `ptxas`: a trial
    shows it.
    """
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


def widened(x):
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def layer_normalization(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Of floats [..., channels] over the last axis (Ba et al. 2016, arXiv:1607.06450),
    in a pass forward and one back: XLA fuses them, and sums over channels are products,
    which are faster than its sums. 16-bit types are computed in float32.
    """

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
    """Returns the result, the means, and the factors to a variance of 1."""
    wide = widened(x)
    channels = x.shape[-1]
    mean = channel_sum(wide) / channels
    centered = wide - mean
    factor = tf.math.rsqrt(channel_sum(centered * centered) / channels + epsilon)
    y = centered * factor * widened(scale) + widened(offset)
    return tf.cast(y, x.dtype), mean, factor


@tf.function(jit_compile=True, autograph=False)
def _layer_normalization_gradient(x, scale, upstream, mean, factor):
    """Gradient of x, and terms that add up to the gradient of the scale."""
    normalized = (widened(x) - mean) * factor
    upstream, scale = widened(upstream), widened(scale)
    by_scale = upstream * normalized
    mean, share = (channel_sum(y, scale) / x.shape[-1] for y in (upstream, by_scale))
    by_x = factor * (upstream * scale - mean - share * normalized)
    return tf.cast(by_x, x.dtype), by_scale


def channel_sum(x: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """[..., channels] to [..., 1], as a product with the weights, by default 1."""
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
    """`tf.nn.lrn` of floats [..., channels] in any float type, with its gradient.

    The sum over neighboring channels is a product with a band matrix of ones, that is a
    1x1 convolution, and the gradient is written out; on a CPU this is faster than
    TensorFlow's own kernel. `before` and `after` are the channels next to x, in their
    order, where x is a slice of the whole tensor; they are read and not normalized.
    """
    pieces = [*before, x, *after]
    center = len(before)
    bands = channel_bands(
        [p.shape[-1] for p in pieces], center, depth_radius, groups, x.dtype
    )

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
    """Per piece of a size a matrix [its channels, channels of the center piece], 1 for
    those within the radius and the same group of the center piece, else 0.
    """
    starts = np.cumsum([0, *sizes])
    places = [
        np.arange(size) + first for size, first in zip(sizes, starts, strict=False)
    ]
    bands = []
    for place in places:
        is_near = np.abs(place[:, None] - places[center]) <= depth_radius
        if groups > 1:
            first, second = (
                p * groups // sizes[center] for p in (place, places[center])
            )
            is_near &= first[:, None] == second
        bands.append(tf.constant(is_near, dtype))
    return bands
