"""Convolutions that are faster on CPUs than TensorFlow's own, or their gradients."""

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# oneDNN's gradient of a wider depthwise kernel is several times slower.
MAX_COLUMNS = 3


def strided_pixels(images: tf.Tensor, strides: Sequence[int]) -> tf.Tensor:
    """Return the pixels that a 1x1 kernel with strides reads."""
    # The gradient of a slice is slow on a CPU.
    return tf.nn.avg_pool2d(images, 1, strides, "VALID")


def conv2d_cpu(
    images: tf.Tensor, kernel: tf.Tensor, height: int, width: int, by_products: bool
) -> tf.Tensor:
    """Return the first rows and columns [n, height, width, filters] of a convolution.

    Padding is "same"; at most size // 2 rows or columns are left out. The gradient of
    the images is a convolution: TensorFlow's takes three times as long if the padding
    differs from side to side. `by_products` computes the gradient of the kernel as
    products.
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


def depthwise_conv2d_cpu(
    images: tf.Tensor, kernel: tf.Tensor, strides: Sequence[int], padding: str
) -> tf.Tensor:
    """Compute `tf.nn.depthwise_conv2d`, with two equal strides, and faster gradients.

    With strides TensorFlow's gradient of the images takes 7 to 46 times as long in
    bfloat16 as in float32.
    """
    strides = [1, *strides, 1]

    @tf.custom_gradient
    def convolve(images, kernel):
        outputs = tf.nn.depthwise_conv2d(images, kernel, strides, padding)

        def gradient(upstream):
            upstream = tf.ensure_shape(upstream, outputs.shape)
            return (
                _depthwise_images_gradient(images, kernel, upstream, strides, padding),
                _depthwise_kernel_gradient(images, kernel, upstream, strides, padding),
            )

        return outputs, gradient

    return convolve(images, kernel)


def _depthwise_images_gradient(images, kernel, upstream, strides, padding):
    if images.dtype == tf.bfloat16 and max(strides) > 1:
        kernel, upstream = (tf.cast(x, tf.float32) for x in (kernel, upstream))
    gradient = tf.nn.depthwise_conv2d_backprop_input(
        tf.shape(images), kernel, upstream, strides, padding
    )
    return tf.cast(gradient, images.dtype)


def _depthwise_kernel_gradient(images, kernel, upstream, strides, padding):
    height, width, *channels = kernel.shape

    def columns_gradient(images, count, padding):
        return tf.nn.depthwise_conv2d_backprop_filter(
            images, [height, count, *channels], upstream, strides, padding
        )

    if width <= MAX_COLUMNS:
        return columns_gradient(images, width, padding)
    # Explicit paddings of the operation itself are slow.
    padded = tf.pad(images, _edges(images, kernel, upstream, strides, padding))
    reached = (upstream.shape[2] - 1) * strides[2]
    blocks = []
    for first in range(0, width, MAX_COLUMNS):
        count = min(MAX_COLUMNS, width - first)
        columns = padded[:, :, first : first + reached + count]
        blocks.append(columns_gradient(columns, count, "VALID"))
    return tf.concat(blocks, 1)


def _edges(images, kernel, upstream, strides, padding):
    edges = [[0, 0] for _ in images.shape]
    for axis in (1, 2) if padding == "SAME" else ():
        needed = (upstream.shape[axis] - 1) * strides[axis] + kernel.shape[axis - 1]
        missing = max(needed - images.shape[axis], 0)
        edges[axis] = [missing // 2, missing - missing // 2]
    return edges


# Winograd's minimal filtering.

LARGEST_TILE = 4
# Interpolation points; a tile of m uses the first m + r - 2 and infinity. Few and small
# points lose the fewest digits.
POINTS = (0, 1, -1, Fraction(1, 2), -2, Fraction(-1, 2), 2)
# Transforming a kernel to a point takes as long as its product with this many tiles.
TILES_PER_KERNEL = 25
MANY_IMAGES = 128  # assumed if their number is not known


def winograd_conv2d(
    images: tf.Tensor, kernel: tf.Tensor, height: int, width: int
) -> tf.Tensor:
    """Compute `conv2d_cpu` for kernels of 3x3 or 5x5 with fewer multiplications.

    Winograd's minimal filtering (Lavin and Gray 2015, arXiv:1509.09308): tiles of 4x4
    take 36 products instead of 144 with 3x3 kernels, and 64 instead of 400 with 5x5. In
    float32 the result is within 1e-5 of the largest output, with 5x5 within 5e-5.
    """
    rows, columns, channels = images.shape[1:]
    size, filters = kernel.shape[1], kernel.shape[-1]
    count = images.shape[0] or MANY_IMAGES
    down = transforms(rows, height, size, count)
    across = transforms(columns, width, size, count)
    points = [len(down.kernel), len(across.kernel)]
    tiles = [down.tiles, across.tiles]
    every = points[0] * points[1]

    def along_rows(matrix, x):  # [length, ...] -> [new length, ...]
        return tf.matmul(tf.constant(matrix, x.dtype), x)

    # Images innermost but for the channels: every transform is then one product, or one
    # for each row, of a small matrix and a very wide one. All tiles of a point are
    # multiplied with the same kernel.
    x = tf.reshape(tf.transpose(images, [1, 2, 0, 3]), [rows, -1])
    x = tf.reshape(along_rows(down.inputs, x), [points[0] * tiles[0], columns, -1])
    x = tf.reshape(along_rows(across.inputs, x), [points[0], tiles[0], points[1], -1])
    x = tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [every, -1, channels])

    k = tf.reshape(kernel, [size, -1])
    k = tf.reshape(along_rows(down.kernel, k), [points[0], size, -1])
    k = tf.reshape(along_rows(across.kernel, k), [every, channels, filters])

    y = tf.reshape(tf.matmul(x, k), [points[0], -1])
    down_length, across_length = len(down.outputs), len(across.outputs)
    y = tf.reshape(along_rows(down.outputs, y), [down_length, points[1], -1])
    y = along_rows(across.outputs, y)
    y = tf.reshape(y, [down_length, across_length, *tiles, -1, filters])
    y = tf.transpose(y, [4, 2, 0, 3, 1, 5])
    y = tf.reshape(y, [-1, tiles[0] * down_length, tiles[1] * across_length, filters])
    # Other slices have a slow gradient.
    return tf.slice(y, [0, 0, 0, 0], [-1, height, width, -1])


class Transforms(NamedTuple):
    """Float64 matrices that transform the tiles of a line to points and back."""

    tiles: int  # number of tiles; the last one may go beyond the line
    inputs: np.ndarray  # [points * tiles, inputs], all tiles of the first point first
    kernel: np.ndarray  # [points, size]
    outputs: np.ndarray  # [outputs of a tile, points]


@functools.cache
def transforms(
    num_inputs: int, num_outputs: int, size: int, num_images: int
) -> Transforms:
    """Return the transforms for the first outputs of a line padded with zeros.

    Tiles of more than LARGEST_TILE outputs are two neighbors, each with its own points:
    7 outputs take 11 points; two tiles of 4 take 12, but share 6 transformed kernels.
    """
    more = size - 1

    def cost(tile):  # for a square image
        points = len(_tile_transforms(tile, size).kernel)
        tiles = -(-num_outputs // tile)
        return points**2 * (num_images * tiles**2 + TILES_PER_KERNEL)

    tile = min(range(1, 2 * LARGEST_TILE), key=cost)
    tiles = -(-num_outputs // tile)
    part = _tile_transforms(tile, size)
    inputs = np.zeros([len(part.kernel), tiles, tiles * tile + more + num_inputs])
    for i in range(tiles):
        inputs[:, i, i * tile : (i + 1) * tile + more] = part.inputs
    inputs = inputs[..., more // 2 :][..., :num_inputs].reshape(-1, num_inputs)
    return part._replace(tiles=tiles, inputs=inputs)


def _tile_transforms(tile, size):
    """Return the transforms of a tile (Toom and Cook): polynomials at the points."""
    if tile > LARGEST_TILE:
        parts = [_tile_transforms(x, size) for x in (-(-tile // 2), tile // 2)]
        first, second = parts
        inputs = np.zeros([sum(len(x.inputs) for x in parts), tile + size - 1])
        inputs[: len(first.inputs), : len(first.inputs)] = first.inputs
        inputs[len(first.inputs) :, -len(second.inputs) :] = second.inputs
        outputs = np.zeros([tile, len(inputs)])
        outputs[: len(first.outputs), : len(first.inputs)] = first.outputs
        outputs[len(first.outputs) :, len(first.inputs) :] = second.outputs
        return Transforms(
            1, inputs, np.concatenate([first.kernel, second.kernel]), outputs
        )
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
    return Transforms(1, inputs, kernel, outputs)


def _with_roots(roots):
    """Return coefficients, lowest power first, of the product of all (x - root)."""
    product = [Fraction(1)]
    for root in roots:
        raised, lowered = [Fraction(0), *product], [*product, Fraction(0)]
        product = [a - root * b for a, b in zip(raised, lowered, strict=True)]
    return product
