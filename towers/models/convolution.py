"""3x3 convolutions that compute less where images are small or a pool follows."""

import itertools

import keras
import numpy as np
import tensorflow as tf

# With more pixels the products with zeros around the images take longer than a
# convolution does.
MOST_PIXELS_OF_A_PRODUCT = 9
SIZE = 3


class SameConv2D(keras.layers.Conv2D):
    """`keras.layers.Conv2D` with kernels of 3x3, stride 1 and padding "same".

    Images of at most nine pixels are multiplied by one matrix of the kernel's parts, in
    which a CPU computes several times as fast as in a convolution of so few.

    Args:
        filters: as of `keras.layers.Conv2D`.
        before_pool: a pool of 2x2 follows that drops the last row or column where their
            number is odd; they are not computed, so that images [n, 7, 5, c] become
            [n, 6, 4, filters].

    Raises:
        ValueError: strides, dilation, groups or another order of axes are asked for.
    """

    def __init__(self, filters: int, before_pool: bool = False, **kwargs):
        super().__init__(filters, SIZE, padding="same", **kwargs)
        self.before_pool = before_pool
        plain = {
            "strides": (1, 1),
            "dilation_rate": (1, 1),
            "groups": 1,
            "data_format": "channels_last",
        }
        for name, only in plain.items():
            if getattr(self, name) != only:
                raise ValueError(
                    f"{name}={getattr(self, name)}: SameConv2D has {only} only; use "
                    "keras.layers.Conv2D"
                )

    def convolution_op(self, inputs, kernel):
        kernel = tf.convert_to_tensor(kernel)
        height, width = inputs.shape[1:3]
        if self.before_pool and (height % 2 or width % 2):
            return _convolution_of_even_sizes(inputs, kernel)
        if height * width <= MOST_PIXELS_OF_A_PRODUCT:
            return _product(inputs, kernel)
        return super().convolution_op(inputs, kernel)

    def compute_output_shape(self, input_shape):
        count, *sizes, _ = input_shape
        if self.before_pool:
            sizes = [size - size % 2 for size in sizes]
        return count, *sizes, self.filters

    def get_config(self):
        config = super().get_config() | {"before_pool": self.before_pool}
        for settled in ("kernel_size", "padding"):
            del config[settled]
        return config


@tf.custom_gradient
def _convolution_of_even_sizes(images, kernel):
    """Without the last of an odd number of rows, and of columns.

    The gradient of the images is written as a convolution, too: TensorFlow's own takes
    three times as long where the padding differs from side to side.
    """
    before = [[1, size % 2 == 0] for size in images.shape[1:3]]
    outputs = tf.nn.conv2d(images, kernel, 1, [[0, 0], *before, [0, 0]])

    def gradient(upstream):
        flipped = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
        around = [[1, 1 + size % 2] for size in images.shape[1:3]]
        of_images = tf.nn.conv2d(upstream, flipped, 1, [[0, 0], *around, [0, 0]])
        of_kernel = tf.raw_ops.Conv2DBackpropFilter(
            input=tf.pad(images, [[0, 0], *before, [0, 0]]),
            filter_sizes=kernel.shape,
            out_backprop=upstream,
            strides=[1, 1, 1, 1],
            padding="VALID",
        )
        return of_images, of_kernel

    return outputs, gradient


def _product(images, kernel):
    """Images [n, height, width, c] as rows of one product with a matrix
    [height * width * c, height * width * filters] of the kernel's parts."""
    height, width, channels = images.shape[1:]
    filters = kernel.shape[-1]
    pixels = list(itertools.product(range(height), range(width)))
    # For each pixel read and each written, which of the kernel's parts it takes.
    taken = np.zeros([len(pixels), len(pixels), SIZE * SIZE])
    for (i, (row, column)), (o, (to_row, to_column)) in itertools.product(
        enumerate(pixels), repeat=2
    ):
        part = row - to_row + 1, column - to_column + 1
        if all(0 <= place < SIZE for place in part):
            taken[i, o, part[0] * SIZE + part[1]] = 1
    parts = tf.reshape(kernel, [SIZE * SIZE, channels * filters])
    blocks = tf.reshape(
        tf.constant(taken.reshape([-1, SIZE * SIZE]), kernel.dtype) @ parts,
        [len(pixels), len(pixels), channels, filters],
    )
    matrix = tf.reshape(
        tf.transpose(blocks, [0, 2, 1, 3]),
        [len(pixels) * channels, len(pixels) * filters],
    )
    flat = tf.reshape(images, [-1, len(pixels) * channels])
    return tf.reshape(flat @ matrix, [-1, height, width, filters])
