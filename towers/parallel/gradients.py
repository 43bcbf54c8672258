"""The shares of a batch, and weighted means over the towers."""

import itertools
from collections.abc import Mapping, Sequence

import tensorflow as tf


def in_dtype(number: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
    """A scalar in a type; `tf.cast` rounds a Python number to float32 on its way."""
    return tf.cast(tf.convert_to_tensor(number, dtype_hint=dtype), dtype)


def shares(num_images: int, num_towers: int) -> list[int]:
    """Images per tower; where the batch does not divide, the first take one more."""
    least, more = divmod(num_images, num_towers)
    return [least + (tower < more) for tower in range(num_towers)]


def split_batch(
    batch: Mapping[str, tf.Tensor], sizes: Sequence[int], accumulate_steps: int = 1
) -> list[dict[str, tf.Tensor]]:
    """Cuts every tensor of a batch along its first axis into pieces of `sizes`.

    With several micro-batches each of them is cut so; a piece then has a leading axis
    of `accumulate_steps`.
    """
    axis = 0
    if accumulate_steps > 1:
        axis, size = 1, sum(sizes)
        batch = {
            name: tf.reshape(value, [accumulate_steps, size, *value.shape[1:]])
            for name, value in batch.items()
        }
    ends = list(itertools.accumulate(sizes))
    return [
        {name: _piece(value, end - size, size, axis) for name, value in batch.items()}
        for size, end in zip(sizes, ends, strict=True)
    ]


def _piece(value, first, size, axis):
    """Not of `tf.split`, which on GPUs takes no int64."""
    begin, sizes = [0] * value.shape.rank, [-1] * value.shape.rank
    begin[axis], sizes[axis] = first, size
    with tf.device(value.device):
        return tf.slice(value, begin, sizes, name="share")


def tower_weights(sizes: Sequence[int]) -> list[float]:
    """Per tower its share of the images."""
    return [size / sum(sizes) for size in sizes]


def average_gradients(
    tower_grads: Sequence[Sequence[tf.Tensor]], weights: Sequence[float]
) -> list[tf.Tensor]:
    """The gradient of the mean loss over the whole batch.

    Args:
        tower_grads: per tower, the gradients of its own mean loss, in the same order.
        weights: per tower, its share of the images, adding up to 1.

    Raises:
        ValueError: the lengths differ.
    """
    if len(weights) != len(tower_grads):
        raise ValueError(f"{len(tower_grads)} towers but {len(weights)} weights")
    return [weighted_mean(x, weights) for x in zip(*tower_grads, strict=True)]


def weighted_mean(tensors: Sequence[tf.Tensor], weights: Sequence[float]) -> tf.Tensor:
    """The sum of weight * tensor, the weights adding up to 1; one comes back as is."""
    if len(tensors) == 1:
        return tensors[0]
    if len(set(weights)) == 1:
        # Half the passes over the memory.
        return tf.add_n(tensors) * tf.constant(weights[0], tensors[0].dtype)
    return tf.add_n(
        [
            tensor * tf.constant(weight, tensor.dtype)
            for tensor, weight in zip(tensors, weights, strict=True)
        ]
    )


def squared_norm(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of squares of all elements of all gradients, a scalar.

    It is finite where every element is (and smaller than 1e19 in float32), so one
    number says whether a tower's gradients can be used.
    """
    return 2 * tf.add_n([tf.nn.l2_loss(gradient) for gradient in gradients])
