"""The first parameters of a run that starts from trained ones."""

import contextlib
import dataclasses
import inspect
import math
import os
import re
from collections.abc import Iterator, Sequence
from unicodedata import normalize

import keras
import numpy as np
from keras import layers as keras_layers

from towers import console
from towers.config import choices
from towers.config.networks import MODELS
from towers.config.pretrained import IMAGENET, find_weights
from towers.data.files.paths import reason
from towers.data.files.reading import local_copy
from towers.errors import CheckpointError, ConfigError, DataError
from towers.keras_internals import layers_of
from towers.messages import one_line, shown
from towers.models import torch_names
from towers.models.create import create_model, pretrained
from towers.models.keras import applications
from towers.models.layers.attention import Tokens
from towers.parallel.trainer import Trainer
from towers.run.checkpointer import Checkpointer
from towers.run.folder import RunFolder
from towers.run.weights import Stored, StoredWeights, open_weights, weights_in_memory

KINDS = ("params", "state")

# Minimum share of the parameters outside of the head that a start loads.
MIN_TAKEN = 0.9

# Networks of about the size of a file that are compared with it, and a side of images.
NUM_NEAR, SIDE = 6, 224

# In the name of a class: Keras' stems are conv2d of Conv2D, re_lu of ReLU.
_BEFORE_WORD = re.compile("(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])")


def start_from(
    trainer: Trainer, init_from: str, model: str, class_names: Sequence[str] = ()
) -> set[str]:
    """Loads parameters and model state where name and shape match, and lists the rest.

    The outputs of the head follow the names of the classes where the source has them.
    Moving averages start at the parameters.

    Returns:
        The variables of `Trainer.state` that have no value there.

    Raises:
        CheckpointError: the source cannot be read, or is of another network.
    """
    state, choice = trainer.state(), choices.find("model", model)
    with _source(init_from, model, state, trainer) as weights:
        ours, theirs = (
            tuple(normalize("NFC", x) for x in names)
            for names in (class_names, weights.class_names)
        )
        last = [name for name in state if name.startswith("params/")][-1]
        head = last.rpartition("/")[0]

        def by_class(name, stored):
            is_head = name.rpartition("/")[0] == head
            return _by_class(stored, state[name], theirs, ours) if is_head else stored

        taken, missing, drawn = _match(state, weights, by_class)
        used = {x.name for x in taken.values()} | {x.name for _, x in drawn}
        not_used = [x for x in weights.all() if x.name not in used]
        if problem := _misfit(state, taken, drawn, not_used, weights, head):
            raise CheckpointError(
                f"init_from={init_from}: {weights.path} is of another network than "
                f"model={model}: {problem}. {_nearest_networks(weights, trainer.model)}"
            )
        _read(state, taken)
    if choice.own_moments:
        applications.correct_variances(choice.options["name"], state)
    trainer.load(state)
    console.line(f"starting from {len(taken)} variables of {weights.path}")
    new = {*missing, *(name for name, _ in drawn)}
    of_head = {name for name in state if name.rpartition("/")[0] == head}
    new_classes = [x for x in ours if theirs and x not in theirs]
    if new_classes or of_head & taken.keys():
        if about := _about_head(theirs, ours, new_classes):
            console.line(f"{head.partition('/')[2]}: {about}")
        new |= of_head if new_classes else set()
        drawn = [(name, x) for name, x in drawn if name not in of_head]
    unknown = [ours for ours, theirs in weights.layers.items() if theirs is None]
    for stem in sorted({_split_number(name)[0] for name in unknown}):
        console.line(
            f"not taken: layers {stem}, {stem}_1, ...: there are more or fewer there"
        )
    for line in _other_shapes(drawn, state):
        console.line(f"not taken: {line}")
    for name in missing:
        console.line(f"not taken: {name} {list(state[name].shape)} is not there")
    for x in not_used:
        console.line(f"not taken: {x.name} is only there")
    return new


def _by_class(stored, value, theirs, ours):
    """Returns a variable of the head with the outputs of our classes: the source's by
    name, or those of `value`; a variable of no shape if no class is there.
    """
    shape = *value.shape[:-1], len(theirs)
    is_by_class = theirs and stored.shape == shape and value.shape[-1] == len(ours)
    if not is_by_class or theirs == ours:
        return stored
    if not {*theirs} & {*ours}:
        return stored._replace(shape=())

    def read():
        array, values = np.asarray(stored.read()), value.copy()
        for index, name in enumerate(ours):
            if name in theirs:
                values[..., index] = array[..., theirs.index(name)]
        return values

    return Stored(stored.name, value.shape, read)


def _about_head(theirs, ours, new):
    """Return which outputs of a source are taken; empty if all are."""
    if new:
        listed = shown(", ".join(new), 100)
        return f"{len(ours) - len(new)} of {len(ours)} classes are there; new: {listed}"
    if not theirs and ours:
        return f"no class names there; output 1 is taken for {shown(ours[0], 40)}, ..."
    return "the outputs there follow the class names here" if theirs != ours else ""


def _misfit(state, taken, drawn, not_used, weights, head):
    """Return why weights are of another network; empty if they fit."""
    trunk = {
        name: value.size
        for name, value in state.items()
        if name.startswith("params/") and name.rpartition("/")[0] != head
    }
    total = sum(trunk.values())
    count = sum(trunk[name] for name in trunk.keys() & taken.keys())
    if not taken or count < MIN_TAKEN * total:
        return (
            f"it has {len(trunk.keys() & taken.keys())} of the {len(trunk)} parameters "
            f"outside of {head.partition('/')[2]}, {count / max(1, total):.0%} of "
            "their numbers"
        )
    if not weights.of_torch:
        return ""
    for name, stored in drawn:
        ours, theirs = state[name].shape, stored.shape
        # Images may have other channels.
        if name in trunk and (ours[:-2], ours[-1:]) != (theirs[:-2], theirs[-1:]):
            return f"{name} is {list(ours)} here and {list(theirs)} there"
    blocks = {_block(x.name) for x in taken.values()}
    more = [x for x in not_used if math.prod(x.shape) > 1 and _block(x.name) in blocks]
    if count < MIN_TAKEN * (count + sum(math.prod(x.shape) for x in not_used)):
        more += not_used
    return f"it also has {more[0].name} {list(more[0].shape)}" if more else ""


def _block(name):
    """Return layer1.0 of layer1.0.conv1.weight; the name if it has no number."""
    match = re.match(r".*?\d+(\.\d+)*(?=\.)", name)
    return match[0] if match else name


def _nearest_networks(weights, model):
    """Return a sentence with the three networks that have most of the weights, by names
    and shapes; files of PyTorch are of large images, others of those of `model`.
    """
    shape = (SIDE, SIDE, 3) if weights.of_torch else model.inputs[0].shape[1:]
    arrays = (weights.of_torch or {x.name: x for x in weights.all()}).values()
    total = max(1, sum(math.prod(x.shape) for x in arrays))
    sizes = {name: row.num_params for name, row in MODELS.items() if row.num_params}
    names = sorted(sizes, key=lambda name: abs(math.log(sizes[name] / total)))
    scores = []
    for name in names[:NUM_NEAR]:
        with contextlib.suppress(CheckpointError, ConfigError):
            network = create_model(name, image_shape=shape, num_classes=2)
            named = weights
            if weights.of_torch:
                named = _with_our_names(weights, name, network)
            state = {f"params/{x.path}": x for x in network.trainable_variables}
            state |= {f"state/{x.path}": x for x in network.non_trainable_variables}
            counts = {k: math.prod(x.shape) for k, x in state.items()}
            count = sum(counts[k] for k in _match(state, named)[0])
            scores.append((count / max(total, sum(counts.values())), name))
    nearest = [f"{name} ({x:.0%})" for x, name in sorted(scores)[:-4:-1] if x > 0.01]
    if nearest:
        return (
            f"Nearest networks by names and shapes: {', '.join(nearest)}; give others "
            "as --model=FILE.py:FUNCTION, with TORCH_NAMES"
        )
    names = one_line(", ".join(x.name for x in arrays), 200)
    nearest = [name for name, row in MODELS.items() if row.pretrained]
    return f"It has {names}. Files of these networks are read: {', '.join(nearest)}"


def read_variables(
    path: str, model: str, network: keras.Model
) -> dict[str, np.ndarray]:
    """The variables of a network, by their names, that a file of PyTorch or safetensors
    has; CheckpointError where it cannot be read.
    """
    state = {f"params/{x.path}": x.numpy() for x in network.variables}
    with open_weights(path) as weights:
        taken, _, _ = _fill(state, _with_our_names(weights, model, network))
    return {name.partition("/")[2]: state[name] for name in taken}


def _other_shapes(drawn, state):
    """Lines about variables of another shape; one line for a layer, such as the head,
    that has another number of outputs there.
    """
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
    """Puts into a state what fits; returns what `_match` does."""
    found = _match(state, weights)
    _read(state, found[0])
    return found


def _match(state, weights, change=lambda name, stored: stored):
    """Returns name -> array that fits a variable of a state, the names that are missing
    there, and (name, array) of those that have another shape there; `change` may give
    another array in place of a variable's.
    """
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
            continue
        stored = change(name, stored)
        if stored.shape in (value.shape, _shape_as_depthwise(value.shape)):
            taken[name] = stored
        else:
            drawn.append((name, stored))
    return taken, missing, drawn


def _read(state, taken):
    for name, stored in taken.items():
        values = np.asarray(stored.read()).astype(state[name].dtype)
        set_initial(state, name, values.reshape(state[name].shape))


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
    be one. The order of the elements is the same.
    """
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
    prefix = torch_names.prefix(ours, tables, weights.of_torch)
    own = {
        name.removeprefix(prefix): x._replace(name=name.removeprefix(prefix))
        for name, x in weights.of_torch.items()
        if name.startswith(prefix)
    }
    places, table = torch_names.places(ours, tables, own)
    for name in torch_names.missing_variables(table, ours).values():
        if name in own:
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
    named = {name: x for name, x in own.items() if name not in used}
    for variable, place in places.items():
        named[variable] = _in_our_layout(
            own[place.name], place, variable, ours[variable], grids
        )
    path, rest = weights.path, len(weights.of_torch) - len(own)
    if prefix:
        path += f", names {prefix}*"
    if rest:
        path += f" ({rest} others are not taken)"
    return dataclasses.replace(weights, path=path, named=named)


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
    class, the names there are unknown (None).
    """
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
            if weights.of_torch:
                weights = _with_our_names(weights, model, trainer.model)
            elif choice.own_moments or choice.is_in_a_file or choice.is_given:
                weights = _with_automatic_names(weights, state)
            yield weights
            return
    folder, checkpoint = RunFolder(path), None
    if not os.path.isfile(path):
        checkpoint = Checkpointer(folder.checkpoints).read("best")
    if checkpoint is None:
        if not os.path.lexists(path):
            raise CheckpointError(f"init_from={path}: there is no such file or folder")
        where = path if os.path.isfile(path) else folder.checkpoints
        raise CheckpointError(
            f"init_from={path}: {where} holds no checkpoint; give the "
            "folder of a run that was trained, a .keras, .h5, .safetensors or .pth "
            "file, a SavedModel or a checkpoint of TensorFlow, or drop --init_from"
        )
    tensors = checkpoint.tensors
    kept = {k: v for k, v in tensors.items() if k.partition("/")[0] in KINDS}
    names = checkpoint.trainer_state["dataset_info"]["class_names"]
    weights = weights_in_memory(str(checkpoint.path), kept)
    yield dataclasses.replace(weights, class_names=tuple(map(str, names)))
