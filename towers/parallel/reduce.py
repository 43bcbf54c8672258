"""Means over the towers: the shares of a batch, and all-reduce.

A strategy averages vectors, a list of them per tower: `average_gradients` on one
device, `all_reduce` on all. All algorithms are plain data flow in one graph: a copy to
another device is an identity there. Every element of a sum is computed once and then
copied, so that no two devices can round differently.

    star    everything is sent to the first device, added there and handed out (the
            `allreduce` of the from-scratch chapter)
    tree    neighbors add up pairwise, in log2 rounds, then the sum goes back down
    ring    the tensor is cut into one piece per device; each piece travels once around
            to be added up and once more to be handed out (Patarasuk and Yuan 2009)
    nccl    NVIDIA's library, through TensorFlow; needs two or more physical GPUs. All
            results have to be read: TensorFlow prunes an NcclAllReduce whose result
            nobody reads, and the others wait for it (its issue 19690)
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf
from numpy.typing import ArrayLike

from towers.data.share import shares
from towers.errors import ConfigError


def in_dtype(number: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
    """A scalar in a type; `tf.cast` rounds a Python number to float32 on its way."""
    return tf.cast(tf.convert_to_tensor(number, dtype_hint=dtype), dtype)


def without_int32(batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """A batch for a GPU, whose int32 tensors would be in host memory."""
    return {
        name: tf.cast(x, tf.int64) if x.dtype == tf.int32 else x
        for name, x in batch.items()
    }


def split_batch(
    batch: Mapping[str, tf.Tensor], sizes: Sequence[int]
) -> list[dict[str, tf.Tensor]]:
    """Cuts every tensor of a batch along its first axis into pieces of `sizes`.

    Of several micro-batches, one after the other, each is cut so, and a tower gets its
    pieces of all.
    """
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
    """Each tower's share of the images."""
    return [size / sum(sizes) for size in sizes]


def squared_norm(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of squares of all elements, a scalar.

    It is finite where every element is (and smaller than 1e19 in float32), so one
    number says whether a tower's gradients can be used.
    """
    return 2 * tf.add_n([tf.nn.l2_loss(vector) for vector in vectors])


def weighted_mean(tensors: Sequence[tf.Tensor], weights: Sequence[float]) -> tf.Tensor:
    """The sum of weight * tensor, the weights adding up to 1; one comes back as is."""
    if len(tensors) == 1:
        return tensors[0]
    if len(set(weights)) == 1:  # half the passes over the memory
        return scaled(tf.add_n(tensors), weights[0])
    return tf.add_n([scaled(x, w) for x, w in zip(tensors, weights, strict=True)])


def scaled(tensor: tf.Tensor, factor: ArrayLike) -> tf.Tensor:
    """The tensor times a constant, or a tensor of its type, in its own type."""
    return tensor * tf.convert_to_tensor(factor, tensor.dtype)


def average_gradients(
    tower_grads: Sequence[Sequence[tf.Tensor]], weights: Sequence[float]
) -> list[tf.Tensor]:
    """The gradient of the mean loss over the whole batch, on the current device.

    It is the function of TensorFlow's CIFAR-10 multi-GPU tutorial, weighted by images.

    Args:
        tower_grads: per tower, the gradients of its own mean loss, vectors.
        weights: per tower, its share of the images, adding up to 1.
    """
    return [weighted_mean(x, weights) for x in zip(*tower_grads, strict=True)]


def average_states(
    states: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[float],
    targets: Sequence[str],
) -> list[list[tf.Tensor]]:
    """The towers' new model states, vectors, averaged on the first target; per target
    the mean.

    Where all towers agree the mean is that value to the last bit, so that what no
    training changes, such as frozen filters, stays what it is. States are never sent in
    a narrower type: statistics would no longer move once a change is below a rounding.
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

    dtype: tf.DType  # that is sent
    scale: float  # factor on every sum, once, before it is distributed

    def part(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """A partial sum, cast on the device."""
        with tf.device(device):
            return tf.cast(tensor, self.dtype)

    def total(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """A sum, scaled and cast on the device."""
        with tf.device(device):
            tensor = tensor if self.scale == 1 else scaled(tensor, self.scale)
            return tf.cast(tensor, self.dtype)


def star(tensors, devices, wire):
    dtype, home = tensors[0].dtype, devices[0]
    sent = [tensors[0], *map(wire.part, tensors[1:], devices[1:])]
    with tf.device(home):
        total = wire.total(tf.add_n([tf.cast(x, dtype) for x in sent]), home)
    return [to_device(total, device) for device in devices]


def tree(tensors, devices, wire):
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


def ring(tensors, devices, wire):
    count, shape = len(devices), tensors[0].shape
    sizes = shares(shape.num_elements(), count)
    pieces = []  # [device][piece]
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            pieces.append(tf.split(tf.reshape(tensor, [-1]), sizes))
    gathered = [[None] * count for _ in devices]
    for piece in range(count):
        # Around once: piece p starts on device p and is added to on each one after it.
        total, at = pieces[piece][piece], piece
        for _ in range(count - 1):
            sent, at = wire.part(total, devices[at]), (at + 1) % count
            total = _add(sent, pieces[at][piece], devices[at], tensors[0].dtype)
        # And once more: the sum is copied unchanged.
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


def nccl(tensors, devices, wire):
    # An operation may have several results.
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


# Bytes that NCCL adds up at once: as PyTorch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20

# (a tensor on each device, devices, wire) -> per device the sum, in the wire's dtype.
ALGORITHMS: dict[str, Callable[..., list[tf.Tensor]]] = {
    "star": star,
    "tree": tree,
    "ring": ring,
    "nccl": nccl,
}


def buckets(tensors: Sequence[tf.Tensor], most_bytes: float) -> list[list[int]]:
    """Groups positions of consecutive tensors with at most `most_bytes` together; a
    larger tensor is a group alone.
    """
    groups, size = [], math.inf
    for place, tensor in enumerate(tensors):
        num_bytes = tensor.shape.num_elements() * tensor.dtype.size
        if size + num_bytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(place)
        size += num_bytes
    return groups


def _joined(*tensors):
    """One tensor of the elements of several; a single one comes back as is."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(x, [-1]) for x in tensors], 0)


def _parted(joined, *likes):
    """The inverse of `_joined` for tensors of these shapes."""
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
    """Adds lists of tensors, of the same shapes and types on each device, up over
    devices: per device the list of sums, the same bits on every one.

    Args:
        weights: per device what its tensors count, adding up to 1 for a mean; the sum
            by default.
        algorithm: a key of ALGORITHMS.
        dtype: what travels between devices, such as tf.bfloat16; additions are done in
            the tensors' own type. By default that type travels.
    """
    if len(devices) == 1:
        return [list(vectors[0])]
    weights = [1.0] * len(devices) if weights is None else list(weights)
    # Equal weights scale the sum, once, instead of the summands on each device.
    equal = len(set(weights)) == 1
    sums = [[] for _ in devices]
    packed = BUCKET_BYTES if algorithm == "nccl" else 0
    for places in buckets(vectors[0], packed):
        groups = [[own[place] for own in vectors] for place in places]
        tensors = on_each(_joined, devices, *groups)
        own = tensors[0].dtype
        if not equal:
            tensors = on_each(scaled, devices, tensors, weights)
        wire = Wire(dtype or own, weights[0] if equal else 1.0)
        totals = ALGORITHMS[algorithm](tensors, devices, wire)
        totals = on_each(tf.cast, devices, totals, [own] * len(devices))
        for so_far, some in zip(
            sums, on_each(_parted, devices, totals, *groups), strict=True
        ):
            so_far.extend(some)
    return sums


def check_algorithm(
    algorithm: str, devices: Sequence[str], dtype: tf.DType | None
) -> None:
    """Raises ConfigError where an algorithm cannot run on these devices or with a type
    that travels.
    """
    if algorithm != "nccl":
        return
    num_gpus = sum("GPU" in device for device in devices)
    if num_gpus < 2:
        raise ConfigError(
            f"all_reduce=nccl with {num_gpus} GPU(s): NCCL needs two or more; use "
            "star, tree or ring"
        )
    if dtype == tf.bfloat16:
        raise ConfigError(
            "all_reduce=nccl with all_reduce_dtype=bfloat16: TensorFlow's NCCL adds no "
            "bfloat16; use float32, or star, tree or ring"
        )


def _add(a, b, device, dtype):
    """A + b on a device, in the wider type that the tensors came in."""
    with tf.device(device):
        return tf.cast(a, dtype) + tf.cast(b, dtype)


def to_device(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """A copy of a tensor on a device."""
    with tf.device(device):
        return tf.identity(tensor)


def share_memory(device: str, other: str) -> bool:
    """True if a tensor on one device can be read on the other without a copy."""
    return device == other or ("CPU" in device and "CPU" in other)


def on_each(function: Callable, devices: Sequence[str], *lists: Sequence) -> list:
    """The function of the elements that lists have for a device, there."""
    results = []
    for device, *values in zip(devices, *lists, strict=True):
        with tf.device(device):
            results.append(function(*values))
    return results
