"""Private parts of Keras 3.15, each in one function."""

from collections.abc import Callable, Sequence
from typing import Any

import keras


def layers_of(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Return the layer and the layers in it, at any depth."""
    return list(layer._flatten_layers())


def last_operation(output: keras.KerasTensor) -> keras.Operation:
    """Return the operation of a functional network that computes an output."""
    return output._keras_history.operation


def last_inputs(output: keras.KerasTensor) -> list[keras.KerasTensor]:
    """Return the inputs of the operation that computes an output."""
    history = output._keras_history
    return history.operation._inbound_nodes[history.node_index].input_tensors


def run_through_graph(
    network: keras.Model, inputs: Any, replace: Callable[[keras.Operation], Callable]
) -> Any:
    """Return the outputs of a functional network, whose operations are replaced."""
    return network._run_through_graph(inputs, operation_fn=replace)


def calls_of(network: keras.Model) -> list[Any]:
    """Return the calls of operations of a functional network, in their order.

    Each has `operation`, `input_tensors` and `outputs`.
    """
    depths = network._nodes_by_depth
    return [
        call
        for depth in sorted(depths, reverse=True)
        for call in depths[depth]
        if not call.is_input
    ]


def run_calls(
    calls: Sequence[Any],
    values: dict[int, Any],
    replace: Callable[[keras.Operation], Callable],
) -> None:
    """Make some calls of a functional network.

    Args:
        calls: part of `calls_of`.
        values: id of a symbolic tensor -> value; the outputs are added.
        replace: returns what is called in place of an operation.
    """
    for call in calls:
        args, kwargs = call.arguments.fill_in(values)
        outputs = keras.tree.flatten(replace(call.operation)(*args, **kwargs))
        values |= zip(map(id, call.outputs), outputs, strict=False)


def has_mask(x: keras.KerasTensor) -> bool:
    """Return whether later layers read a mask of a tensor."""
    return getattr(x, "_keras_mask", None) is not None


def detach(operation: keras.Operation) -> None:
    """Forget the calls of an operation, so that another network may call it."""
    operation._inbound_nodes.clear()
    operation._outbound_nodes.clear()


def rename(variable: keras.Variable, path: str) -> None:
    """Give a variable another path."""
    variable._path = path


def initialize(variable: keras.Variable, replace: Callable[[Callable], Callable]):
    """Initialize a variable of a `keras.StatelessScope` by a replaced initializer."""
    if variable._initializer is not None:
        variable._initializer = replace(variable._initializer)
        variable._deferred_initialize()


def spatial_noise_shape(
    layer: keras.layers.Layer, x: keras.KerasTensor
) -> tuple | None:
    """Return the noise shape of SpatialDropout; None for another layer."""
    if not hasattr(layer, "_get_noise_shape"):
        return None
    return tuple(layer._get_noise_shape(x))


def drop_seed_generators(layer: keras.layers.Layer) -> None:
    """Remove the random generators of a layer that draws nothing."""
    layer._seed_generators.clear()
