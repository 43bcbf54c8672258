"""The first parameters of a run that starts from trained ones."""

import contextlib
import dataclasses
import inspect
import os
import re
from collections.abc import Iterator

import keras
import numpy as np
from keras import layers as keras_layers

from towers import console
from towers.config import choices
from towers.config.networks import MODELS
from towers.config.pretrained import IMAGENET, find_weights
from towers.data.files.paths import reason
from towers.data.files.reading import local_copy
from towers.errors import CheckpointError, DataError, one_line
from towers.keras_internals import layers_of
from towers.models import torch_names
from towers.models.create import pretrained
from towers.models.keras import applications
from towers.models.layers.attention import Tokens
from towers.parallel.trainer import Trainer
from towers.run.checkpointer import Checkpointer
from towers.run.folder import RunFolder
from towers.run.weights import Stored, StoredWeights, open_weights, weights_in_memory

KINDS = ("params", "state")

# In the name of a class: Keras' stems are conv2d of Conv2D, re_lu of ReLU.
_BEFORE_WORD = re.compile("(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])")


def start_from(trainer: Trainer, init_from: str, model: str) -> set[str]:
    """Loads parameters and model state where name and shape match, and lists the rest.
    Moving averages start at the parameters.

    Returns the variables of `Trainer.state` that have no value there. CheckpointError
    where the source cannot be read, or nothing in it fits.
    """
    state, choice = trainer.state(), choices.find("model", model)
    with _source(init_from, model, state, trainer) as weights:
        taken, missing, drawn = _fill(state, weights)
        used = {x.name for x in taken.values()} | {x.name for _, x in drawn}
        not_used = [x.name for x in weights.all() if x.name not in used]
    if not taken:
        first = drawn[0][0] if drawn else missing[0]
        there = f"is {list(drawn[0][1].shape)}" if drawn else "is not"
        raise CheckpointError(
            f"init_from={init_from}: nothing in {weights.path} fits; "
            f"{first} {list(state[first].shape)} {there} there{_other_names(weights)}"
        )
    if choice.own_moments:
        applications.correct_variances(choice.options["name"], state)
    trainer.load(state)
    console.line(f"starting from {len(taken)} variables of {weights.path}")
    unknown = [ours for ours, theirs in weights.layers.items() if theirs is None]
    for stem in sorted({_split_number(name)[0] for name in unknown}):
        console.line(
            f"not taken: layers {stem}, {stem}_1, ...: there are more or fewer there"
        )
    for line in _other_shapes(drawn, state):
        console.line(f"not taken: {line}")
    for name in missing:
        console.line(f"not taken: {name} {list(state[name].shape)} is not there")
    for name in not_used:
        console.line(f"not taken: {name} is only there")
    return {*missing, *(name for name, _ in drawn)}


def _other_names(weights):
    """Names of the tensors of a file of PyTorch, and the networks that can be read."""
    if not weights.is_of_torch:
        return ""
    names = list(weights.named)
    known = ", ".join(name for name, row in MODELS.items() if row.pretrained)
    return (
        f". It has {len(names)} tensors: {one_line(', '.join(names[:3]), 200)}, ... "
        f"Files of these networks can be read: {known}; others are given as Keras "
        "models, or with TORCH_NAMES in --model=FILE.py:FUNCTION"
    )


def read_variables(
    path: str, model: str, network: keras.Model
) -> dict[str, np.ndarray]:
    """The variables of a network, by their names, that a file of PyTorch or safetensors
    has; CheckpointError where it cannot be read."""
    state = {f"params/{x.path}": x.numpy() for x in network.variables}
    with open_weights(path) as weights:
        taken, _, _ = _fill(state, _with_our_names(weights, model, network))
    return {name.partition("/")[2]: state[name] for name in taken}


def _other_shapes(drawn, state):
    """Lines about variables of another shape; one line for a layer, such as the head,
    that has another number of outputs there."""
    lines = {}
    for name, stored in drawn:
        ours, theirs = list(state[name].shape), list(stored.shape)
        line = f"{name} {ours} is {theirs} there"
        if ours and theirs and ours[:-1] == theirs[:-1]:
            layer = name.partition("/")[2].rpartition("/")[0]
            line = f"{layer} has {theirs[-1]} outputs there and {ours[-1]} here"
        lines[line] = None
    return list(lines)


def _fill(state, weights):
    """Puts into a state what fits. Returns name -> array that was taken, the names that
    are missing there, and (name, array) of those that have another shape there."""
    taken, missing, drawn = {}, [], []
    layers = _layers(state)
    for name, value in state.items():
        kind, _, variable = name.partition("/")
        if kind not in KINDS:
            continue
        shapes = layers[variable.rpartition("/")[0]]
        stored = weights.find(kind, variable, shapes)
        if stored is None:
            missing.append(name)
        elif stored.shape in (value.shape, _shape_as_depthwise(value.shape)):
            taken[name] = stored
        else:
            drawn.append((name, stored))
    for name, stored in taken.items():
        values = np.asarray(stored.read()).astype(state[name].dtype)
        set_initial(state, name, values.reshape(state[name].shape))
    return taken, missing, drawn


def set_initial(state: dict[str, np.ndarray], name: str, values: np.ndarray) -> None:
    """Sets a variable of a state, and its moving average, which starts there."""
    state[name] = values
    average = f"averages/{name.partition('/')[2]}"
    if average in state:
        state[average] = values


def _layers(state):
    """Layer -> its variables' names and shapes, those that are trained first."""
    layers = {}
    for name, value in state.items():
        kind, _, variable = name.partition("/")
        if kind in KINDS:
            owner = variable.rpartition("/")[0]
            layers.setdefault(owner, {})[variable] = value.shape
    return layers


def _shape_as_depthwise(shape):
    """The shape of a variable as the kernel of Keras' depthwise convolution, which an
    export has for a grouped convolution or a scale of channels; None where it cannot
    be one. The order of the elements is the same."""
    match shape:
        case (height, width, 1, channels):
            return height, width, channels, 1
        case (channels,):
            return 1, 1, channels, 1
    return None


def _with_our_names(weights, model, network):
    """Weights of PyTorch by the names of the network's variables, in their layout."""
    ours = {variable.path: tuple(variable.shape) for variable in network.variables}
    tables = torch_names.tables(model)
    places, table = torch_names.places(ours, tables, weights.named)
    for name in torch_names.missing_variables(table, ours).values():
        if name in weights.named:
            raise CheckpointError(
                f"init_from={weights.path}: it has {name}, for which model={model} has "
                "no place; deit_tiny, deit_small and deit_base have one"
            )
    grids = {
        layer.table.path: tuple(layer.input.shape[1:3])
        for layer in layers_of(network)
        if isinstance(layer, Tokens) and layer.has_class_token
    }
    used = {place.name for place in places.values()}
    named = {name: x for name, x in weights.named.items() if name not in used}
    for variable, place in places.items():
        named[variable] = _in_our_layout(
            weights.named[place.name], place, variable, ours[variable], grids
        )
    return dataclasses.replace(weights, named=named)


def _in_our_layout(stored, place, variable, shape, grids):
    """A tensor of PyTorch, or a part of it, as one of our variables."""
    theirs = stored.shape
    if place.parts > 1:
        theirs = (theirs[0] // place.parts, *theirs[1:])
    theirs = torch_names.shape_of_ours(theirs, variable, shape)

    def read():
        return torch_names.to_ours(place.part_of(stored.read()), variable)

    if variable in grids and torch_names.is_resampled(theirs, shape):
        return Stored(
            stored.name,
            shape,
            lambda: torch_names.resample_positions(read()[0], grids[variable]),
        )
    return Stored(stored.name, theirs, read)


def _with_automatic_names(weights, state):
    """The weights for a network of Keras, or of the user, whose layers have automatic
    names, such as conv2d_3: Keras numbers them per class through a process, in the
    order in which they are made. Where the file has another number of layers of a
    class, the names there are unknown (None)."""
    ours = _by_stem(owner.rpartition("/")[2] for owner in _layers(state))
    theirs, pairs = _by_stem(weights.layer_names()), {}
    for stem in ours.keys() & theirs.keys():
        is_known = len(ours[stem]) == len(theirs[stem])
        their_names = theirs[stem] if is_known else [None] * len(ours[stem])
        pairs |= zip(ours[stem], their_names, strict=True)
    return dataclasses.replace(weights, layers=pairs)


def _by_stem(names):
    """Stem -> the automatic names of it, in the order of their numbers."""
    classes = dict(inspect.getmembers(keras_layers, inspect.isclass))
    stems = {_BEFORE_WORD.sub("_", name).lower() for name in classes}
    groups = {}
    for name in sorted(set(names), key=_split_number):
        stem, _ = _split_number(name)
        if stem in stems:
            groups.setdefault(stem, []).append(name)
    return groups


def _split_number(name):
    """conv2d_3 -> conv2d and 3; the number of conv2d is 0."""
    match = re.fullmatch(r"(.*?)(?:_(\d{1,9}))?", name, re.DOTALL)
    return match[1], int(match[2] or 0)


@contextlib.contextmanager
def _source(path, model, state, trainer) -> Iterator[StoredWeights]:
    """The weights that the option init_from, `path`, names."""
    choice = choices.find("model", model)
    if path == IMAGENET and choice.own_moments:
        try:
            arrays = pretrained(model)
        except OSError as error:
            raise CheckpointError(str(error)) from error
        yield weights_in_memory(f"{model}, trained on ImageNet", arrays)
        return
    try:
        path = local_copy(os.path.expanduser(path))
    except (OSError, DataError) as error:
        raise CheckpointError(f"init_from={path}: {reason(error)}") from error
    if path == IMAGENET:
        path = find_weights(model)
    with open_weights(path) as weights:
        if weights is not None:
            if weights.is_of_torch:
                weights = _with_our_names(weights, model, trainer.model)
            elif choice.own_moments or choice.is_in_a_file or choice.is_given:
                weights = _with_automatic_names(weights, state)
            yield weights
            return
    folder, checkpoint = RunFolder(path), None
    if not os.path.isfile(path):
        checkpoint = Checkpointer(folder.checkpoints).read("best")
    if checkpoint is None:
        where = path if os.path.isfile(path) else folder.checkpoints
        raise CheckpointError(
            f"init_from={path}: {where} holds no checkpoint; give the "
            "folder of a run that was trained, a .keras, .h5, .safetensors or .pth "
            "file, a SavedModel or a checkpoint of TensorFlow, or drop --init_from"
        )
    tensors = checkpoint.tensors
    kept = {k: v for k, v in tensors.items() if k.partition("/")[0] in KINDS}
    yield weights_in_memory(str(checkpoint.path), kept)
