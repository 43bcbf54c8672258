"""Memory accounts: the memory that training takes on each device, computed beforehand.

Logical CPU devices share one allocator, and a GPU's reports only its reservation. So
the account is computed before the first step: from the variables, and from the graph of
a step, whose operations are followed in the order of their creation.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Iterable

import tensorflow as tf

from benchmarks.graphs.operations import called, running, short
from towers.parallel.devices import share_memory
from towers.parallel.trainer import Trainer

MEGABYTE = 1e6

# The output is the input's memory.
ALIASES = frozenset(
    "Identity IdentityN Reshape ExpandDims Squeeze StopGradient PreventGradient "
    "Snapshot EnsureShape".split()
)

# The output may take the memory of an input that no other operation reads.
IN_PLACE = frozenset(
    "Add AddV2 AddN Sub Mul RealDiv Neg Maximum Minimum Square Sqrt Rsqrt Exp Tanh "
    "Sigmoid Pow Select SelectV2 BiasAdd Relu Relu6 Elu Selu LeakyRelu ReluGrad "
    "Relu6Grad EluGrad TanhGrad SigmoidGrad RsqrtGrad SqrtGrad".split()
)

# Operations that call other graphs, and the attributes that name these.
CALLS = {
    "While": ("body",),
    "StatelessWhile": ("body",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}


@dataclasses.dataclass(frozen=True)
class Account:
    """The memory that training takes on one device, in bytes.

    Attributes:
        device: such as "/GPU:1".
        params, slots, averages, state: variables.
        activations: results of the forward part that the backward part reads.
        transient: all else that is alive at the peak.
    """

    device: str
    params: int
    slots: int
    averages: int
    state: int
    activations: int
    transient: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.parts())

    @classmethod
    def parts(cls) -> list[str]:
        """The fields that add up to the total."""
        return [f.name for f in dataclasses.fields(cls) if f.name != "device"]

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {getattr(self, name) / MEGABYTE:.1f}"
            for name in self.parts()
            if getattr(self, name)
        )
        return f"{self.device} {self.total / MEGABYTE:.1f} MB ({parts})"


def create_accounts(
    variables: Iterable[tuple[str, tf.Variable]],
    graphs: Iterable[tf.Graph],
    devices: Iterable[str],
) -> list[Account]:
    """The account of every device.

    Args:
        variables: kind, such as params, and variable, of all copies and shards.
        graphs: those that compute at the same time: one step, or one per asynchronous
            tower.
        devices: listed in this order, whether they hold anything or not; others follow.
    """
    sizes = {device: collections.Counter() for device in devices}
    for name, variable in variables:
        kind = name.split("/")[0]
        size = variable.shape.num_elements() * variable.dtype.size
        sizes.setdefault(short(variable.device), collections.Counter())[kind] += size
    for graph in graphs:
        activations, peak = step_memory(graph, owns_arguments=True)
        for device, size in peak.items():
            parts = sizes.setdefault(device, collections.Counter())
            parts["activations"] += activations[device]
            parts["transient"] += size - activations[device]
    return [
        Account(device, **{part: parts[part] for part in Account.parts()})
        for device, parts in sizes.items()
    ]


def trainer_accounts(trainer: Trainer) -> list[Account]:
    """The account of every device of a trainer; it is traced for that."""
    named = []
    for copy in trainer.strategy.copies:
        slots = functools.reduce(operator.iadd, copy.slots.values(), [])
        named += [("params", v) for v in copy.params]
        named += [("state", v) for v in [*copy.state, *copy.integers]]
        named += [("slots", v) for v in slots]
        named += [("averages", v) for v in copy.averages]
    return create_accounts(named, trainer.trace(), trainer.devices)


def step_memory(
    graph: tf.Graph, owns_arguments: bool = False
) -> tuple[collections.Counter, collections.Counter]:
    """Bytes that one run of a graph takes, besides the variables.

    Args:
        graph: of a step, or of a part of it.
        owns_arguments: whether its arguments count; otherwise they are its caller's.

    Returns:
        (device -> activations that the forward part leaves for the backward part,
        device -> peak of what is alive at once). Nothing in CPU memory is copied from
        one CPU device to another.
    """
    life = _Life(graph, owns_arguments)
    alive, peak = collections.Counter(), collections.Counter()
    activations = collections.Counter()
    for index, op in enumerate(life.ops):
        device = short(op.device)
        for call in _called(graph, op):
            inner_activations, inner_peak = step_memory(call)
            for inner_device, size in inner_peak.items():
                peak[inner_device] = max(peak[inner_device], alive[inner_device] + size)
            activations |= inner_activations
        ending = life.ending[index]
        if op.type in IN_PLACE:
            reused = next((p for p in ending if life.may_become(p, op, device)), None)
            if reused:
                alive[device] -= life.sizes[reused]
                ending.remove(reused)
        for piece in life.beginning[index]:
            alive[piece[1]] += life.sizes[piece]
            peak[piece[1]] = max(peak[piece[1]], alive[piece[1]])
        for piece in ending:
            alive[piece[1]] -= life.sizes[piece]
    for piece, size in life.sizes.items():
        first_backward = life.first_backward.get(piece[1])
        if first_backward is not None and (
            life.begins[piece] < first_backward <= life.ends[piece]
        ):
            activations[piece[1]] += size
    return activations, peak


class _Life:
    """When each piece of memory begins and ends, by the index of the operation.

    A piece is (root tensor's name, device): what shares its memory has the same root.

    Attributes:
        ops: those that run.
        sizes: piece -> bytes.
        begins, ends: piece -> index.
        beginning, ending: the same the other way, [index] -> pieces.
        first_backward: device -> index of its first operation of a backward part.
    """

    def __init__(self, graph, owns_arguments):
        self.ops = running(graph)
        self.sizes, self.begins, self.ends = {}, {}, {}
        self.first_backward = {}
        self._piece_of = {}
        for index, op in enumerate(self.ops):
            device = short(op.device)
            if "gradient_tape/" in op.name:
                self.first_backward.setdefault(device, index)
            read = [self._read(tensor, device, index) for tensor in op.inputs]
            for place, tensor in enumerate(op.outputs):
                if op.type in ALIASES:
                    self._piece_of[tensor.name] = read[place]
                else:
                    counts = op.type != "ReadVariableOp" and (
                        op.type != "Placeholder" or owns_arguments
                    )
                    piece = self._piece_of[tensor.name] = (tensor.name, device)
                    self._add(piece, _size(tensor) if counts else 0, index)
        for tensor in getattr(graph, "outputs", []):
            self.ends[self._piece_of[tensor.name]] = len(self.ops) - 1
        self.beginning = [[] for _ in self.ops]
        self.ending = [[] for _ in self.ops]
        for piece in self.sizes:
            self.beginning[self.begins[piece]].append(piece)
            self.ending[self.ends[piece]].append(piece)

    def _add(self, piece, size, index):
        self.sizes[piece] = size
        self.begins[piece] = self.ends[piece] = index

    def _read(self, tensor, device, index):
        """The piece that an operation on a device reads."""
        piece = self._piece_of[tensor.name]
        self.ends[piece] = index
        if share_memory(piece[1], device):
            return piece
        copy = (piece[0], device)
        if copy not in self.sizes:
            self._add(copy, _size(tensor), index)
        self.ends[copy] = index
        return copy

    def may_become(self, piece, op, device):
        """True if the output of an operation may take the memory of an input."""
        size = self.sizes[piece]
        return size and piece[1] == device and size == _size(op.outputs[0])


def _called(graph, op):
    graphs = called(graph, op)
    return [graphs[name] for name in CALLS.get(op.type, ())]


def _size(tensor):
    count = tensor.shape.num_elements() or 0
    return (
        0
        if tensor.dtype in (tf.resource, tf.variant, tf.string)
        else (count * tensor.dtype.size)
    )
