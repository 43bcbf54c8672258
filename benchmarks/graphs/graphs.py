"""Graphs: the operations that run, the functions that they call, loops in them."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry


def running(graph: tf.Graph) -> list[tf.Operation]:
    """The operations that outputs and side effects need, in the order of creation.

    TensorFlow prunes the others of a function before it places anything.
    """
    outputs = [tensor.op for tensor in getattr(graph, "outputs", [])]
    needed = needed_operations([*outputs, *getattr(graph, "control_outputs", [])])
    return [op for op in graph.get_operations() if op in needed]


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


def called(graph: tf.Graph, op: tf.Operation) -> dict[str, tf.Graph]:
    """The graphs of the functions that an operation calls: attribute -> graph.

    Of several functions in one attribute, as of `Case`, each is named with its place:
    "branches:1".
    """
    return {
        key: graph._get_function(name).graph
        for key, name in _function_names(op).items()
    }


def _function_names(op):
    names = {}
    for attribute, kind in _function_attributes(op.type):
        value = op.get_attr(attribute)
        if kind == "func":
            names[attribute] = value.name
        else:
            names |= {f"{attribute}:{i}": f.name for i, f in enumerate(value)}
    return {key: name for key, name in names.items() if name}


@functools.cache
def _function_attributes(op_type):
    """Attributes of an operation's definition that name functions, with their kind."""
    definition = op_def_registry.get(op_type)
    attributes = definition.attr if definition else []
    return [(a.name, a.type) for a in attributes if a.type in ("func", "list(func)")]


def is_compiled(op: tf.Operation) -> bool:
    """True if XLA compiles the function that an operation calls."""
    try:
        return bool(op.get_attr("_XlaMustCompile"))
    except ValueError:
        return False


@functools.cache
def inherited(device: str, caller: str) -> str:
    """The device of an operation in a function: its own, completed by the caller's.

    As `MultiDeviceFunctionBodyPlacer` in TensorFlow's `inline_function_utils.cc`.
    """
    if not caller:
        return device
    spec = tf.DeviceSpec.from_string(caller)
    return spec.make_merged_spec(tf.DeviceSpec.from_string(device)).to_string()


@functools.cache
def short(device: str) -> str:
    """ "/job:localhost/.../device:CPU:1" -> "/CPU:1"; none stands for the host."""
    spec = tf.DeviceSpec.from_string(device)
    return f"/{spec.device_type or 'CPU'}:{spec.device_index or 0}"


def while_loop(
    condition: Callable, body: Callable, variables: Sequence[Any]
) -> Sequence[Any]:
    """`tf.while_loop`, one turn after the other, whose results stay on their devices.

    TensorFlow returns the results of a body by identities without a device, which are
    placed on the first GPU, or on the loop's device: gradients of other towers would be
    copied there and back in every turn. Here these identities are on the device of what
    they return.

    Args:
        condition, body, variables: as of `tf.while_loop`.
    """
    if tf.executing_eagerly():
        return tf.while_loop(condition, body, variables, parallel_iterations=1)

    def without_outer_devices(*values):
        # A device function in scope would be copied into every function that the body
        # traces, with the devices around it; two towers may share such a function.
        graph = tf.compat.v1.get_default_graph()
        devices = graph._device_function_stack
        graph._device_function_stack = type(devices)()
        try:
            return body(*values)
        finally:
            graph._device_function_stack = devices

    with tf.compat.v1.device(_device_of_identity):
        return tf.while_loop(
            condition, without_outer_devices, variables, parallel_iterations=1
        )


def _device_of_identity(op):
    if op.device or op.type != "Identity":
        return op.device
    return op.inputs[0].device
