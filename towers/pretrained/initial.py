"""The initial parameters of a run that starts from trained weights."""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple
from unicodedata import normalize

import keras
import numpy as np

from towers import console
from towers.config import choices
from towers.config.networks import MODELS
from towers.config.pretrained import IMAGENET, find_weights
from towers.data.files.paths import reason
from towers.data.files.reading import local_copy
from towers.errors import CheckpointError, DataError
from towers.messages import one_line, shown
from towers.models.create import pretrained
from towers.models.keras import applications
from towers.parallel.trainer import Trainer
from towers.pretrained import hub, variable_names
from towers.pretrained.weights import (
    Stored,
    StoredWeights,
    open_weights,
    weights_in_memory,
)
from towers.run.checkpointer import Checkpointer
from towers.run.folder import RunFolder

# Minimum share of the parameters outside of the head that a source must have.
MIN_TAKEN = 0.9


class Match(NamedTuple):
    """The variables of a state in a source, by name."""

    taken: dict[str, Stored]  # arrays of the same shape
    missing: list[str]
    drawn: dict[str, Stored]  # arrays of another shape: the variables stay random


def start_from(
    trainer: Trainer, init_from: str, model: str, class_names: Sequence[str] = ()
) -> dict[str, Sequence[int]]:
    """Load parameters and model state by name and shape, and list the others.

    The outputs of the head follow the class names if the source has them. Moving
    averages start at the parameters.

    Returns:
        The variables of `Trainer.state` that have no value in the source -> outputs
        that have values, if they are of a head with some new classes.

    Raises:
        CheckpointError: The source cannot be read, or is of another network.
    """
    state, choice = trainer.state(), choices.find("model", model)
    head = [name for name in state if name.startswith("params/")][-1].rpartition("/")[0]
    head_names = {name for name in state if name.rpartition("/")[0] == head}
    ours = tuple(normalize("NFC", x) for x in class_names)
    with open_source(init_from, model, state, trainer) as weights:
        theirs = tuple(normalize("NFC", x) for x in weights.class_names)

        def by_class(name, stored):
            if name in head_names:
                return _by_class(stored, state[name], theirs, ours)
            return stored

        match = match_variables(state, weights, by_class)
        used = {x.name for x in (*match.taken.values(), *match.drawn.values())}
        not_used = [x for x in weights.all() if x.name not in used]
        if problem := _mismatch_reason(state, match, not_used, weights, head):
            what = f"{weights.path} is of another network than model={model}"
            why = f"{what}: {problem}. {_nearest_networks(weights)}"
            raise CheckpointError(f"init_from={init_from}: {why}")
        fill(state, match.taken)
    if choice.has_standardization:
        applications.correct_variances(choice.options["name"], state)
    trainer.load(state)
    console.line(f"starting from {len(match.taken)} variables of {weights.path}")
    new: dict[str, Sequence[int]] = dict.fromkeys([*match.missing, *match.drawn], ())
    drawn = match.drawn
    new_classes = [x for x in ours if theirs and x not in theirs]
    if new_classes or head_names & match.taken.keys():
        if about := _head_message(theirs, ours, new_classes):
            console.line(f"{head.partition('/')[2]}: {about}")
        if new_classes:
            known = [i for i, x in enumerate(ours) if x in theirs]
            is_taken = head_names <= match.taken.keys()
            new |= dict.fromkeys(head_names, known if is_taken else ())
        drawn = {name: x for name, x in drawn.items() if name not in head_names}
    unknown = [ours for ours, theirs in weights.layers.items() if theirs is None]
    stems = sorted({variable_names.split_number(name)[0] for name in unknown})
    for line in (
        *(f"layers {x}, {x}_1, ...: there are more or fewer there" for x in stems),
        *_other_shapes(drawn, state),
        *(f"{name} {list(state[name].shape)} is not there" for name in match.missing),
        *(f"{x.name} is only there" for x in not_used),
    ):
        console.line(f"not taken: {line}")
    return new


def _by_class(stored, value, theirs, ours):
    """Return a variable of the head in the order of our classes."""
    shape = *value.shape[:-1], len(theirs)
    is_by_class = theirs and stored.shape == shape and value.shape[-1] == len(ours)
    if not is_by_class or theirs == ours:
        return stored
    if not {*theirs} & {*ours}:
        return stored._replace(shape=())  # it fits no variable

    def read():
        array, values = np.asarray(stored.read()), value.copy()
        for index, name in enumerate(ours):
            if name in theirs:
                values[..., index] = array[..., theirs.index(name)]
        return values

    return Stored(stored.name, value.shape, read)


def _head_message(theirs, ours, new):
    """Return a line about the outputs that are taken; empty if all are."""
    if new:
        listed = shown(", ".join(new), 100)
        return f"{len(ours) - len(new)} of {len(ours)} classes are there; new: {listed}"
    if not theirs and ours:
        return f"no class names there; output 1 is taken for {shown(ours[0], 40)}, ..."
    return "the outputs there follow the class names here" if theirs != ours else ""


def _mismatch_reason(state, match, not_used, weights, head):
    """Return why weights are of another network; empty if they fit."""
    trunk = {
        name: value.size
        for name, value in state.items()
        if name.startswith("params/") and name.rpartition("/")[0] != head
    }
    total, common = sum(trunk.values()), trunk.keys() & match.taken.keys()
    count = sum(trunk[name] for name in common)
    if not match.taken or count < MIN_TAKEN * total:
        return (
            f"it has {len(common)} of the {len(trunk)} parameters outside of "
            f"{head.partition('/')[2]}, {count / max(1, total):.0%} of their numbers"
        )
    if not weights.torch_arrays:
        return ""
    for name, stored in match.drawn.items():
        ours, theirs = state[name].shape, stored.shape
        # The number of channels of the images may differ.
        if name in trunk and (ours[:-2], ours[-1:]) != (theirs[:-2], theirs[-1:]):
            return f"{name} is {list(ours)} here and {list(theirs)} there"
    blocks = {_block(x.name) for x in match.taken.values()}
    more = [x for x in not_used if math.prod(x.shape) > 1 and _block(x.name) in blocks]
    if count < MIN_TAKEN * (count + sum(math.prod(x.shape) for x in not_used)):
        more += not_used
    return f"it also has {more[0].name} {list(more[0].shape)}" if more else ""


def _block(name):
    """Return layer1.0 of layer1.0.conv1.weight; the name if it has no number."""
    match = re.match(r".*?\d+(\.\d+)*(?=\.)", name)
    return match[0] if match else name


def _nearest_networks(weights):
    """Return the names in a file, and the networks of about its size."""
    arrays = [*(weights.torch_arrays.values() or weights.all())]
    total = max(1, sum(math.prod(x.shape) for x in arrays))
    sizes = {name: row.num_params for name, row in MODELS.items() if row.num_params}
    nearest = sorted(sizes, key=lambda name: abs(math.log(sizes[name] / total)))
    names = one_line(", ".join(x.name for x in arrays), 200)
    return (
        f"It has {total:,} numbers in {names}. Networks of about this size: "
        f"{', '.join(nearest[:3])}; --model=FILE.py:FUNCTION, with TORCH_NAMES, gives "
        "others"
    )


def read_variables(
    path: str, model: str, network: keras.Model
) -> dict[str, np.ndarray]:
    """Return the variables of a network in a PyTorch or safetensors file, by path."""
    state = {f"params/{x.path}": x.numpy() for x in network.variables}
    with open_weights(path) as weights:
        if weights is None:
            raise CheckpointError(f"{path} is not a file of PyTorch or safetensors")
        named = variable_names.with_torch_names(weights, model, network)
        fill(state, taken := match_variables(state, named).taken)
    return {name.partition("/")[2]: state[name] for name in taken}


def _other_shapes(drawn, state):
    """Return lines about variables of another shape, one for a layer's outputs."""
    lines = {}
    for name, stored in drawn.items():
        ours, theirs = list(state[name].shape), list(stored.shape)
        line = f"{name} {ours} is {theirs} there"
        if ours and theirs and ours[:-1] == theirs[:-1]:
            layer = name.partition("/")[2].rpartition("/")[0]
            line = f"{layer} has {theirs[-1]} outputs there and {ours[-1]} here"
        lines[line] = None
    return list(lines)


def match_variables(
    state: Mapping[str, np.ndarray],
    weights: StoredWeights,
    change: Callable[[str, Stored], Stored] = lambda name, stored: stored,
) -> Match:
    """Find the variables of a state in weights; `change` may replace an array."""
    match, layers = Match({}, [], {}), variable_names.shapes_by_layer(state)
    for name, value in state.items():
        kind, _, variable = name.partition("/")
        if kind not in variable_names.KINDS:
            continue
        shapes = layers[variable.rpartition("/")[0]]
        stored = weights.find(kind, variable, shapes)
        if stored is None:
            match.missing.append(name)
            continue
        stored = change(name, stored)
        if stored.shape in (value.shape, _shape_as_depthwise(value.shape)):
            match.taken[name] = stored
        else:
            match.drawn[name] = stored
    return match


def fill(state: dict[str, np.ndarray], taken: Mapping[str, Stored]) -> None:
    """Read arrays into a state."""
    for name, stored in taken.items():
        values = np.asarray(stored.read()).astype(state[name].dtype)
        set_initial(state, name, values.reshape(state[name].shape))


def set_initial(state: dict[str, np.ndarray], name: str, values: np.ndarray) -> None:
    """Set a variable of a state and its moving average."""
    state[name] = values
    average = f"averages/{name.partition('/')[2]}"
    if average in state:
        state[average] = values


def _shape_as_depthwise(shape):
    """Return the shape that an export gives a grouped kernel or a scale, or None."""
    match shape:
        case (height, width, 1, channels):
            return height, width, channels, 1
        case (channels,):
            return 1, 1, channels, 1
    return None


@contextlib.contextmanager
def open_source(
    path: str, model: str, state: Mapping[str, np.ndarray], trainer: Trainer
) -> Iterator[StoredWeights]:
    """Open the weights that the option init_from, `path`, names."""
    choice = choices.find("model", model)
    if path == IMAGENET and choice.has_standardization:
        try:
            arrays = pretrained(model)
        except OSError as error:
            raise CheckpointError(str(error)) from error
        yield weights_in_memory(f"{model}, trained on ImageNet", arrays)
        return
    class_names: tuple[str, ...] = ()
    if hub.is_named(path):
        class_names = hub.look_up(path).class_names
        path, _ = hub.fetch(path)
    try:
        path = local_copy(os.path.expanduser(path))
    except (OSError, DataError) as error:
        raise CheckpointError(f"init_from={path}: {reason(error)}") from error
    if path == IMAGENET:
        path = find_weights(model)
    with open_weights(path) as weights:
        if weights is None:
            yield _weights_of_run(path)
        elif weights.torch_arrays:
            named = variable_names.with_torch_names(weights, model, trainer.model)
            names = class_names or weights.class_names
            yield dataclasses.replace(named, class_names=names)
        elif choice.has_standardization or choice.is_in_a_file or choice.is_given:
            yield variable_names.with_automatic_names(weights, state)
        else:
            yield weights


def _weights_of_run(path):
    folder, checkpoint = RunFolder(path), None
    if not os.path.isfile(path):
        checkpoint = Checkpointer(folder.checkpoints).read("best")
    if checkpoint is None:
        if not os.path.lexists(path):
            raise CheckpointError(f"init_from={path}: no such file or folder")
        place = path if os.path.isfile(path) else folder.checkpoints
        way = "give the folder of a trained run, a .keras, .h5, .safetensors or .pth "
        way += "file, a SavedModel or a checkpoint of TensorFlow, or drop --init_from"
        raise CheckpointError(f"init_from={path}: {place} holds no checkpoint; {way}")
    kinds, tensors = variable_names.KINDS, checkpoint.tensors
    kept = {k: v for k, v in tensors.items() if k.partition("/")[0] in kinds}
    names = checkpoint.run_state["dataset_info"]["class_names"]
    weights = weights_in_memory(str(checkpoint.path), kept)
    return dataclasses.replace(weights, class_names=tuple(map(str, names)))
