"""The shares of a batch, and weighted means over the towers."""

import itertools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers.parallel.devices import to_device
from towers.parallel.packing import pack, unpack


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


def all_average_states(
    states: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    weights: Sequence[float],
    targets: Sequence[str] | None = None,
) -> list[list[tf.Tensor]]:
    """The towers' new model states, averaged on the first target.

    Where all towers agree the mean is that value to the last bit, so that what no
    training changes, such as frozen filters, stays what it is. Entries that are not
    floats must agree and are taken from the first tower. The entries are small and
    many: they travel as one buffer, never narrowed, because statistics would no longer
    move once a change is below a rounding.

    Args:
        states: per device its list of entries.
        devices: one device name per list.
        weights: per device its share of the images, adding up to 1.
        targets: devices that get the mean; `devices` by default.

    Returns:
        Per target the list of means.
    """
    targets, first = targets or devices, states[0]
    results = [[None] * len(first) for _ in targets]
    buffers = {}  # type -> places of its entries
    for place, tensor in enumerate(first):
        if len(states) > 1 and tensor.dtype.is_floating:
            buffers.setdefault(tensor.dtype, []).append(place)
            continue
        for target, result in zip(targets, results, strict=True):
            result[place] = to_device(tensor, target)
    for places in buffers.values():
        shapes = [first[i].shape for i in places]
        sent = [
            pack([state[i] for i in places], device)
            for state, device in zip(states, devices, strict=True)
        ]
        with tf.device(targets[0]):
            mean = _mean_around_first(sent, weights)
        for target, result in zip(targets, results, strict=True):
            means = unpack(to_device(mean, target), shapes, target)
            for i, tensor in zip(places, means, strict=True):
                result[i] = tensor
    return results


def _mean_around_first(tensors, weights):
    first = tensors[0]
    differences = [
        (tensor - first) * tf.constant(weight, first.dtype)
        for tensor, weight in zip(tensors[1:], weights[1:], strict=True)
    ]
    return first + tf.add_n(differences)


def squared_norm(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of squares of all elements of all gradients, a scalar.

    It is finite where every element is (and smaller than 1e19 in float32), so one
    number says whether a tower's gradients can be used.
    """
    return 2 * tf.add_n([tf.nn.l2_loss(gradient) for gradient in gradients])
