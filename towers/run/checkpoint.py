"""One checkpoint: a folder of files, written, read and verified.

tensors.index, tensors.data-*   the tensors of `Trainer.state`, by canonical name, as
                                TensorFlow's SaveV2 writes them, each with a checksum
trainer_state.json              the run state: `Progress`, config, dataset_info, step,
                                architecture (name, shape and dtype of the tensors, in
                                order) and the versions that wrote it
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
from towers.errors import CheckpointError, TowersError
from towers.messages import one_line

Tensors = Mapping[str, np.ndarray]


class OtherVersionError(ValueError):
    """A checkpoint in the format of another version of towers."""


FORMAT = 3

_PREFIX = "tensors"
_TENSOR_FILES = (f"{_PREFIX}.index", f"{_PREFIX}.data-00000-of-00001")
_STATE = "trainer_state.json"
_MANIFEST = "MANIFEST.json"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state to save: tensors by canonical name, in order, and values for JSON."""

    step: int
    tensors: Tensors
    run_state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Checkpoint(Snapshot):
    """A verified checkpoint in a folder."""

    path: Path


def write(path: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint and read it back; CheckpointError if it differs."""
    tensors = snapshot.tensors
    os.mkdir(path)
    state = {
        **snapshot.run_state,
        "step": snapshot.step,
        "versions": versions(),
        "architecture": [(name, x.shape, x.dtype.name) for name, x in tensors.items()],
    }
    (path / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
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
    """Convert errors of reading a checkpoint to a CheckpointError."""
    try:
        yield
    except (MemoryError, TowersError):
        raise
    except Exception as error:  # TensorFlow and JSON raise many kinds for damaged files
        raise CheckpointError(f"{path}: {error_reason(error)}") from error


def read(path: Path) -> Checkpoint:
    """Read and verify a folder; raise CheckpointError with the reason."""
    with _damage_named(path):
        for name, entry in _manifest(path).items():
            _validate_file(path / name, entry)
        state = _json(path / _STATE)
        tensors = _read_tensors(path, [name for name, *_ in state.pop("architecture")])
        return Checkpoint(_step(state), tensors, state, path)


def read_run_state(path: Path) -> dict[str, Any]:
    """Read and verify the run state alone; raise CheckpointError with the reason."""
    with _damage_named(path):
        _validate_file(path / _STATE, _manifest(path)[_STATE])
        state = _json(path / _STATE)
        _step(state)
        return state


def validate_sizes(path: Path, step: int) -> None:
    """Raise CheckpointError if a file has another size, or the step differs."""
    if read_run_state(path)["step"] != step:
        raise CheckpointError(f"{path}: it holds another step")
    with _damage_named(path):
        for name, entry in _manifest(path).items():
            _validate_size(path / name, entry)


def error_reason(error: Exception) -> str:
    """Return one line for an error of Python or TensorFlow."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        is_denied = isinstance(error, PermissionError)
        hint = "; give this user access to it" if is_denied else ""
        name = os.path.basename(error.filename)
        return one_line(f"{name}: {error.strerror}{hint}")
    if isinstance(error, (LookupError, TypeError, AttributeError)):
        return one_line(repr(error))  # the message alone lacks the kind of error
    # TensorFlow puts the node's name in front and sometimes a stack behind.
    return one_line(re.sub(r"^\{\{.*?\}\} ", "", str(error)).partition("\n")[0])


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that train."""
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
    # RestoreV2 would create TensorFlow's devices before the run has chosen its own.
    reader = tf.train.load_checkpoint(str(path / _PREFIX))
    return {name: np.asarray(reader.get_tensor(name)) for name in names}


def _manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest of a checkpoint: file name -> entry."""
    manifest = _json(path / _MANIFEST)
    try:
        version = manifest["format"]
        entries = {entry["name"]: entry for entry in manifest["files"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{_MANIFEST}: {error_reason(error)}") from error
    if version != FORMAT:
        raise OtherVersionError(
            f"it has format {version!r}, towers {towers.__version__} reads {FORMAT}; "
            "continue with the version that wrote it"
        )
    if entries.keys() != {_STATE, *_TENSOR_FILES}:
        raise ValueError(f"{_MANIFEST}: lists {', '.join(entries) or 'no files'}")
    return entries


def _validate_file(path, entry):
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
        raise ValueError(f"{_STATE}: step is {state['step']!r}, should be an integer")
    return state["step"]


def _json(path):
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
