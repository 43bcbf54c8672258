"""One checkpoint: a folder of files, written, read and verified.

tensors.index, tensors.data-*   the tensors of `Trainer.state`, by canonical name, each
                                with a checksum, as TensorFlow's SaveV2 writes them
trainer_state.json              `Progress`, config, dataset_info and teacher of the run,
                                the step, the architecture (ordered name, shape, dtype
                                of the tensors) and the versions that wrote it
MANIFEST.json                   name, size and sha256 of each of the above
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.config import parse_json
from towers.errors import CheckpointError
from towers.messages import one_line

Tensors = Mapping[str, np.ndarray]


class OtherVersionError(ValueError):
    """Another version of towers wrote a checkpoint, which can read it."""


FORMAT = 3

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
class Snapshot:
    """A saved state: tensors by canonical names, in order, and values for JSON."""

    step: int
    tensors: Tensors
    trainer_state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Checkpoint(Snapshot):
    """A verified checkpoint in a folder, with the versions that wrote it."""

    path: Path


def write(path: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint and read it back; CheckpointError if it differs."""
    tensors = snapshot.tensors
    os.mkdir(path)
    added = {
        "step": snapshot.step,
        "versions": versions(),
        "architecture": [(name, x.shape, x.dtype.name) for name, x in tensors.items()],
    }
    state = json.dumps({**snapshot.trainer_state, **added}, indent=1)
    (path / _STATE).write_text(state, encoding="utf-8")
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=str(path / _PREFIX),
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=list(tensors.values()),
        )
    entries = [_entry(file) for file in sorted(path.iterdir())]
    text = json.dumps({"format": FORMAT, "files": entries}, indent=1)
    (path / _MANIFEST).write_text(text, encoding="utf-8")
    restored = _read_tensors(path, list(tensors))
    for name, tensor in tensors.items():
        if tensor.tobytes() != restored[name].tobytes():  # a NaN equals itself
            raise CheckpointError(
                f"tensor {name} read back differs from what was saved"
            )


@contextlib.contextmanager
def _damage_named(path):
    """Converts errors of reading a checkpoint."""
    try:
        yield
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path}: {error_reason(error)}") from error


def read(path: Path) -> Checkpoint:
    """Reads and verifies a folder; CheckpointError with the reason."""
    with _damage_named(path):
        for name, entry in _manifest(path).items():
            _validate_file(path / name, entry)
        state = _json(path / _STATE)
        names = [name for name, *_ in state.pop("architecture")]
        tensors = _read_tensors(path, names)
        return Checkpoint(_step(state), tensors, state, path)


def read_trainer_state(path: Path) -> dict[str, Any]:
    """The trainer state alone, verified; CheckpointError with the reason."""
    with _damage_named(path):
        _validate_file(path / _STATE, _manifest(path)[_STATE])
        state = _json(path / _STATE)
        _step(state)
        return state


def validate_sizes(path: Path, step: int) -> None:
    """Raise CheckpointError if a folder lacks bytes, or holds another step."""
    if read_trainer_state(path)["step"] != step:
        raise CheckpointError(f"{path}: it holds another step")
    with _damage_named(path):
        for name, entry in _manifest(path).items():
            _validate_size(path / name, entry)


def error_reason(error: Exception) -> str:
    """One line for an error of Python or TensorFlow."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        hint = "; give this user access to it" * isinstance(error, PermissionError)
        name = os.path.basename(error.filename)
        return one_line(f"{name}: {error.strerror}{hint}")
    if isinstance(error, (IndexError, KeyError, TypeError, AttributeError)):
        return one_line(repr(error))  # their messages alone say little
    # TensorFlow puts the node's name in front and sometimes a stack behind.
    return one_line(re.sub(r"^\{\{.*?\}\} ", "", str(error)).partition("\n")[0])


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that train."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "towers": towers.__version__,
    }


def _entry(path):
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "size": path.stat().st_size, "sha256": digest}


def _read_tensors(path, names):
    # RestoreV2 would make TensorFlow's devices, before a run has chosen its own.
    reader = tf.train.load_checkpoint(str(path / _PREFIX))
    return {name: np.asarray(reader.get_tensor(name)) for name in names}


def _manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> entry of the files of a checkpoint, by its manifest."""
    manifest = _json(path / _MANIFEST)
    try:
        if manifest["format"] != FORMAT:
            raise OtherVersionError(
                f"of format {manifest['format']!r}, and towers {towers.__version__} "
                f"reads {FORMAT}; continue with the version that wrote it"
            )
        entries = {entry["name"]: entry for entry in manifest["files"]}
        if entries.keys() != {_STATE, *_TENSOR_FILES}:
            raise ValueError(f"it lists {', '.join(entries) or 'no files'}")
        return entries
    except OtherVersionError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{_MANIFEST}: {error_reason(error)}") from error


def _validate_file(path, entry):
    """Compares a file with its entry in the manifest."""
    _validate_size(path, entry)
    digest = _entry(path)["sha256"]
    if digest != entry.get("sha256"):
        raise ValueError(
            f"{path.name}: sha256 is {digest}, should be {entry.get('sha256')}"
        )


def _validate_size(path, entry):
    size = path.stat().st_size
    if size != entry["size"]:
        raise ValueError(f"{path.name}: size is {size}, should be {entry['size']}")


def _step(state):
    if type(state["step"]) is not int:
        raise ValueError(f"{_STATE}: its step is {state['step']!r}")
    return state["step"]


def _json(path):
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
