"""The checkpoints of a run: committed by a rename, verified before use.

A checkpoint is a folder `step-00001200`, see `checkpoint_files`. It is written as
`.tmp-...`, read back, fsynced and renamed: a folder with its final name and a manifest
that holds *is* the commit, so a process may be killed at any moment. What it leaves
then is removed at the next start by `remove_leftovers`. One process at a time may write
to a folder (the run's lock sees to that); any may read.
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers.errors import CheckpointError, ConfigError, TowersError, one_line
from towers.run import checkpoint_files, files
from towers.run.checkpoint_files import Checkpoint, Tensors

Log = Callable[[str], None]
T = TypeVar("T")


def save(
    folder: str | Path,
    step: int,
    tensors: Tensors,
    trainer_state: dict[str, Any],
    before_commit: Callable[[], None] = lambda: None,
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
        before_commit: called when everything is written; where it raises an error,
            nothing is committed.

    Raises:
        CheckpointError: the disk is full or not writable, the files read back
            differ, or a valid checkpoint of this step holds other tensors. Earlier
            checkpoints are intact.
    """
    folder = Path(folder)
    tensors = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    final = folder / _step_name(step)
    temporary = folder / f".tmp-{final.name}-{os.getpid()}"
    if _is_saved(folder, step, tensors):
        return final
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        files.sync(folder.parent)  # a killed process may have made it
        files.remove(temporary)  # in a container every process may have the same id
        checkpoint_files.write(temporary, step, tensors, trainer_state)
        before_commit()
        files.replace(temporary, final)
    except (tf.errors.OpError, OSError, TowersError) as error:
        with contextlib.suppress(OSError):
            files.remove(temporary)
        if isinstance(error, TowersError) and not isinstance(error, CheckpointError):
            raise
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(
            f"cannot save step {step} in {folder}: {checkpoint_files.reason(error)}; "
            f"the tensors need {num_bytes:,} bytes, {files.free_bytes(folder)} are "
            "free there; earlier checkpoints are intact"
        ) from error
    return final


def list_steps(folder: str | Path) -> list[int]:
    """The steps of the committed checkpoints, valid or not, in increasing order."""
    return sorted(step for step in _listing(Path(folder)).values() if step >= 0)


def restore_step(folder: str | Path, step: int) -> Checkpoint:
    """Reads and verifies the checkpoint of one step, or raises CheckpointError."""
    path = Path(folder) / _step_name(step)
    try:
        found = files.kind(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if found is None:
        steps = ", ".join(map(str, list_steps(folder))) or "none"
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; has: {steps}")
    checkpoint = checkpoint_files.read(path)
    if checkpoint.step != step:
        raise CheckpointError(f"{path}: it holds step {checkpoint.step}")
    return checkpoint


def restore_latest(
    folder: str | Path,
    log: Log = print,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    known: dict[str, tuple[Any, str]] | None = None,
) -> Checkpoint | None:
    """Reads the newest valid checkpoint; None only where no `step-*` exists at all, or
    where it is known.

    Logs each rejected one with its reason and goes on to the one before. Deletes
    nothing.

    Args:
        folder: the run's folder of checkpoints.
        log: takes a line for the user.
        check: of what a run stores besides the tensors; raises CheckpointError.
        known: what earlier calls with the same dict have read, which is not read again
            unless its files have changed.

    Raises:
        CheckpointError: there are checkpoints and none is valid; lists the reasons.
    """
    folder, known = Path(folder), {} if known is None else known
    reasons: dict[str, str] = {}
    # Listed again after each rejection: next to a training run, the checkpoint that was
    # being read may have been deleted meanwhile and a newer one committed.
    while untried := {n: s for n, s in _listing(folder).items() if n not in reasons}:
        name = max(untried, key=untried.__getitem__)
        status = _status(folder / name)
        known_status, reason = known.get(name, (None, ""))
        if status == known_status:
            if not reason:
                return None
            reasons[name] = reason
            continue
        try:
            if untried[name] < 0:
                raise CheckpointError(f"{folder / name}: not a checkpoint's name")
            checkpoint = restore_step(folder, untried[name])
            check(checkpoint)
            known[name] = status, ""
            return checkpoint
        except CheckpointError as error:
            reasons[name] = str(error)
            log(f"rejected checkpoint {one_line(error)}")
            cause = error.__cause__  # a disk may fail once
            if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
                known[name] = status, reasons[name]
    if not reasons:
        return None
    raise CheckpointError(
        f"none of the {len(reasons)} checkpoints in {folder} is valid, and training "
        "does not silently start again (--overwrite does): "
        + "; ".join(reason.removeprefix(f"{folder}/") for reason in reasons.values())
    )


def stored_value(
    folder: str | Path, key: str, read: Callable[[Any], T], step: int = 0
) -> T | None:
    """A value of the newest checkpoint whose trainer state is valid; the tensors are
    not read. None where there is no such checkpoint.

    Args:
        folder: the run's folder of checkpoints.
        key: of the value in the trainer state, such as "config".
        read: takes what the trainer state holds; ConfigError where it is no such value.
        step: of a checkpoint that is tried before the newest one.
    """
    steps = sorted(list_steps(folder), key=lambda x: (x != step, -x))
    for candidate in steps:
        try:
            path = Path(folder) / _step_name(candidate)
            return read(checkpoint_files.read_trainer_state(path)[key])
        except (CheckpointError, ConfigError, KeyError):
            continue
    return None


def remove_leftovers(folder: str | Path, log: Log = print) -> None:
    """Removes what interrupted saves left (`.tmp-*`) and logs its size."""
    for path in sorted(Path(folder).glob(".tmp-*")):
        try:
            num_bytes = files.num_bytes(path)
            files.remove(path)
            log(f"removed {path}, left by an interrupted save: {num_bytes:,} bytes")
        except OSError as error:  # it takes room but does no harm
            log(f"cannot remove {path}: {error}")


def keep(
    folder: str | Path,
    keep_checkpoints: int,
    best_step: int | None = None,
    log: Log = print,
    before_removal: Callable[[], None] = lambda: None,
) -> None:
    """Deletes all but the newest `keep_checkpoints` (1 or more) and the best one.

    To be called after a save, which has verified the newest. One that lacks files or
    bytes is not counted, so it never displaces a good one; tensors are not read.

    Args:
        folder: the run's folder of checkpoints.
        keep_checkpoints: the number of the newest that are kept.
        best_step: of the one that is kept besides.
        log: takes a line for the user.
        before_removal: called before each removal; where it raises an error, nothing
            more is removed.
    """
    if keep_checkpoints < 1:
        raise ValueError(f"keep_checkpoints must be 1 or more, got {keep_checkpoints}")
    folder = Path(folder)
    num_valid = 0
    for step in reversed(list_steps(folder)):
        path = folder / _step_name(step)
        try:
            if num_valid < keep_checkpoints:
                if checkpoint_files.check_sizes(path) != step:
                    raise CheckpointError(f"{path}: it holds another step")
                num_valid += 1
            elif step != best_step:
                # Renamed first: a half-deleted folder must not look like a checkpoint.
                doomed = folder / f".tmp-old-{path.name}"
                before_removal()
                files.remove(doomed)
                os.rename(path, doomed)
                files.remove(doomed)
        except CheckpointError as error:
            log(f"kept {error}")
        except OSError as error:
            log(f"kept {path}: {checkpoint_files.reason(error)}")


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _listing(folder: Path) -> dict[str, int]:
    """Name -> step of everything named `step-*`; -1 for a name of another form."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith("step-")]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error}") from error
    steps = {name: re.fullmatch("step-([0-9]{8,})", name) for name in names}
    listing = {name: int(step[1]) if step else -1 for name, step in steps.items()}
    # With more zeros it would be a second name of the same step.
    return {n: step if n == _step_name(step) else -1 for n, step in listing.items()}


def _status(path: Path) -> list[tuple[str, int, int, int]]:
    """Differs when a file of a checkpoint has changed; none is read."""
    statuses = []
    with contextlib.suppress(OSError):
        for each in (path, *sorted(path.iterdir())):
            status = each.lstat()
            of_file = (each.name, status.st_ino, status.st_size, status.st_mtime_ns)
            statuses.append(of_file)
    return statuses


def _is_saved(folder: Path, step: int, tensors: Tensors) -> bool:
    """True if a valid checkpoint holds these tensors; raises where it holds others."""
    if step not in list_steps(folder):
        return False
    try:
        existing = restore_step(folder, step)
    except CheckpointError:
        return False  # to be replaced, and removed only after that
    differing = checkpoint_files.first_difference(tensors, existing.tensors)
    if differing:
        raise CheckpointError(
            f"{existing.path} is a valid checkpoint with another {differing}; it is "
            "kept: choose another --workdir, or move it away"
        )
    return True
