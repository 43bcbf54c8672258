"""Convolutions with fewer multiplications, as products of large matrices.

Winograd's minimal filtering (Lavin and Gray 2015, arXiv:1509.09308): with a kernel of
length r the outputs of a line are made in tiles of m, each from m + r - 1 products of
transformed inputs with a transformed kernel where the definition has r m. In two
dimensions tiles of 4x4 need 36 instead of 144 with kernels of 3x3, and 64 instead of
400 with kernels of 5x5.
"""

import functools
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import tensorflow as tf

LARGEST_TILE = 4
# Those of a tile of m are the first m + r - 2 and infinity. Few and small ones lose the
# fewest digits.
POINTS = (0, 1, -1, Fraction(1, 2), -2, Fraction(-1, 2), 2)


def convolution(
    images: tf.Tensor, kernel: tf.Tensor, height: int, width: int
) -> tf.Tensor:
    """The first rows and columns of a convolution with zeros around the images.

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
