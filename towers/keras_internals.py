"""Private parts of Keras 3.15, each in one function; `tests/test_internals.py` names
those that another version lacks."""

from collections.abc import Callable
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
    gives what is called in place of an operation."""
    return network._run_through_graph(inputs, operation_fn=replace)


def detach(operation: keras.Operation) -> None:
    """Forgets the calls of an operation, which another network may then call."""
    operation._inbound_nodes.clear()
    operation._outbound_nodes.clear()


def rename(variable: keras.Variable, path: str) -> None:
    """Gives a variable another path."""
    variable._path = path


def initialize(variable: keras.Variable, replace: Callable[[Callable], Callable]):
    """Gives a variable of a `keras.StatelessScope` its first value, if it has none yet;
    `replace` gives the initializer that is used in place of its own."""
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
