"""Graphs: the operations that run, the functions that they call."""

import functools

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from towers.parallel.compilation import needed_operations


def running(graph: tf.Graph) -> list[tf.Operation]:
    """The operations that outputs and side effects need, in the order of creation.

    TensorFlow prunes the others of a function before it places anything.
    """
    outputs = [tensor.op for tensor in getattr(graph, "outputs", [])]
    needed = needed_operations([*outputs, *getattr(graph, "control_outputs", [])])
    return [op for op in graph.get_operations() if op in needed]


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
