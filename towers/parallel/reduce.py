"""Means over the towers: the shares of a batch, and all-reduce.

A strategy averages a list of vectors per tower: `average_gradients` on one device,
`all_reduce` on all. All algorithms are plain data flow in one graph: a copy to another
device is an identity there. Every element of a sum is computed once and then copied, so
that all devices have the same bits.

    star    all tensors are sent to the first device, which adds them and distributes
            the sum (the `allreduce` of Dive into Deep Learning)
    tree    neighbors add up pairwise, in log2 rounds, then the sum goes back down
    ring    the tensor is cut into one piece per device; each piece travels once around
            to be added up, and once more to be distributed (Patarasuk and Yuan 2009)
    nccl    NVIDIA's library, through TensorFlow; needs two or more physical GPUs. All
            results must be read: TensorFlow prunes an NcclAllReduce whose result is not
            used, and the others wait for it (TensorFlow's issue 19690)
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf
from numpy.typing import ArrayLike

from towers.data.share import shares
from towers.errors import ConfigError
from towers.parallel.devices import device_of


def in_dtype(number: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
    """Return a scalar of a type; `tf.cast` would round a Python number to float32."""
    return tf.cast(tf.convert_to_tensor(number, dtype_hint=dtype), dtype)


def without_int32(batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Cast int32 to int64, because int32 tensors of a GPU are in host memory."""
    return {
        name: tf.cast(x, tf.int64) if x.dtype == tf.int32 else x
        for name, x in batch.items()
    }


def split_batch(
    batch: Mapping[str, tf.Tensor], sizes: Sequence[int]
) -> list[dict[str, tf.Tensor]]:
    """Cut a batch, or each of several micro-batches in it, into pieces of `sizes`."""
    ends = list(itertools.accumulate(sizes))

    def piece(value, first, end):
        if value.shape[0] == ends[-1]:
            return value[first:end]
        shape = value.shape[1:]
        micro_batches = tf.reshape(value, [-1, ends[-1], *shape])
        return tf.reshape(micro_batches[:, first:end], [-1, *shape])

    return [
        {name: piece(value, end - size, end) for name, value in batch.items()}
        for size, end in zip(sizes, ends, strict=True)
    ]


def tower_weights(sizes: Sequence[int]) -> list[float]:
    """Return each tower's fraction of the images."""
    return [size / sum(sizes) for size in sizes]


def squared_norm(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of squares of all elements, a scalar.

    It is finite if all elements are (and below 1e19 in float32), so one number tells
    whether a tower's gradients can be used.
    """
    return 2 * tf.add_n([tf.nn.l2_loss(vector) for vector in vectors])


def weighted_mean(tensors: Sequence[tf.Tensor], weights: Sequence[float]) -> tf.Tensor:
    """Return the sum of weight * tensor; weights add up to 1."""
    if len(tensors) == 1:
        return tensors[0]
    if len(set(weights)) == 1:  # Half the passes over memory.
        return scaled(tf.add_n(tensors), weights[0])
    return tf.add_n([scaled(x, w) for x, w in zip(tensors, weights, strict=True)])


def scaled(tensor: tf.Tensor, factor: ArrayLike) -> tf.Tensor:
    """Multiply a tensor by a factor in the type of the tensor."""
    return tensor * tf.convert_to_tensor(factor, tensor.dtype)


def average_gradients(
    tower_grads: Sequence[Sequence[tf.Tensor]], weights: Sequence[float]
) -> list[tf.Tensor]:
    """Return the gradient of the mean loss over the whole batch, on the current device.

    This is the function of TensorFlow's CIFAR-10 multi-GPU tutorial, weighted by
    images.

    Args:
        tower_grads: per tower, the gradients of its own mean loss, vectors.
        weights: per tower, its fraction of the images; they add up to 1.
    """
    return [weighted_mean(x, weights) for x in zip(*tower_grads, strict=True)]


def average_states(
    states: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[float],
    targets: Sequence[str],
) -> list[list[tf.Tensor]]:
    """Average the new model states of the towers; return the mean on each target.

    It is computed on the first target. If all towers agree, it is their value to the
    last bit, so that constants such as frozen filters do not drift. States are never
    sent in a narrower type: statistics would stop moving once changes are rounded away.
    """

    def mean(first, *others):
        changes = [
            scaled(x - first, w) for x, w in zip(others, weights[1:], strict=True)
        ]
        return first + tf.add_n(changes) if changes else first

    with tf.device(targets[0]):
        means = [mean(*tensors) for tensors in zip(*states, strict=True)]
    return [[to_device(x, target) for x in means] for target in targets]


class Wire(NamedTuple):
    """The transfer of tensors between devices."""

    dtype: tf.DType  # In which tensors are sent.
    scale: float  # Factor on every sum before it is distributed.

    def part(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """Cast a partial sum on a device."""
        with tf.device(device):
            return tf.cast(tensor, self.dtype)

    def total(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """Scale and cast a sum on a device."""
        with tf.device(device):
            tensor = tensor if self.scale == 1 else scaled(tensor, self.scale)
            return tf.cast(tensor, self.dtype)


def _star(tensors, devices, wire):
    dtype, home = tensors[0].dtype, devices[0]
    sent = [tensors[0], *map(wire.part, tensors[1:], devices[1:])]
    with tf.device(home):
        total = wire.total(tf.add_n([tf.cast(x, dtype) for x in sent]), home)
    return [to_device(total, device) for device in devices]


def _tree(tensors, devices, wire):
    partial, stride, parents = list(tensors), 1, {}
    while stride < len(devices):
        for low in range(0, len(devices) - stride, 2 * stride):
            high = low + stride
            sent = wire.part(partial[high], devices[high])
            partial[low] = _add(partial[low], sent, devices[low], tensors[0].dtype)
            parents[high] = low
        stride *= 2
    sums = {0: wire.total(partial[0], devices[0])}
    for high in sorted(parents, key=lambda d: d & -d, reverse=True):
        sums[high] = to_device(sums[parents[high]], devices[high])
    return [sums[device] for device in range(len(devices))]


def _ring(tensors, devices, wire):
    count, shape = len(devices), tensors[0].shape
    sizes = shares(shape.num_elements(), count)
    pieces = []  # [device][piece]
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            pieces.append(tf.split(tf.reshape(tensor, [-1]), sizes))
    gathered = [[None] * count for _ in devices]
    for piece in range(count):
        # First round: piece p starts on device p, and each next device adds its own.
        total, at = pieces[piece][piece], piece
        for _ in range(count - 1):
            sent, at = wire.part(total, devices[at]), (at + 1) % count
            total = _add(sent, pieces[at][piece], devices[at], tensors[0].dtype)
        # Second round: the sum is copied unchanged.
        total = wire.total(total, devices[at])
        for _ in range(count):
            gathered[at][piece] = total
            at = (at + 1) % count
            total = to_device(total, devices[at])
    results = []
    for device, parts in zip(devices, gathered, strict=True):
        with tf.device(device):
            results.append(tf.reshape(tf.concat(parts, 0), shape))
    return results


def _nccl(tensors, devices, wire):
    # The index is part of the name, as one operation may have several results.
    reduced, name = [], f"{tensors[0].name}_all_reduce"
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            reduced.append(
                tf.raw_ops.NcclAllReduce(
                    input=wire.total(tensor, device),
                    reduction="sum",
                    num_devices=len(devices),
                    shared_name=name,
                )
            )
    return reduced


# Bytes that NCCL adds up at once, as in PyTorch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20

# (a tensor on each device, devices, wire) -> per device the sum, in the wire's dtype.
ALGORITHMS: dict[str, Callable[..., list[tf.Tensor]]] = {
    "star": _star,
    "tree": _tree,
    "ring": _ring,
    "nccl": _nccl,
}


def buckets(tensors: Sequence[tf.Tensor], max_bytes: float) -> list[list[int]]:
    """Group positions of consecutive tensors; a larger tensor is a group alone."""
    groups: list[list[int]] = []
    size = math.inf
    for place, tensor in enumerate(tensors):
        num_bytes = tensor.shape.num_elements() * tensor.dtype.size
        if size + num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(place)
        size += num_bytes
    return groups


def _joined(*tensors):
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(x, [-1]) for x in tensors], 0)


def _parted(joined, *likes):
    """Invert `_joined` for tensors of these shapes."""
    if len(likes) == 1:
        return [joined]
    parts = tf.split(joined, [x.shape.num_elements() for x in likes])
    return [tf.reshape(x, y.shape) for x, y in zip(parts, likes, strict=True)]


def all_reduce(
    vectors: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    weights: Sequence[float] | None = None,
    algorithm: str = "star",
    dtype: tf.DType | None = None,
) -> list[list[tf.Tensor]]:
    """Sum lists of tensors over devices; each device gets the same bits.

    `vectors` has a list per device, of the same shapes and types, `weights` a factor
    per device, which add up to 1 for a mean; `algorithm` is a key of ALGORITHMS.
    Tensors are sent in `dtype`, by default their own, and added up in their own type.
    """
    if len(devices) == 1:
        return [list(vectors[0])]
    weights = [1.0] * len(devices) if weights is None else list(weights)
    # Equal weights scale the sum once, instead of the addends on each device.
    equal = len(set(weights)) == 1
    sums: list[list[tf.Tensor]] = [[] for _ in devices]
    packed = BUCKET_BYTES if algorithm == "nccl" else 0
    for places in buckets(vectors[0], packed):
        groups = [[own[place] for own in vectors] for place in places]
        tensors = on_each(_joined, devices, *groups)
        input_dtype = tensors[0].dtype
        if not equal:
            tensors = on_each(scaled, devices, tensors, weights)
        wire = Wire(dtype or input_dtype, weights[0] if equal else 1.0)
        totals = ALGORITHMS[algorithm](tensors, devices, wire)
        totals = on_each(tf.cast, devices, totals, [input_dtype] * len(devices))
        parted = on_each(_parted, devices, totals, *groups)
        for total, some in zip(sums, parted, strict=True):
            total.extend(some)
    return sums


def check_algorithm(
    algorithm: str, devices: Sequence[str], dtype: tf.DType | None
) -> None:
    """Raise ConfigError if an algorithm cannot use these devices or this type."""
    if algorithm != "nccl":
        return
    num_gpus = sum(device_of(device).has_nccl for device in devices)
    if num_gpus < 2:
        why = "NCCL needs two or more; use star, tree or ring"
        raise ConfigError(f"all_reduce=nccl with {num_gpus} GPU(s): {why}")
    if dtype == tf.bfloat16:
        why = "TensorFlow's NCCL does not add it; use float32, or star, tree or ring"
        raise ConfigError(f"all_reduce=nccl with all_reduce_dtype=bfloat16: {why}")


def _add(a, b, device, dtype):
    with tf.device(device):
        return tf.cast(a, dtype) + tf.cast(b, dtype)


def to_device(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """Copy a tensor to a device."""
    with tf.device(device):
        return tf.identity(tensor)


def on_each(function: Callable, devices: Sequence[str], *lists: Sequence) -> list:
    """Call a function on each device, with the elements of lists for that device."""
    results = []
    for device, *values in zip(devices, *lists, strict=True):
        with tf.device(device):
            results.append(function(*values))
    return results
