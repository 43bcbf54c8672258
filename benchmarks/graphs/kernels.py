"""TensorFlow's registry of kernels: what an operation can run on.

TensorFlow's package has the registry of its GPU kernels also where there is no GPU, so
that on any machine it can be proved which operations have one.
"""

import functools

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2
from tensorflow.python.framework import kernels, op_def_registry

KernelDef = kernel_def_pb2.KernelDef

CPU, GPU, XLA_ON_GPU = "CPU", "GPU", "XLA_GPU_JIT"


def find_kernel(op: tf.Operation, device_type: str = GPU) -> KernelDef | None:
    """The kernel of an operation of these types on a type of device, or None.

    As `FindKernelRegistration` in TensorFlow's `op_kernel.cc`: the registrations of the
    device type that fit every constraint, of those the one with the highest priority;
    failing that, the registrations for any device ("DEFAULT").

    Args:
        op: in a graph. An attribute that it lacks has the default of its definition.
        device_type: GPU, CPU, or XLA_ON_GPU within a function that XLA compiles.
    """
    if not _types_decide(op.type, device_type):
        return _find_kernel(op, device_type)
    # To read attributes is slow, and a step has thousands of operations.
    types = tuple(tensor.dtype for tensor in (*op.inputs, *op.outputs))
    key = (op.type, device_type, types)
    if key not in _known:
        _known[key] = _find_kernel(op, device_type)
    return _known[key]


# (type of operation, type of device, types of its tensors) -> its kernel.
_known: dict[tuple, KernelDef | None] = {}


def _find_kernel(op, device_type):
    for kind in (
        (device_type,) if device_type == XLA_ON_GPU else (device_type, "DEFAULT")
    ):
        registered = _registered(op.type, kind)
        label = b""
        if any(kernel.label for kernel in registered):
            label = _attribute(op, "_kernel") or b""
        fitting = [
            kernel
            for kernel in registered
            if kernel.label.encode() == label and _fits(op, kernel)
        ]
        if fitting:
            return max(fitting, key=lambda kernel: kernel.priority)
    return None


@functools.cache
def _types_decide(op_type, device_type):
    """True if the types of its tensors determine the kernel of an operation."""
    definition = op_def_registry.get(op_type)
    if definition is None:
        return True
    arguments = [*definition.input_arg, *definition.output_arg]
    known = {a.type_attr or a.type_list_attr for a in arguments}
    return all(
        not kernel.label and all(x.name in known for x in kernel.constraint)
        for kind in (device_type, "DEFAULT")
        for kernel in _registered(op_type, kind)
    )


def host_arguments(
    op: tf.Operation, kernel: KernelDef
) -> tuple[frozenset[int], frozenset[int]]:
    """Places of the inputs and of the outputs that a kernel keeps in host memory."""
    if not kernel.host_memory_arg:
        return frozenset(), frozenset()
    definition, names = op_def_registry.get(op.type), set(kernel.host_memory_arg)
    return (
        _places(op, definition.input_arg, names),
        _places(op, definition.output_arg, names),
    )


def type_attributes(op: tf.Operation) -> str:
    """The types by which its kernel is chosen, such as "Tparams=uint8"."""
    definition = op_def_registry.get(op.type)
    values = []
    for attribute in definition.attr if definition else ():
        if attribute.type == "type":
            dtype = _attribute(op, attribute.name)
            values.append(f"{attribute.name}={tf.as_dtype(dtype).name}")
    return " ".join(values)


@functools.cache
def _registered(op_type, device_type):
    if device_type == XLA_ON_GPU:
        _register_kernels_of_xla()
    registered = kernels.get_registered_kernels_for_op(op_type).kernel
    return [kernel for kernel in registered if kernel.device_type == device_type]


@functools.cache
def _register_kernels_of_xla():
    """XLA registers its kernels, of all devices, when it first compiles."""
    with tf.device("/CPU:0"):
        tf.function(lambda x: x + 1, jit_compile=True)(tf.constant(1.0))


def _fits(op, kernel):
    """True if the attributes of an operation meet all constraints, as in TensorFlow's
    `kernel_def_util.cc`: types mostly, occasionally strings or numbers."""
    for constraint in kernel.constraint:
        value = _attribute(op, constraint.name)
        listed = constraint.allowed_values.list
        allowed = [*listed.type, *listed.s, *listed.i, *listed.f, *listed.b]
        for one in value if isinstance(value, list) else [value]:
            if (one.as_datatype_enum if listed.type else one) not in allowed:
                return False
    return True


def _attribute(op, name):
    try:
        return op.get_attr(name)
    except ValueError:
        return _defaults(op.type).get(name)


@functools.cache
def _defaults(op_type):
    """The types and strings that an operation's definition gives where none is set."""
    definition = op_def_registry.get(op_type)
    return {
        attribute.name: (
            tf.as_dtype(attribute.default_value.type)
            if attribute.type == "type"
            else attribute.default_value.s
        )
        for attribute in (definition.attr if definition else ())
        if attribute.type in ("type", "string") and attribute.HasField("default_value")
    }


def _places(op, arguments, names):
    """Places of the tensors of some arguments; one argument may be several tensors."""
    places, place = set(), 0
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        if argument.name in names:
            places |= set(range(place, place + count))
        place += count
    return frozenset(places)
