"""One checkpoint: a folder of files, written, read back and verified.

tensors.index, tensors.data-*   written by `tf.train.Checkpoint`; the keys read
                                `params/conv1/kernel/.ATTRIBUTES/VARIABLE_VALUE`
trainer_state.json              the rest of the run's state, the step, the
                                architecture (ordered name, shape, dtype of the
                                tensors) and the versions that wrote it
MANIFEST.json                   name, size and sha256 of each of the above
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from towers.config import parse_json
from towers.errors import CheckpointError, one_line
from towers.run import files

Tensors = Mapping[str, np.ndarray]
Architecture = Sequence[tuple[str, Sequence[int], str]]  # name, shape, dtype

_PREFIX = "tensors"
_TENSOR_FILES = (f"{_PREFIX}.index", f"{_PREFIX}.data-00000-of-00001")
_STATE = "trainer_state.json"
_MANIFEST = "MANIFEST.json"
# What reading a damaged checkpoint raises: TensorFlow an OpError (bare for a bad
# index) or, for truncated data, an IndexError; JSON of another form the rest.
_READ_ERRORS = (
    *(tf.errors.OpError, OSError, IndexError, KeyError, TypeError, ValueError),
    *(AttributeError, OverflowError, RecursionError),
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its tensors in the order in which they were saved.

    `trainer_state` is the dict given to `save`, with `step` and `versions` added.
    """

    step: int
    path: Path
    tensors: dict[str, np.ndarray]
    trainer_state: dict[str, Any]


def architecture(tensors: Tensors) -> Architecture:
    """The ordered (name, shape, dtype) of tensors, for `check_architecture`."""
    arrays = ((name, np.asarray(tensor)) for name, tensor in tensors.items())
    return [(name, array.shape, array.dtype.name) for name, array in arrays]


def write(path: Path, step: int, tensors: Tensors, trainer_state: dict) -> None:
    """Writes the folder of a checkpoint, reads it back, and flushes it to the disk.

    Raises:
        CheckpointError: the files read back differ.
        OSError, tf.errors.OpError: it cannot be written.
    """
    state_text = _state_text(step, tensors, trainer_state)
    os.mkdir(path)
    _write_tensors(path / _PREFIX, tensors)
    (path / _STATE).write_text(state_text, encoding="utf-8")
    (path / _MANIFEST).write_text(_manifest_text(path), encoding="utf-8")
    differing = first_difference(tensors, read(path).tensors)
    if differing:
        raise CheckpointError(f"{differing} read back differs from what was saved")
    for name in sorted(os.listdir(path)):
        files.sync(path / name)
    files.sync(path)


def read(path: Path) -> Checkpoint:
    """Reads and verifies a folder, or raises CheckpointError with the reason."""
    try:
        for name, entry in _manifest(path).items():
            _check_file(path / name, entry)
        state = _json(path / _STATE)
        names = [name for name, *_ in state.pop("architecture")]
        tensors = _read_tensors(path, names)
        del state["architecture_sha256"]
        return Checkpoint(_step(state), path, tensors, state)
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path}: {reason(error)}") from error


def read_trainer_state(path: Path) -> dict[str, Any]:
    """The trainer state alone, verified, or CheckpointError with the reason."""
    try:
        _check_file(path / _STATE, _manifest(path)[_STATE])
        state = _json(path / _STATE)
        _step(state)
        return state
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path}: {reason(error)}") from error


def check_sizes(path: Path) -> int:
    """The step of a folder whose trainer state is valid and whose files have their
    sizes, or CheckpointError with the reason; the tensors are not read."""
    step = read_trainer_state(path)["step"]
    try:
        for name, entry in _manifest(path).items():
            actual = files.num_bytes(path / name)
            if actual != entry["size"]:
                raise ValueError(f"{name}: size is {actual}, should be {entry['size']}")
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path}: {reason(error)}") from error
    return step


def _step(state):
    if type(state["step"]) is not int:
        raise ValueError(f"{_STATE}: its step is {state['step']!r}")
    return state["step"]


def check_architecture(expected: Architecture, actual: Architecture) -> None:
    """Raises CheckpointError naming the first variable in which a model differs.

    The order matters: it distinguishes two layers of the same shape.

    Args:
        expected: (name, shape, dtype) of the model's tensors, see `architecture`.
        actual: the same of the checkpoint's.
    """
    model = {name: f"{dtype} {list(shape)}" for name, shape, dtype in expected}
    saved = {name: f"{dtype} {list(shape)}" for name, shape, dtype in actual}
    for ours, its in itertools.zip_longest(model, saved):
        if ours is not None and ours not in saved:
            problem = f"{ours} is in the model but not in the checkpoint"
        elif its is not None and its not in model:
            problem = f"{its} is in the checkpoint but not in the model"
        elif ours != its:
            problem = f"{ours} of the model stands where the checkpoint has {its}"
        elif model[ours] != saved[its]:
            problem = f"{ours} is {model[ours]} here, {saved[its]} in the checkpoint"
        else:
            continue
        raise CheckpointError(f"the checkpoint is of another model: {problem}")


def restore_fitting(tensors: Tensors, state: Tensors) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint as the state of a trainer.

    They may have been written with other options: the scale of the loss, which only
    float16 has, and the counts of skipped steps, which only on_nonfinite=skip has, stay
    the trainer's where they lack them. Averages of the model state, which older
    versions did not keep, begin with the state.

    Args:
        tensors: the checkpoint's.
        state: the trainer's state, which the tensors replace.

    Raises:
        CheckpointError: they are of another model, see `check_architecture`.
    """
    check_architecture(
        *(architecture(_without_optional(each)) for each in (state, tensors))
    )
    averages = {f"averages/{k.removeprefix('state/')}": k for k in tensors}
    tensors = {
        name: tensors[source]
        for name, source in averages.items()
        if name in state and source.startswith("state/")
    } | dict(tensors)
    return {name: tensors.get(name, state[name]) for name in state}


def _without_optional(tensors):
    optional = ("loss_scale/", "skipped/")
    of_state = {
        f"averages/{k.removeprefix('state/')}"
        for k in tensors
        if k.startswith("state/")
    }
    return {
        k: v
        for k, v in tensors.items()
        if not k.startswith(optional) and k not in of_state
    }


def first_difference(ours: Tensors, theirs: Tensors) -> str | None:
    """The first difference, bit for bit (so that a NaN equals itself), or None."""
    if architecture(ours) != architecture(theirs):
        return "list of tensors"
    for name, tensor in ours.items():
        if tensor.tobytes() != theirs[name].tobytes():
            return f"tensor {name}"
    return None


def reason(error: Exception) -> str:
    """One line for an error of Python or TensorFlow."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return one_line(f"{os.path.basename(error.filename)}: {error.strerror}")
    if isinstance(error, (IndexError, KeyError, TypeError, AttributeError)):
        return one_line(repr(error))  # their messages alone say little
    # TensorFlow puts the node's name in front and sometimes a stack behind.
    return one_line(re.sub(r"^\{\{.*?\}\} ", "", str(error)).partition("\n")[0])


def _state_text(step: int, tensors: Tensors, trainer_state: dict) -> str:
    listed = architecture(tensors)
    added = {
        "step": int(step),
        "versions": _versions(),
        "architecture": listed,
        "architecture_sha256": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
    }
    return json.dumps({**trainer_state, **added}, indent=1)


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "tensorflow": tf.__version__}
    for package in ("keras", "numpy", "towers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _manifest_text(folder: Path) -> str:
    entries = [_file_entry(folder / name) for name in sorted(os.listdir(folder))]
    return json.dumps({"format": 1, "files": entries}, indent=1)


def _file_entry(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {"name": path.name, "size": size, "sha256": files.digest(path, size)}


def _write_tensors(prefix: Path, tensors: Tensors) -> None:
    tree: dict[str, Any] = {}
    with tf.device("CPU:0"):
        for name, tensor in tensors.items():
            *parents, leaf = name.split("/")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[leaf] = tf.Variable(tensor)
        tf.train.Checkpoint(**tree).write(str(prefix))


def _read_tensors(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    with files.literal(path) as folder:
        # tf.train.load_checkpoint would follow the file "checkpoint" of a folder that
        # somebody put there under the name of the prefix.
        reader = tf.compat.v1.train.NewCheckpointReader(os.path.join(folder, _PREFIX))
        keys = (name.replace(".", "..") for name in names)  # so TensorFlow escapes it
        return {
            name: np.asarray(reader.get_tensor(f"{key}/.ATTRIBUTES/VARIABLE_VALUE"))
            for name, key in zip(names, keys, strict=True)
        }


def _manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> entry of the files of a checkpoint, by its manifest."""
    if files.kind(path) != "a folder":
        raise ValueError(f"is {files.kind(path)}, where a folder should be")
    manifest = _json(path / _MANIFEST)
    try:
        entries = {entry["name"]: entry for entry in manifest["files"]}
        if manifest["format"] != 1 or not {_STATE, *_TENSOR_FILES} <= set(entries):
            raise ValueError("of another format, or files are not listed")
        if any(os.path.basename(name) != name for name in entries):
            raise ValueError("it names a file outside of the folder")
        return entries
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{_MANIFEST} is not a manifest: {error!r}") from error


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    """Compares a file with its entry in the manifest."""
    digest = files.digest(path, entry.get("size"))
    if digest != entry.get("sha256"):
        raise ValueError(
            f"{path.name}: sha256 is {digest}, should be {entry.get('sha256')}"
        )


def _json(path: Path) -> Any:
    try:
        return parse_json(files.read_bytes(path))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
