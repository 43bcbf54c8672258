"""The device of every operation of a traced graph, and whether it has a kernel there.

TensorFlow moves an operation that has no kernel on a GPU to the host without a word,
and its inputs with it. Here this is proved beforehand, on any machine: the trainers can
be traced for GPUs that are not there, and TensorFlow's registry of kernels is known.

An operation in a function without a device of its own, or with a part of one, takes the
rest from the operation that calls the function. One that nobody asked onto a device is
placed by TensorFlow: a call of a function goes to the first GPU, where there is one,
and that is the default for what is in it; but an operation on a variable goes to that
variable, and a constant to its only consumer. No operation of weight should depend on
that: see `unasked`.
"""

import collections
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from benchmarks.graphs.kernels import GPU, XLA_ON_GPU, find_kernel, type_attributes
from benchmarks.graphs.operations import called, inherited, is_compiled, running, short

# Operations without a kernel for GPUs that are asked onto the host, and why.
HOST_OPERATIONS = {
    "StatelessShuffle": "draws the order of an epoch of resident images, once an epoch",
    "Unpack": "of uint64, the counters of random numbers",
    "Timestamp": "reads the clock, for the time that a step waits for its batch",
}

# Where TensorFlow puts an operation that nothing asks onto a device, if it can.
DEFAULT_DEVICE = "/GPU:0"

# The largest tensor of an operation that may be left to TensorFlow to place, in bytes:
# scalars, such as counters of loops and the metrics that a loop begins with.
MAX_UNASKED_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Placement:
    """An operation and the device that it is asked onto.

    Attributes:
        op: the operation, in its own graph.
        device: such as "/GPU:1"; the default where nothing asks for one.
        asked: whether the operation, or one that calls its function, asks for it.
        path: the calls that lead to its graph, such as "while.body".
        compiled: whether XLA compiles the function that it is in.
    """

    op: tf.Operation
    device: str
    asked: bool
    path: tuple[str, ...] = ()
    compiled: bool = False

    @property
    def on_gpu(self) -> bool:
        return "GPU" in self.device

    @property
    def where(self) -> str:
        """The operation's name, after the calls that lead to it."""
        return " > ".join([*self.path, self.op.name])

    def has_kernel(self) -> bool:
        """True if the operation can run on a GPU, or XLA can compile it for one.

        Arguments have no kernel and need none.
        """
        if self.op.type == "Placeholder":
            return True
        return has_gpu_kernel(self.op, self.compiled)


def has_gpu_kernel(op: tf.Operation, compiled: bool = False) -> bool:
    """True if there is a kernel for GPUs of the types of an operation in a graph.

    Args:
        compiled: whether XLA compiles it.
    """
    return find_kernel(op, XLA_ON_GPU if compiled else GPU) is not None


@dataclasses.dataclass(frozen=True)
class Call:
    """A compiled call.

    Attributes:
        graph: of the function.
        device: that it is called on, or "".
    """

    graph: tf.Graph
    device: str = ""


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations of one type on one device.

    Attributes:
        type: such as "GatherV2".
        types: the types of its tensors, such as "Tparams=uint8 Tindices=int64".
        device: such as "/GPU:0".
        count: number of such operations.
        where: name of the first one, after the calls that lead to it.
    """

    type: str
    types: str
    device: str
    count: int
    where: str

    def __str__(self) -> str:
        return (
            f"{self.count} x {self.type} ({self.types}) on {self.device}, {self.where}"
        )


def placements(graph: tf.Graph, device: str = "") -> Iterator[Placement]:
    """Every operation that runs, of a graph and of all functions that it calls.

    Args:
        graph: of a traced function.
        device: that the function is called on, if the call names one.
    """
    yield from _placements(graph, device, (), False)


def _placements(graph, caller, path, compiled):
    for op in running(graph):
        # What XLA compiles runs where it is called, whatever device it was traced on.
        device = caller if compiled else inherited(op.device, caller)
        asked = bool(device)
        yield Placement(op, short(device or DEFAULT_DEVICE), asked, path, compiled)
        in_compiled = compiled or is_compiled(op)
        for attribute, function in called(graph, op).items():
            inner = (*path, f"{op.name}.{attribute}")
            yield from _placements(function, device, inner, in_compiled)


def without_kernel(graph: tf.Graph, device: str = "") -> list[Group]:
    """The operations that are asked onto a GPU and have no kernel there; also those
    that nothing asks onto a device, unless they are HOST_OPERATIONS."""
    return grouped(
        placement
        for placement in placements(graph, device)
        if placement.on_gpu
        and (placement.asked or placement.op.type not in HOST_OPERATIONS)
        and not placement.has_kernel()
    )


def on_host_alone(graph: tf.Graph, device: str = "") -> list[Group]:
    """The operations that are asked onto the host and have no kernel for GPUs."""
    return grouped(
        placement
        for placement in placements(graph, device)
        if not placement.on_gpu and not placement.has_kernel()
    )


def unasked(graph: tf.Graph, device: str = "") -> list[Group]:
    """The operations with a larger result that nothing asks onto a device.

    Those on variables do not count, as they go to the variable, nor do calls, whose
    operations are placed one by one, arguments, which lie where the caller has them,
    and results, which go to the caller once.
    """
    results = {tensor.op.name for tensor in getattr(graph, "outputs", [])}
    return grouped(
        placement
        for placement in placements(graph, device)
        if not placement.asked
        and placement.op.type != "Placeholder"
        and (placement.path or placement.op.name not in results)
        and not called(placement.op.graph, placement.op)
        and all(tensor.dtype != tf.resource for tensor in placement.op.inputs)
        and any(
            num_bytes(tensor) > MAX_UNASKED_BYTES for tensor in placement.op.outputs
        )
    )


def grouped(some: Iterator[Placement]) -> list[Group]:
    """Placements as groups of the same type, types and device."""
    counts, first = collections.Counter(), {}
    for placement in some:
        op = placement.op
        key = (op.type, type_attributes(op), placement.device)
        counts[key] += 1
        first.setdefault(key, placement.where)
    return [Group(*key, count, first[key]) for key, count in counts.items()]


def num_bytes(tensor: tf.Tensor) -> int:
    """The size of a tensor; 0 of handles, and where its shape is not known."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
