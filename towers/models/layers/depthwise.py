"""Depthwise convolutions for CPUs, whose gradients are faster than TensorFlow's own."""

from collections.abc import Sequence

import tensorflow as tf

# oneDNN's gradient of a kernel is several times slower where the kernel is wider.
MOST_COLUMNS = 3


def depthwise_conv2d_cpu(
    images: tf.Tensor, kernel: tf.Tensor, strides: Sequence[int], padding: str
) -> tf.Tensor:
    """`tf.nn.depthwise_conv2d` with other gradients.

    With strides TensorFlow's gradient of the images takes 7 to 46 times as long in
    bfloat16 as in float32, in which it is computed here. The gradient of a wide kernel
    is computed in blocks of MOST_COLUMNS columns.

    Args:
        images: floats [n, rows, columns, channels]; n alone may be unknown.
        kernel: [height, width, channels, filters of a channel], same dtype.
        strides: along rows and columns, which are equal.
        padding: VALID or SAME.
    """
    strides = [1, *strides, 1]

    @tf.custom_gradient
    def convolve(images, kernel):
        outputs = tf.nn.depthwise_conv2d(images, kernel, strides, padding)

        def gradient(upstream):
            upstream = tf.ensure_shape(upstream, outputs.shape)
            return (
                _images_gradient(images, kernel, upstream, strides, padding),
                _kernel_gradient(images, kernel, upstream, strides, padding),
            )

        return outputs, gradient

    return convolve(images, kernel)


def _images_gradient(images, kernel, upstream, strides, padding):
    if images.dtype == tf.bfloat16 and max(strides) > 1:
        kernel, upstream = (tf.cast(x, tf.float32) for x in (kernel, upstream))
    gradient = tf.nn.depthwise_conv2d_backprop_input(
        tf.shape(images), kernel, upstream, strides, padding
    )
    return tf.cast(gradient, images.dtype)


def _kernel_gradient(images, kernel, upstream, strides, padding):
    height, width, *channels = kernel.shape

    def columns_gradient(images, count, padding):
        return tf.nn.depthwise_conv2d_backprop_filter(
            images, [height, count, *channels], upstream, strides, padding
        )

    if width <= MOST_COLUMNS:
        return columns_gradient(images, width, padding)
    # Explicit paddings of the operation itself are slow.
    padded = tf.pad(images, _edges(images, kernel, upstream, strides, padding))
    reached = (upstream.shape[2] - 1) * strides[2]
    blocks = []
    for first in range(0, width, MOST_COLUMNS):
        count = min(MOST_COLUMNS, width - first)
        columns = padded[:, :, first : first + reached + count]
        blocks.append(columns_gradient(columns, count, "VALID"))
    return tf.concat(blocks, 1)


def _edges(images, kernel, upstream, strides, padding):
    """The rows and columns of zeros around images, as of `tf.pad`."""
    edges = [[0, 0] for _ in images.shape]
    for axis in (1, 2) if padding == "SAME" else ():
        needed = (upstream.shape[axis] - 1) * strides[axis] + kernel.shape[axis - 1]
        missing = max(needed - images.shape[axis], 0)
        edges[axis] = [missing // 2, missing - missing // 2]
    return edges
