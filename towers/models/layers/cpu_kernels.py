"""Operations for CPUs: faster there than TensorFlow's own, or without their faults."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers.errors import one_line

# Convolutions.


def strided_pixels(images: tf.Tensor, strides: Sequence[int]) -> tf.Tensor:
    """Pixels that a kernel of 1x1 with strides reads, of images [n, height, width, c]:
    by a pool, because the gradient of a slice is slow on a CPU."""
    return tf.nn.avg_pool2d(images, 1, strides, "VALID")


def conv2d_cpu(
    images: tf.Tensor, kernel: tf.Tensor, height: int, width: int, by_products: bool
) -> tf.Tensor:
    """The first rows and columns of a convolution with zeros around the images, whose
    gradients are not TensorFlow's own.

    The gradient of the images is written as a convolution: TensorFlow's takes three
    times as long where the padding differs from side to side.

    Args:
        images: [n, rows, columns, channels].
        kernel: [size, size, channels, filters], of an odd size, same dtype.
        height, width: how many rows and columns, at most size // 2 less than there are.
        by_products: compute the gradient of the kernel as matrix products.

    Returns:
        [n, height, width, filters].
    """
    size = kernel.shape[0]
    half = size // 2
    dropped = [images.shape[1] - height, images.shape[2] - width]
    zeros = [[0, 0], *([half, half - some] for some in dropped), [0, 0]]
    zeros_of_gradient = [[0, 0], *([half, half + some] for some in dropped), [0, 0]]
    kernel_gradient = _kernel_gradient_by_products if by_products else _kernel_gradient

    @tf.custom_gradient
    def convolve(images, kernel):
        def gradient(upstream):
            turned = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
            return (
                tf.nn.conv2d(upstream, turned, 1, zeros_of_gradient),
                kernel_gradient(tf.pad(images, zeros), upstream, kernel.shape),
            )

        return tf.nn.conv2d(images, kernel, 1, zeros), gradient

    return convolve(images, kernel)


def _kernel_gradient(padded, upstream, shape):
    return tf.raw_ops.Conv2DBackpropFilter(
        input=padded,
        filter_sizes=shape,
        out_backprop=upstream,
        strides=[1, 1, 1, 1],
        padding="VALID",
    )


def _kernel_gradient_by_products(padded, upstream, shape):
    """One product for each pixel of the kernel, of all pixels that it is laid on."""
    size, _, channels, filters = shape
    height, width = upstream.shape[1:3]
    upstream = tf.reshape(upstream, [-1, filters])
    windows = [
        padded[:, row : row + height, column : column + width]
        for row in range(size)
        for column in range(size)
    ]
    products = [
        tf.matmul(tf.reshape(x, [-1, channels]), upstream, transpose_a=True)
        for x in windows
    ]
    return tf.reshape(tf.stack(products), shape)


# Biases, activation and normalization.


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
    bfloat16 too."""
    rows = tf.reshape(x, [-1, x.shape[-1]])
    return tf.matmul(tf.ones([1, tf.shape(rows)[0]], x.dtype), rows)[0]


def gelu(x: tf.Tensor, device_kind: str = "CPU") -> tf.Tensor:
    """x times the normal distribution function of x, of floats of any shape.

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
    """Over the last axis (Ba et al. 2016, arXiv:1607.06450), in a pass forward and one
    back: XLA fuses them, and sums over channels are products, which are faster than its
    sums. 16-bit types are computed in float32.

    Args:
        x: floats [..., channels].
        scale, offset: [channels].
        epsilon: is added to the variance.
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
    TensorFlow's own kernel.

    Args:
        before, after: the channels next to x, in their order, where x is a slice of the
            whole tensor; they are read and not normalized.

    Raises:
        ValueError: the groups do not divide the channels.
    """
    channels = x.shape[-1]
    if channels % groups:
        raise ValueError(f"{groups} groups do not divide {channels} channels")
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
    """Per piece a matrix [its channels, channels of the center piece], 1 for those
    within the radius, else 0.

    Args:
        sizes: channels of each piece.
        center: index of the piece that is normalized.
        groups: of the center piece; the channels of other pieces are in none.
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
