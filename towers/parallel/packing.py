"""Buffers in which several tensors travel together.

Few large copies between devices are faster than many small ones.
"""

from collections.abc import Sequence

import tensorflow as tf


def pack(tensors: Sequence[tf.Tensor], device: str) -> tf.Tensor:
    """The elements of tensors of one type as a vector; a single tensor as it is."""
    if len(tensors) == 1:
        return tensors[0]
    with tf.device(device):
        return tf.concat([_flat(tensor) for tensor in tensors], 0)


def unpack(
    buffer: tf.Tensor, shapes: Sequence[tf.TensorShape], device: str
) -> list[tf.Tensor]:
    """The tensors of a buffer, by their shapes."""
    if len(shapes) == 1:
        return [buffer]  # was not packed
    with tf.device(device):
        pieces = tf.split(buffer, [shape.num_elements() for shape in shapes])
        return [
            piece if shape.rank == 1 else tf.reshape(piece, shape)
            for piece, shape in zip(pieces, shapes, strict=True)
        ]


def _flat(tensor):
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])
