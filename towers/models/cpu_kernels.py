"""Operations for CPUs: faster there than TensorFlow's own, or without their faults."""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# Convolutions by Winograd.

LARGEST_TILE = 4
# Those of a tile of m are the first m + r - 2 and infinity. Few and small ones lose the
# fewest digits.
POINTS = (0, 1, -1, Fraction(1, 2), -2, Fraction(-1, 2), 2)


def winograd_conv2d(
    images: tf.Tensor, kernel: tf.Tensor, height: int, width: int
) -> tf.Tensor:
    """The first rows and columns of a convolution with zeros around the images, with
    fewer multiplications, as products of large matrices.

    Winograd's minimal filtering (Lavin and Gray 2015, arXiv:1509.09308): with a kernel
    of length r the outputs of a line are made in tiles of m, each from m + r - 1
    products of transformed inputs with a transformed kernel where the definition has
    r m. In two dimensions tiles of 4x4 need 36 instead of 144 with kernels of 3x3, and
    64 instead of 400 with kernels of 5x5.

    Args:
        images: [n, rows, columns, channels].
        kernel: [3, 3, channels, filters], or 5x5, same dtype.
        height, width: how many rows and columns.

    Returns:
        [n, height, width, filters]; in float32 and with 64 to 512 channels within 1e-5
        of the largest output, with 5x5 within 5e-5.
    """
    rows, columns, channels = images.shape[1:]
    size, filters = kernel.shape[1], kernel.shape[-1]
    down, across = transforms(rows, height, size), transforms(columns, width, size)
    points = [len(down.kernel), len(across.kernel)]

    def along_rows(matrix, x):  # [length, ...] -> [new length, ...]
        return tf.matmul(tf.constant(matrix, x.dtype), x)

    # Images innermost but for the channels: every transform is then one product, or one
    # for each row, of a small matrix and a very wide one.
    x = tf.reshape(tf.transpose(images, [1, 2, 0, 3]), [rows, -1])
    x = tf.reshape(along_rows(down.inputs, x), [points[0], columns, -1])
    x = along_rows(across.inputs, x)

    k = tf.reshape(kernel, [size, -1])
    k = tf.reshape(along_rows(down.kernel, k), [points[0], size, -1])
    k = along_rows(across.kernel, k)

    every = points[0] * points[1]
    y = tf.matmul(
        tf.reshape(x, [every, -1, channels]), tf.reshape(k, [every, channels, filters])
    )

    y = along_rows(across.outputs, tf.reshape(y, [*points, -1]))
    y = along_rows(down.outputs, tf.reshape(y, [points[0], -1]))
    return tf.transpose(tf.reshape(y, [height, width, -1, filters]), [2, 0, 1, 3])


class Transforms(NamedTuple):
    """Matrices that transform a line to points and back, float64.

    Attributes:
        inputs: [points, inputs].
        kernel: [points, size].
        outputs: [outputs, points].
    """

    inputs: np.ndarray
    kernel: np.ndarray
    outputs: np.ndarray


@functools.cache
def transforms(num_inputs: int, num_outputs: int, size: int) -> Transforms:
    """The transforms for the first outputs of a line, with zeros around the inputs so
    that the kernel of an odd size is centered on each."""
    tiles = np.diff(
        np.linspace(0, num_outputs, -(-num_outputs // LARGEST_TILE) + 1).round()
    ).astype(int)
    more = size - 1
    num_points = num_outputs + more * len(tiles)
    inputs = np.zeros([num_points, num_inputs + 2 * more])
    kernel = np.zeros([num_points, size])
    outputs = np.zeros([num_outputs, num_points])
    output = point = 0
    for tile in tiles:
        part = _tile_transforms(tile, size)
        points = slice(point, point + tile + more)
        inputs[points, output : output + tile + more] = part.inputs
        kernel[points] = part.kernel
        outputs[output : output + tile, points] = part.outputs
        output, point = output + tile, points.stop
    return Transforms(inputs[:, more // 2 :][:, :num_inputs], kernel, outputs)


def _tile_transforms(tile, size):
    """The transforms of one tile and all of its inputs, by Toom and Cook: the values of
    polynomials at the points."""
    num_points = tile + size - 1
    finite = [Fraction(point) for point in POINTS[: num_points - 1]]
    inputs = np.zeros([num_points, num_points])
    kernel = np.zeros([num_points, size])
    outputs = np.zeros([tile, num_points])
    for i, point in enumerate(finite):
        others = finite[:i] + finite[i + 1 :]
        scale = np.prod([point - other for other in others])
        kernel[i] = [point**power / scale for power in range(size)]
        outputs[:, i] = [point**power for power in range(tile)]
        inputs[i, :-1] = _with_roots(others)
    kernel[-1, -1] = outputs[-1, -1] = 1  # infinity
    inputs[-1] = _with_roots(finite)
    return Transforms(inputs, kernel, outputs)


def _with_roots(roots):
    """Coefficients, lowest power first, of the product of all (x - root)."""
    product = [Fraction(1)]
    for root in roots:
        raised, lowered = [Fraction(0), *product], [*product, Fraction(0)]
        product = [a - root * b for a, b in zip(raised, lowered, strict=True)]
    return product


# Other convolutions.


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


# Activation and normalization.


@tf.custom_gradient
def gelu(x: tf.Tensor) -> tf.Tensor:
    """x times the normal distribution function of x, of floats of any shape.

    As TensorFlow composes it, it is a dozen passes over the memory, forward and back;
    here XLA fuses each into one, in a sixth of the time on a CPU, which is the time of
    a rectifier. 16-bit types are computed in float32.
    """
    return _gelu(x), lambda upstream: _gelu_gradient(x, upstream)


@tf.function(jit_compile=True, autograph=False)
def _gelu(x):
    wide = widened(x)
    return tf.cast(wide * _normal_cdf(wide), x.dtype)


@tf.function(jit_compile=True, autograph=False)
def _gelu_gradient(x, upstream):
    wide = widened(x)
    density = tf.exp(-0.5 * wide * wide) * (2 * math.pi) ** -0.5
    slope = _normal_cdf(wide) + wide * density
    return tf.cast(widened(upstream) * slope, x.dtype)


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
    """With the means, and the factors to a variance of 1."""
    wide = widened(x)
    channels = x.shape[-1]
    mean = channel_sum(wide) / channels
    centered = wide - mean
    factor = tf.math.rsqrt(channel_sum(centered * centered) / channels + epsilon)
    y = centered * factor * widened(scale) + widened(offset)
    return tf.cast(y, x.dtype), mean, factor


@tf.function(jit_compile=True, autograph=False)
def _layer_normalization_gradient(x, scale, upstream, mean, factor):
    """That of x, and what adds up to that of the scale."""
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
        before, after: the channels next to those of x, in their order, where x is a
            slice of the whole tensor; they are read and not normalized.

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
