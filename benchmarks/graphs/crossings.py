"""The bytes that cross devices in a step, computed from its traced graph.

A tensor crosses where an operation on another device reads it, once for each such
device. TensorFlow's registry of kernels says which tensors of an operation on a GPU lie
in host memory: shapes and most int32, for example.

What a variable holds lies where the variable does: operations on a variable run there,
whatever device they are asked onto. A variable of a loop lies where its initial value
does, as in TensorFlow's `lower_while_op.cc`; what the loop reads and does not change
crosses anew in each turn. An argument is taken to lie where it is first read.
"""

import collections
import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from benchmarks.graphs.kernels import find_kernel, host_arguments
from benchmarks.graphs.operations import called, inherited, is_compiled, running, short
from benchmarks.graphs.placement import DEFAULT_DEVICE, num_bytes
from towers.parallel.devices import HOST

# The host's memory; GPUs are named as devices are.
HOST_MEMORY = "host"

LOOPS, BRANCHES = ("While", "StatelessWhile"), ("If", "StatelessIf")


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that goes to another device, or a control edge to one.

    Attributes:
        source, destination: "host", or a GPU such as "/GPU:1".
        num_bytes: its size, times the turns of the loops inside of a step; 0 of a
            control edge, and where the shape is not known.
        where: name of the tensor, after the calls that lead to it; of a control edge
            the names of both operations.
        is_per_step: whether it crosses in every step, or once in a call of many.
        is_usual: False in the branch that a condition takes where it is false: by the
            convention of this package the exception, such as an update that is not
            made, or a new epoch.
    """

    source: str
    destination: str
    num_bytes: int
    where: str
    is_per_step: bool
    is_usual: bool


@dataclasses.dataclass(frozen=True)
class _Value:
    """A tensor in a memory; `place` is None of an argument until it is first read."""

    name: str
    num_bytes: int
    dtype: tf.DType
    place: str | None


def crossings(
    graph: tf.Graph,
    homes: Mapping[int, str] | None = None,
    *,
    inner_turns: int = 1,
    device: str = "",
) -> list[Crossing]:
    """Everything that crosses devices in one turn of the loop of a graph.

    Args:
        graph: of a traced function; its own loops are over steps.
        homes: id of a captured tensor, such as a variable's handle, or of an argument
            -> its device. Other captured variables are on the host.
        inner_turns: turns of a loop within a step.
        device: that the function is called on, if the call names one.
    """
    flow = _Flow(inner_turns)
    inputs = getattr(graph, "inputs", [])
    known = {
        tensor.name: _memory(homes[id(tensor)])
        for tensor in inputs
        if homes and id(tensor) in homes
    }
    for captured, placeholder in getattr(graph, "captures", []):
        home = (homes or {}).get(id(captured))
        if home is None and captured.dtype in (tf.resource, tf.variant):
            home = HOST
        known[placeholder.name] = home and _memory(home)
    values = {
        tensor.name: _Value(
            tensor.name, num_bytes(tensor), tensor.dtype, known.get(tensor.name)
        )
        for tensor in inputs
    }
    has_loop = any(op.type in LOOPS for op in running(graph))
    scope = _Scope(device, (), not has_loop, True, 1)
    flow.run(graph, values, scope)
    return flow.crossed


def per_step(crossed: list[Crossing]) -> dict[tuple[str, str], int]:
    """Bytes of a usual step: (source, destination) -> their sum."""
    totals = collections.Counter()
    for crossing in crossed:
        if crossing.is_per_step and crossing.is_usual:
            totals[crossing.source, crossing.destination] += crossing.num_bytes
    return dict(totals)


def summed(totals: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """The bytes of `per_step` by kind: host to GPU, GPU to host, GPU to GPU."""
    kinds = dict.fromkeys(("host to GPU", "GPU to host", "GPU to GPU"), 0)
    for pair, count in totals.items():
        source, destination = ("host" if x == HOST_MEMORY else "GPU" for x in pair)
        kinds[f"{source} to {destination}"] += count
    return kinds


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The call of a graph: its device, its path, and how often it is made."""

    device: str
    path: tuple[str, ...]
    is_per_step: bool
    is_usual: bool
    turns: int

    def within(self, op: tf.Operation, attribute: str, device: str, **changes):
        path = (*self.path, f"{op.name}.{attribute}")
        return dataclasses.replace(self, device=device, path=path, **changes)


class _Flow:
    """Follows the tensors of a graph through all functions that it calls.

    Attributes:
        crossed: the crossings.
    """

    def __init__(self, inner_turns):
        self._inner_turns = inner_turns
        self.crossed = []
        self._sent = set()
        self._first_read = {}

    def run(self, graph, values, scope) -> list[_Value]:
        """The outputs, given the values of the arguments: tensor's name -> value."""
        values, places = dict(values), {}
        for op in running(graph):
            if op.type == "Placeholder" and op.outputs[0].name in values:
                continue
            places[op.name] = self._place(op, scope, values)
            self._control(op, places, scope)
            inputs = [values[tensor.name] for tensor in op.inputs]
            device = inherited(op.device, scope.device)
            functions = called(graph, op)
            if op.type in LOOPS:
                outputs = self._loop(op, functions, inputs, device, scope)
            elif op.type in BRANCHES:
                outputs = self._branches(op, functions, inputs, device, scope)
            elif "f" in functions and not is_compiled(op):
                inner = scope.within(op, "f", device)
                outputs = self._call(functions["f"], inputs, inner)
            else:
                outputs = self._operation(op, inputs, device, scope)
            for tensor, value in zip(op.outputs, outputs, strict=True):
                values[tensor.name] = value
        return [values[tensor.name] for tensor in getattr(graph, "outputs", [])]

    def _place(self, op, scope, values):
        """Where an operation runs; None where it has no device and nothing to do."""
        device = inherited(op.device, scope.device)
        if op.type in (*LOOPS, *BRANCHES) or (not device and op.type == "NoOp"):
            return None
        inputs = [values[tensor.name] for tensor in op.inputs]
        home = next((v.place for v in inputs if v.dtype == tf.resource), None)
        place = home or _memory(device or DEFAULT_DEVICE)
        return place if find_kernel(op) is not None else HOST_MEMORY

    def _control(self, op, places, scope):
        """The control edges that an operation waits for."""
        destination = places[op.name]
        for before in op.control_inputs:
            source = places.get(before.name)
            if None not in (source, destination) and source != destination:
                where = " > ".join([*scope.path, f"^{before.name} to {op.name}"])
                self.crossed.append(
                    Crossing(
                        source, destination, 0, where, scope.is_per_step, scope.is_usual
                    )
                )

    def _operation(self, op, inputs, device, scope):
        """The outputs of an operation, whose inputs are sent to where it reads them."""
        if not inputs and not device and op.type == "Const":
            return [self._value(t, scope, None) for t in op.outputs]
        home = next((v.place for v in inputs if v.dtype == tf.resource), None)
        memory = home or _memory(device or DEFAULT_DEVICE)
        kernel = None if memory == HOST_MEMORY else find_kernel(op)
        on_host = (frozenset(), frozenset())
        if kernel is not None:
            on_host = host_arguments(op, kernel)
        for place, value in enumerate(inputs):
            asked = HOST_MEMORY if place in on_host[0] else memory
            self._first_read.setdefault(value.name, asked)
            self._send(value, HOST_MEMORY if kernel is None else asked, scope)
        if kernel is None:
            memory = HOST_MEMORY
        return [
            self._value(t, scope, HOST_MEMORY if place in on_host[1] else memory)
            for place, t in enumerate(op.outputs)
        ]

    def _call(self, function, inputs, scope):
        names = [tensor.name for tensor in function.inputs]
        return self.run(function, dict(zip(names, inputs, strict=True)), scope)

    def _branches(self, op, functions, inputs, device, scope):
        self._send(inputs[0], HOST_MEMORY, scope)
        per_branch = []
        for attribute, is_usual in (("then_branch", True), ("else_branch", False)):
            inner = scope.within(
                op, attribute, device, is_usual=scope.is_usual and is_usual
            )
            # Through a Switch next to each input.
            switched = [self._copy(value, inner) for value in inputs[1:]]
            outputs = self._call(functions[attribute], switched, inner)
            memories = [self._loop_memory(device, value) for value in outputs]
            for value, memory in zip(outputs, memories, strict=True):
                self._send(value, memory, inner)
            per_branch.append(memories)
        return [
            self._value(tensor, scope, memory)
            for tensor, memory in zip(op.outputs, per_branch[0], strict=True)
        ]

    def _loop(self, op, functions, inputs, device, scope):
        turns = scope.turns * (self._inner_turns if scope.is_per_step else 1)
        inner = scope.within(op, "body", device, is_per_step=True, turns=turns)
        carried = [self._copy(value, inner) for value in inputs]
        condition = dataclasses.replace(inner, path=(*scope.path, f"{op.name}.cond"))
        [wanted] = self._call(functions["cond"], carried, condition)[:1]
        self._send(wanted, HOST_MEMORY, condition)
        outputs = self._call(functions["body"], carried, inner)
        for before, after in zip(inputs, outputs, strict=True):
            if before.place is not None:
                self._send(after, before.place, inner)
        return [
            self._value(tensor, scope, value.place)
            for tensor, value in zip(op.outputs, inputs, strict=True)
        ]

    def _loop_memory(self, device, value):
        """Of a Merge on a device: what is not a number stays where it is, and int32,
        bool and text are in host memory."""
        if value.dtype in (tf.resource, tf.variant):
            return value.place
        if value.dtype in (tf.int32, tf.bool, tf.string):
            return HOST_MEMORY
        return _memory(device or DEFAULT_DEVICE)

    def _value(self, tensor, scope, memory):
        name = " > ".join([*scope.path, tensor.name])
        return _Value(name, num_bytes(tensor), tensor.dtype, memory)

    def _copy(self, value, scope):
        """The same tensor, which crosses anew in a loop or in a branch."""
        place = value.place or self._first_read.get(value.name)
        return dataclasses.replace(
            value, name=f"{' > '.join(scope.path)} > {value.name}", place=place
        )

    def _send(self, value, memory, scope):
        place = value.place or self._first_read.get(value.name)
        key = (value.name, memory)
        is_handle = value.dtype in (tf.resource, tf.variant)
        if memory in (place, None) or is_handle or key in self._sent:
            return
        self._sent.add(key)
        size = value.num_bytes * scope.turns
        self.crossed.append(
            Crossing(place, memory, size, value.name, scope.is_per_step, scope.is_usual)
        )


def _memory(device):
    device = short(device)
    return device if "GPU" in device else HOST_MEMORY
