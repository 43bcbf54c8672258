"""Checkpoints on disk: written whole, committed by a rename, verified before use.

A checkpoint is a folder `step-00001200` of

    tensors.index, tensors.data-*   written by `tf.train.Checkpoint`; the keys read
                                    `params/conv1/kernel/.ATTRIBUTES/VARIABLE_VALUE`
    trainer_state.json              what the trainer wants to know again, the step,
                                    the architecture (ordered name, shape, dtype of
                                    the tensors) and the versions that wrote it
    MANIFEST.json                   name, size and sha256 of each of the above

It is written as `.tmp-...`, read back, fsynced and renamed: a folder with its final
name and a manifest that holds *is* the commit, so a process may be killed at any
moment. What it leaves then is removed at the next start by `remove_leftovers`. One
process at a time may write to a folder (the run's lock sees to that); any may read.
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
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from towers.errors import CheckpointError

Log = Callable[[str], None]
Tensors = Mapping[str, np.ndarray]
Architecture = Sequence[tuple[str, Sequence[int], str]]  # name, shape, dtype

_PREFIX = "tensors"
_TENSOR_FILES = (f"{_PREFIX}.index", f"{_PREFIX}.data-00000-of-00001")
_STATE = "trainer_state.json"
_MANIFEST = "MANIFEST.json"
# What reading a damaged checkpoint raises: TensorFlow an OpError (bare for a bad
# index) or, for truncated data, an IndexError; JSON of another form the rest.
_READ_ERRORS = (tf.errors.OpError, OSError, IndexError, KeyError, TypeError, ValueError)


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


def save(
    folder: str | Path, step: int, tensors: Tensors, trainer_state: dict[str, Any]
) -> Path:
    """Writes, reads back and commits one checkpoint; returns its folder.

    A valid checkpoint of the same step with the same tensors is left as it is, its
    trainer state too; an invalid one is replaced.

    Args:
        folder: the run's folder of checkpoints; made if it does not exist.
        step: the global step, not negative.
        tensors: canonical name (`params/conv1/kernel`) -> array of any shape and of a
            dtype that TensorFlow has, bfloat16 and bool included; the order is kept.
        trainer_state: anything that JSON holds; `step`, `versions`, `architecture`
            and `architecture_sha256` are overwritten.

    Raises:
        CheckpointError: the disk is full, not writable or gives back something else,
            or a valid checkpoint of this step holds other tensors. Earlier
            checkpoints are intact.
    """
    folder = Path(folder)
    tensors = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    state_text = _state_text(step, tensors, trainer_state)
    final = folder / _step_name(step)
    temporary = folder / f".tmp-{final.name}-{os.getpid()}"
    if _is_saved(folder, step, tensors):
        return final
    try:
        if not folder.exists():
            os.makedirs(folder)
            _fsync(folder.parent)
        _remove(temporary)  # in a container every process may have the same id
        os.mkdir(temporary)
        _write_tensors(temporary / _PREFIX, tensors)
        (temporary / _STATE).write_text(state_text, encoding="utf-8")
        (temporary / _MANIFEST).write_text(_manifest_text(temporary), encoding="utf-8")
        differing = _first_difference(tensors, _read(temporary).tensors)
        if differing:
            raise CheckpointError(f"{differing} read back differs from what was saved")
        _commit(temporary, final)
    except (tf.errors.OpError, OSError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(
            f"cannot save step {step} in {folder}: {_reason(error)}; the tensors need "
            f"{num_bytes:,} bytes, {_free_bytes(folder)} are free there; "
            "earlier checkpoints are intact"
        ) from error
    return final


def verify(path: str | Path) -> None:
    """Reads all of a checkpoint; raises CheckpointError with what is wrong with it."""
    _read(Path(path))


def list_steps(folder: str | Path) -> list[int]:
    """The steps of the committed checkpoints, valid or not, in increasing order."""
    return sorted(step for step in _listing(Path(folder)).values() if step >= 0)


def restore_step(folder: str | Path, step: int) -> Checkpoint:
    """Reads and verifies the checkpoint of one step, or raises CheckpointError."""
    path = Path(folder) / _step_name(step)
    if not path.exists():
        steps = ", ".join(map(str, list_steps(folder))) or "none"
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; has: {steps}")
    checkpoint = _read(path)
    if checkpoint.step != step:
        raise CheckpointError(f"{path}: it holds step {checkpoint.step}")
    return checkpoint


def restore_latest(folder: str | Path, log: Log = print) -> Checkpoint | None:
    """Reads the newest valid checkpoint; None only where no `step-*` exists at all.

    Logs each rejected one with its reason and goes on to the one before. Deletes
    nothing.

    Raises:
        CheckpointError: there are checkpoints and none is valid; lists the reasons.
    """
    folder = Path(folder)
    reasons: dict[str, str] = {}
    # Listed anew after each rejection: beside a training run the one that was just
    # being read may have been deleted, and a newer one committed.
    while untried := {n: s for n, s in _listing(folder).items() if n not in reasons}:
        name = max(untried, key=untried.__getitem__)
        try:
            if untried[name] < 0:
                raise CheckpointError(f"{folder / name}: not a checkpoint's name")
            return restore_step(folder, untried[name])
        except CheckpointError as error:
            reasons[name] = str(error)
            log(f"rejected checkpoint {error}")
    if not reasons:
        return None
    raise CheckpointError(
        f"none of the {len(reasons)} checkpoints in {folder} is valid, and training "
        f"does not start anew beside them: {'; '.join(reasons.values())}"
    )


def check_architecture(expected: Architecture, found: Architecture) -> None:
    """Raises CheckpointError naming the first variable in which a model differs.

    The order counts: it tells two layers of the same shape from each other.

    Args:
        expected: (name, shape, dtype) of the model's tensors, see `architecture`.
        found: the same of the checkpoint's.
    """
    model = {name: f"{dtype} {list(shape)}" for name, shape, dtype in expected}
    saved = {name: f"{dtype} {list(shape)}" for name, shape, dtype in found}
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


def remove_leftovers(folder: str | Path, log: Log = print) -> None:
    """Removes what interrupted saves have left (`.tmp-*`) and logs its size."""
    for path in sorted(Path(folder).glob(".tmp-*")):
        try:
            num_bytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            _remove(path)
            log(f"removed {path}, left by an interrupted save: {num_bytes:,} bytes")
        except OSError as error:  # it takes room but does no harm
            log(f"cannot remove {path}: {error}")


def keep(
    folder: str | Path,
    keep_checkpoints: int,
    best_step: int | None = None,
    log: Log = print,
) -> None:
    """Deletes all but the newest `keep_checkpoints` (1 or more) and the best one.

    To be called after a save. Only checkpoints that verify are counted, so a damaged
    one never displaces a good one.
    """
    if keep_checkpoints < 1:
        raise ValueError(f"keep_checkpoints must be 1 or more, got {keep_checkpoints}")
    folder = Path(folder)
    num_valid = 0
    for step in reversed(list_steps(folder)):
        path = folder / _step_name(step)
        try:
            if num_valid < keep_checkpoints:
                restore_step(folder, step)
                num_valid += 1
            elif step != best_step:
                # Renamed first: a half-deleted folder must not look like a checkpoint.
                doomed = folder / f".tmp-old-{path.name}"
                _remove(doomed)
                os.rename(path, doomed)
                _remove(doomed)
        except (CheckpointError, OSError) as error:
            log(f"kept {path}: {error}")


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _listing(folder: Path) -> dict[str, int]:
    """Name -> step of all that is called `step-*`; -1 for a name of another form."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith("step-")]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error}") from error
    steps = {name: re.fullmatch("step-([0-9]{8,})", name) for name in names}
    return {name: int(step[1]) if step else -1 for name, step in steps.items()}


def _is_saved(folder: Path, step: int, tensors: Tensors) -> bool:
    """Whether a valid checkpoint holds these tensors; raises where it holds others."""
    if step not in list_steps(folder):
        return False
    try:
        existing = restore_step(folder, step)
    except CheckpointError:
        return False  # to be replaced, and removed only after that
    differing = _first_difference(tensors, existing.tensors)
    if differing:
        raise CheckpointError(
            f"{existing.path} is a valid checkpoint with another {differing}; it is "
            "kept: save into another folder, or move it away"
        )
    return True


def _state_text(step: int, tensors: Tensors, trainer_state: dict) -> str:
    listed = architecture(tensors)
    own = {
        "step": int(step),
        "versions": _versions(),
        "architecture": listed,
        "architecture_sha256": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
    }
    return json.dumps({**trainer_state, **own}, indent=1)


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
    files = [_file_entry(folder / name) for name in sorted(os.listdir(folder))]
    return json.dumps({"format": 1, "files": files}, indent=1)


def _file_entry(path: Path) -> dict[str, Any]:
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return {"name": path.name, "size": path.stat().st_size, "sha256": digest}


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


def _commit(temporary: Path, final: Path) -> None:
    """Fsyncs and renames; an invalid checkpoint of that name is put aside before."""
    for name in sorted(os.listdir(temporary)):
        _fsync(temporary / name)
    _fsync(temporary)
    replaced = final.with_name(f".tmp-replaced-{final.name}")
    if final.exists():
        _remove(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    _fsync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _read(path: Path) -> Checkpoint:
    """Reads and verifies a folder; CheckpointError says what is wrong with it."""
    try:
        _check_files(path)
        state = _json(path / _STATE)
        reader = tf.train.load_checkpoint(str(path / _PREFIX))
        tensors = {}
        for name, *_ in state.pop("architecture"):
            key = name.replace(".", "..")  # so TensorFlow escapes a dot
            tensor = reader.get_tensor(f"{key}/.ATTRIBUTES/VARIABLE_VALUE")
            tensors[name] = np.asarray(tensor)
        del state["architecture_sha256"]
        return Checkpoint(state["step"], path, tensors, state)
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path}: {_reason(error)}") from error


def _check_files(path: Path) -> None:
    """Compares the files of a folder with its manifest."""
    manifest = _json(path / _MANIFEST)
    try:
        expected = {entry["name"]: entry for entry in manifest["files"]}
        if manifest["format"] != 1 or not {_STATE, *_TENSOR_FILES} <= set(expected):
            raise ValueError("of another format, or files are not listed")
        if any(os.path.basename(name) != name for name in expected):
            raise ValueError("it names a file outside of the folder")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{_MANIFEST} is not a manifest: {error!r}") from error
    for name, entry in expected.items():
        found = _file_entry(path / name)
        for field in ("size", "sha256"):
            if found[field] != entry.get(field):
                raise ValueError(
                    f"{name}: {field} is {found[field]}, should be {entry.get(field)}"
                )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error


def _first_difference(ours: Tensors, theirs: Tensors) -> str | None:
    """What differs first, bit for bit (so that a NaN equals itself), or None."""
    if architecture(ours) != architecture(theirs):
        return "list of tensors"
    for name, tensor in ours.items():
        if tensor.tobytes() != theirs[name].tobytes():
            return f"tensor {name}"
    return None


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _free_bytes(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        return "an unknown number"


def _reason(error: Exception) -> str:
    """One line for an error of Python or TensorFlow."""
    if isinstance(error, (IndexError, KeyError, TypeError)):
        return repr(error)  # their messages alone say little
    # TensorFlow puts the node's name in front and sometimes a stack behind.
    return re.sub(r"^\{\{.*?\}\} ", "", str(error)).partition("\n")[0]
