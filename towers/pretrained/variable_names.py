"""Weights of other programs, renamed and laid out as the variables of a network."""

import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Mapping

import keras
import numpy as np
from keras import layers as keras_layers

from towers.errors import CheckpointError
from towers.keras_internals import layers_of
from towers.models.layers.attention import Tokens
from towers.pretrained import torch_names
from towers.pretrained.weights import Stored, StoredWeights

KINDS = ("params", "state")

# Boundaries of words in class names: Keras names Conv2D conv2d and ReLU re_lu.
_BEFORE_WORD = re.compile("(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])")

Shapes = dict[str, tuple[int, ...]]


def shapes_by_layer(state: Mapping[str, np.ndarray]) -> dict[str, Shapes]:
    """Return layer -> names and shapes of its variables, trainable ones first."""
    layers: dict[str, Shapes] = {}
    for name, value in state.items():
        kind, _, variable = name.partition("/")
        if kind in KINDS:
            owner = variable.rpartition("/")[0]
            layers.setdefault(owner, {})[variable] = value.shape
    return layers


def with_torch_names(
    weights: StoredWeights, model: str, network: keras.Model
) -> StoredWeights:
    """Return weights of PyTorch in the names and layouts of a network's variables."""
    shapes = {variable.path: tuple(variable.shape) for variable in network.variables}
    tables = torch_names.tables(model)
    prefix = torch_names.prefix(shapes, tables, weights.torch_arrays)
    own = {
        name.removeprefix(prefix): x._replace(name=name.removeprefix(prefix))
        for name, x in weights.torch_arrays.items()
        if name.startswith(prefix)
    }
    places, table = torch_names.places(shapes, tables, own)
    for name in torch_names.missing_variables(table, shapes).values():
        if name in own:
            why = f"model={model} lacks its {name}, which deit_* and dinov2_* have"
            raise CheckpointError(f"init_from={weights.path}: {why}")
    grids = {
        layer.table.path: tuple(layer.input.shape[1:3])
        for layer in layers_of(network)
        if isinstance(layer, Tokens) and layer.positions == "learned"
    }
    used = {place.name for place in places.values()}
    named = {name: x for name, x in own.items() if name not in used}
    for variable, place in places.items():
        shape, grid = shapes[variable], grids.get(variable)
        named[variable] = _in_our_layout(own[place.name], place, variable, shape, grid)
    path, num_others = weights.path, len(weights.torch_arrays) - len(own)
    if prefix:
        path += f", names {prefix}*"
    if num_others:
        path += f" ({num_others} others are not taken)"
    return dataclasses.replace(weights, path=path, named=named)


def _in_our_layout(stored, place, variable, shape, grid):
    theirs = stored.shape[:2] if place.is_pixel else stored.shape
    if place.parts > 1:
        theirs = (theirs[0] // place.parts, *theirs[1:])
    theirs = torch_names.shape_of_ours(theirs, variable, shape)
    is_resampled = grid and torch_names.is_resampled(theirs, shape, grid)

    def read():
        values = torch_names.to_ours(place.part_of(stored.read()), variable)
        if is_resampled:
            num_tokens = shape[0] - math.prod(grid)
            return torch_names.resample_positions(values[0], grid, num_tokens)
        return values

    return Stored(stored.name, shape if is_resampled else theirs, read)


def with_automatic_names(
    weights: StoredWeights, state: Mapping[str, np.ndarray]
) -> StoredWeights:
    """Return weights for layers with automatic names, in their order."""
    # Keras numbers such names, as in conv2d_3, by class and process. If the file has
    # another number of layers of a class, they are unknown.
    ours = _by_stem(owner.rpartition("/")[2] for owner in shapes_by_layer(state))
    theirs, pairs = _by_stem(weights.layer_names()), dict[str, str | None]()
    for stem in ours.keys() & theirs.keys():
        is_known = len(ours[stem]) == len(theirs[stem])
        pairs |= dict.fromkeys(ours[stem])
        if is_known:
            pairs |= zip(ours[stem], theirs[stem], strict=True)
    return dataclasses.replace(weights, layers=pairs)


def _by_stem(names: Iterable[str]) -> dict[str, list[str]]:
    """Return stem -> its automatic names, in the order of their numbers."""
    classes = dict(inspect.getmembers(keras_layers, inspect.isclass))
    stems = {_BEFORE_WORD.sub("_", name).lower() for name in classes}
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names), key=split_number):
        stem, _ = split_number(name)
        if stem in stems:
            groups.setdefault(stem, []).append(name)
    return groups


def split_number(name: str) -> tuple[str, int]:
    """Split conv2d_3 into conv2d and 3; the number of conv2d is 0."""
    stem, underscore, number = name.rpartition("_")
    if underscore and re.fullmatch(r"\d{1,9}", number, re.ASCII):
        return stem, int(number)
    return name, 0
