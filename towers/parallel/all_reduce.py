"""All-reduce: every device gets the same sum of tensors, bit for bit.

All algorithms are plain data flow in one graph: a copy to another device is an
identity there. Every element of the sum is computed once and then copied, so that no
two devices can round differently.

    star    everything is sent to the first device, added there and sent back (the
            `allreduce` of the from-scratch chapter)
    tree    neighbors add up pairwise, in log2 rounds, then the sum goes back down
    ring    the tensor is cut into one piece per device; each piece travels once around
            to be added up and once more to be handed out (Patarasuk and Yuan 2009)
    nccl    NVIDIA's library, through TensorFlow; needs two or more physical GPUs
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.errors import ConfigError
from towers.parallel.devices import to_device
from towers.parallel.packing import pack, unpack


@dataclasses.dataclass(frozen=True)
class Wire:
    """The transfer of tensors between devices.

    Attributes:
        dtype: the type that is sent; None for the tensors' own.
        scale: factor on every sum, once, before it is distributed.
    """

    dtype: tf.DType | None = None
    scale: float = 1.0

    def part(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """A partial sum as it is sent, cast on `device`."""
        if self.dtype is None or self.dtype == tensor.dtype:
            return tensor
        with tf.device(device):
            return tf.cast(tensor, self.dtype)

    def total(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """A sum as it is sent, scaled and cast on `device`."""
        if self.scale != 1:
            with tf.device(device):
                tensor *= tf.constant(self.scale, tensor.dtype)
        return self.part(tensor, device)


def _add(a, b, device, dtype):
    """a + b on a device, in the wider type that the tensors came in."""
    with tf.device(device):
        return tf.cast(a, dtype) + tf.cast(b, dtype)


def star(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], wire: Wire
) -> list[tf.Tensor]:
    dtype = tensors[0].dtype
    sent = [wire.part(*pair) for pair in zip(tensors, devices, strict=True)]
    with tf.device(devices[0]):
        total = tf.add_n([tensors[0], *[tf.cast(x, dtype) for x in sent[1:]]])
    return _hand_out(wire.total(total, devices[0]), devices, dtype)


def tree(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], wire: Wire
) -> list[tf.Tensor]:
    dtype = tensors[0].dtype
    partial, stride = list(tensors), 1
    parents = {}
    while stride < len(devices):
        for low in range(0, len(devices) - stride, 2 * stride):
            high = low + stride
            sent = wire.part(partial[high], devices[high])
            partial[low] = _add(partial[low], sent, devices[low], dtype)
            parents[high] = low
        stride *= 2
    sums = {0: wire.total(partial[0], devices[0])}
    for high in sorted(parents, key=lambda d: d & -d, reverse=True):
        sums[high] = to_device(sums[parents[high]], devices[high])
    return [_widened(sums[d], device, dtype) for d, device in enumerate(devices)]


def ring(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], wire: Wire
) -> list[tf.Tensor]:
    count, dtype = len(devices), tensors[0].dtype
    length = tensors[0].shape.num_elements()
    sizes = [length // count + (i < length % count) for i in range(count)]
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
            total = _add(sent, pieces[at][piece], devices[at], dtype)
        # And once more: the sum is copied as it is.
        total = wire.total(total, devices[at])
        for _ in range(count):
            gathered[at][piece] = total
            at = (at + 1) % count
            total = to_device(total, devices[at])
    results = []
    for device, parts in zip(devices, gathered, strict=True):
        with tf.device(device):
            whole = tf.reshape(tf.concat(parts, 0), tensors[0].shape)
        results.append(_widened(whole, device, dtype))
    return results


def nccl(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], wire: Wire
) -> list[tf.Tensor]:
    dtype, reduced = tensors[0].dtype, []
    name = f"{tensors[0].op.name}_all_reduce"
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
    # TensorFlow prunes an NcclAllReduce whose result nobody reads, and the others wait
    # for it (its issue 19690). So every result depends on all of them.
    with tf.control_dependencies(reduced):
        reduced = [to_device(x, d) for x, d in zip(reduced, devices, strict=True)]
    return [_widened(x, d, dtype) for x, d in zip(reduced, devices, strict=True)]


ALGORITHMS: dict[str, Callable] = {
    "star": star,
    "tree": tree,
    "ring": ring,
    "nccl": nccl,
}


def all_reduce(
    tensors: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    algorithm: str = "star",
    pack_mb: float = 0.0,
    dtype: tf.DType | None = None,
) -> list[list[tf.Tensor]]:
    """Adds tensors up over devices.

    Args:
        tensors: per device a list of tensors, of the same shapes and types on each.
        devices: one device name per list.
        weights: per device what its tensors count, adding up to 1 for a mean; the sum
            by default.
        algorithm: a key of ALGORITHMS.
        pack_mb: tensors are packed into buffers of at most so many megabytes, or of one
            larger tensor, because few large copies are cheaper than many small ones; 0
            sends each by itself.
        dtype: what travels between devices, such as tf.bfloat16; additions are done in
            the tensors' own type. By default that type travels.

    Returns:
        Per device the list of sums or means, the same bits on every device.
    """
    if len(devices) == 1:
        return [list(tensors[0])]
    weights = [1.0] * len(devices) if weights is None else list(weights)
    # Equal weights scale the sum, once, instead of the summands on each device.
    equal = len(set(weights)) == 1
    wire = Wire(dtype, weights[0] if equal else 1.0)
    results = [[None] * len(tensors[0]) for _ in devices]
    for bucket in buckets(tensors[0], pack_mb):
        packed = [
            pack([device_tensors[i] for i in bucket], device)
            for device_tensors, device in zip(tensors, devices, strict=True)
        ]
        if not equal:
            packed = _weighted(packed, devices, weights)
        sums = ALGORITHMS[algorithm](packed, devices, wire)
        for result, total, device in zip(results, sums, devices, strict=True):
            shapes = [tensors[0][i].shape for i in bucket]
            for i, tensor in zip(bucket, unpack(total, shapes, device), strict=True):
                result[i] = tensor
    return results


def buckets(tensors: Sequence[tf.Tensor], pack_mb: float) -> list[list[int]]:
    """Buckets of tensors that share a buffer: indices of neighbors of one type."""
    places, room, dtype = [], 0.0, None
    for place, tensor in enumerate(tensors):
        size = tensor.shape.num_elements() * tensor.dtype.size / 2**20
        if size > room or tensor.dtype != dtype:
            places.append([])
            room, dtype = pack_mb, tensor.dtype
        places[-1].append(place)
        room -= size
    return places


def check_algorithm(
    algorithm: str, devices: Sequence[str], dtype: tf.DType | None
) -> None:
    """Raises ConfigError where an algorithm cannot run on some devices or with a type
    that travels."""
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


def _weighted(tensors, devices, weights):
    weighted = []
    for tensor, device, weight in zip(tensors, devices, weights, strict=True):
        with tf.device(device):
            weighted.append(tensor * tf.constant(weight, tensor.dtype))
    return weighted


def _hand_out(total, devices, dtype):
    return [_widened(to_device(total, device), device, dtype) for device in devices]


def _widened(tensor, device, dtype):
    with tf.device(device):
        return tf.cast(tensor, dtype)
