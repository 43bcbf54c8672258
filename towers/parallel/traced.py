"""A function that is traced once and copied into every graph that calls it.

Tracing a tower's forward and backward part takes Python much longer than copying the
operations. The towers' parts differ in their devices alone, so they share one trace.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef


class TracedOnce:
    """A pure function of tensors that is traced once per key and signature.

    A call in a graph copies the operations there, without those that no result needs,
    onto the device in scope. They are part of that graph, so a step is as fast as if
    they had been traced there; a call of a `tf.function` would make it slower. An eager
    call is one of the function itself.

    Args:
        function: (key, *arguments) -> a structure of tensors. The arguments are
            structures of tensors of known shapes, and None.
        optimize: (graph, names of operations that stay) -> the same graph optimized,
            once for all copies.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        optimize: Callable[[GraphDef, Sequence[str]], GraphDef] | None = None,
    ):
        self._function, self._optimize = function, optimize
        self._traces = {}

    def __call__(
        self,
        key: Hashable,
        *arguments: Any,
        name: str,
    ) -> Any:
        """The results of the function.

        Args:
            key: its first argument, a plain value.
            *arguments: the others.
            name: scope of the copied operations.
        """
        if tf.executing_eagerly():
            return self._function(key, *arguments)
        signature = tf.nest.map_structure(_spec, arguments)
        place = key, tuple(tf.nest.flatten(signature))
        if place not in self._traces:
            function = functools.partial(self._function, key)
            traced = tf.function(function, autograph=False)
            self._traces[place] = _Trace(
                traced.get_concrete_function(*signature), self._optimize
            )
        return self._traces[place].copy(arguments, name)


class _Trace:
    """The graph of a function, of which nothing runs."""

    def __init__(self, function, optimize):
        self._function, self._optimize = function, optimize
        # The outputs are identities, which a copy does without.
        self._results = tf.nest.pack_sequence_as(
            function.structured_outputs, [_source(x) for x in function.outputs]
        )
        self._definition = None

    def copy(self, arguments, name):
        """The results, computed in the graph at hand."""
        graph = tf.compat.v1.get_default_graph()
        inputs = [x for x in tf.nest.flatten(arguments) if x is not None]
        inputs += self._function.captured_inputs
        values = {
            placeholder.name: graph.capture(value)
            for placeholder, value in zip(self._function.inputs, inputs, strict=True)
        }
        outputs = [x.name for x in tf.nest.flatten(self._results)]
        computed = [x for x in dict.fromkeys(outputs) if x not in values]
        if self._definition is None:
            self._definition = self._create_definition(computed)
        definition = self._definition
        # The import would make other objects of them, which have no graph.
        for called in self._function.graph._functions.values():
            graph._add_function_recursive(called)
        read = {x for node in definition.node for x in node.input}
        copies = tf.graph_util.import_graph_def(
            definition,
            input_map={k: v for k, v in values.items() if k.split(":")[0] in read},
            return_elements=computed,
            name=name,
        )
        values |= zip(computed, copies, strict=True)
        return tf.nest.pack_sequence_as(self._results, [values[x] for x in outputs])

    def _create_definition(self, outputs):
        """What the outputs need, and what has an effect."""
        graph = self._function.graph
        wanted = [graph.get_tensor_by_name(x).op for x in outputs]
        wanted += graph.control_outputs
        names = tuple(op.name for op in wanted)
        needed = {op.name for op in needed_operations(wanted)}
        definition = graph.as_graph_def()
        nodes = [node for node in definition.node if node.name in needed]
        definition = GraphDef(
            node=nodes, library=definition.library, versions=definition.versions
        )
        if self._optimize is not None:
            definition = self._optimize(definition, names)
        given = {placeholder.op.name for placeholder in self._function.inputs}
        nodes = [node for node in definition.node if node.name not in given]
        return GraphDef(
            node=_merge_constants(nodes, names, given), versions=definition.versions
        )


def needed_operations(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """All that run where these are wanted, these included."""
    pending, needed = list(operations), set()
    while pending:
        op = pending.pop()
        if op not in needed:
            needed.add(op)
            pending += [x.op for x in op.inputs]
            pending += op.control_inputs
    return needed


def _merge_constants(nodes, outputs, given):
    """The nodes with one constant for each value, besides those that are outputs.

    Grappler has a constant wait for the inputs that it was made of; not for those that
    are given.
    """
    first, same, kept = {}, {}, []
    for node in nodes:
        waits_for_given = [x for x in node.input if x[0] == "^" and x[1:] in given]
        for name in waits_for_given:
            node.input.remove(name)
        if node.op == "Const" and not node.input and node.name not in outputs:
            value = node.attr["value"].SerializeToString()
            same[node.name] = first.setdefault(value, node.name)
        if same.get(node.name, node.name) == node.name:
            kept.append(node)
    for node in kept:
        for place, name in enumerate(node.input):
            mark = "^" if name.startswith("^") else ""  # of a control dependency
            name = name.removeprefix("^")
            node.input[place] = mark + same.get(name, name)
    return kept


def _spec(tensor):
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)


def _source(tensor):
    op = tensor.op
    return op.inputs[0] if op.type == "Identity" and not op.control_inputs else tensor
