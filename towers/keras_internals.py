"""Private parts of Keras 3.15, each in one function; `tests/test_internals.py` names
those that another version lacks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras


def layers_of(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layer and the layers in it, at any depth."""
    return list(layer._flatten_layers())


def last_operation(output: keras.KerasTensor) -> keras.Operation:
    """The operation of a functional network that computes an output."""
    return output._keras_history.operation


def run_through_graph(
    network: keras.Model, inputs: Any, replace: Callable[[keras.Operation], Callable]
) -> Any:
    """The outputs of a functional network, by the traversal that runs it; `replace`
    gives what is called in place of an operation.
    """
    return network._run_through_graph(inputs, operation_fn=replace)


def calls_of(network: keras.Model) -> list[Any]:
    """The calls of operations of a functional network, in the order in which it makes
    them; each has `operation`, `input_tensors` and `outputs`.
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
    """Makes some calls of a functional network.

    Args:
        calls: of `calls_of`.
        values: id of a symbolic tensor -> value; takes the outputs.
        replace: gives what is called in place of an operation.
    """
    for call in calls:
        args, kwargs = call.arguments.fill_in(values)
        outputs = keras.tree.flatten(replace(call.operation)(*args, **kwargs))
        values |= zip(map(id, call.outputs), outputs, strict=False)


def has_mask(x: keras.KerasTensor) -> bool:
    """True if later layers read a mask of a tensor."""
    return getattr(x, "_keras_mask", None) is not None


def detach(operation: keras.Operation) -> None:
    """Forgets the calls of an operation, which another network may then call."""
    operation._inbound_nodes.clear()
    operation._outbound_nodes.clear()


def rename(variable: keras.Variable, path: str) -> None:
    """Gives a variable another path."""
    variable._path = path


def initialize(variable: keras.Variable, replace: Callable[[Callable], Callable]):
    """Gives a variable of a `keras.StatelessScope` its first value, if it has none yet;
    `replace` gives the initializer that is used in place of its own.
    """
    if variable._initializer is not None:
        variable._initializer = replace(variable._initializer)
        variable._deferred_initialize()


def spatial_noise_shape(
    layer: keras.layers.Layer, x: keras.KerasTensor
) -> tuple | None:
    """The shape of the noise of SpatialDropout; None of another layer."""
    if not hasattr(layer, "_get_noise_shape"):
        return None
    return tuple(layer._get_noise_shape(x))


def drop_seed_generators(layer: keras.layers.Layer) -> None:
    """Takes the random generators out of a layer that draws nothing."""
    layer._seed_generators.clear()
