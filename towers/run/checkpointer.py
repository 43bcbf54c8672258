"""The checkpoints of a run: committed by a rename, verified before use.

A checkpoint is a folder `step-00001200`, see `checkpoint`. It is written under another
name, read back, flushed and renamed, so a process may be killed at any moment. Only the
process that holds the run's lock writes; any process may read.
"""

import errno
import numbers
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers import console, store
from towers.errors import CheckpointError, ConfigError
from towers.messages import one_line
from towers.run.checkpoint import (
    Checkpoint,
    OtherVersionError,
    Snapshot,
    error_reason,
    read,
    read_run_state,
    validate_sizes,
    write,
)

T = TypeVar("T")

_NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})")

# Pause before the second attempt after an error of the disk.
RETRY_SECS = 2.0

# Errors that do not mean corruption; their messages already say what to do.
_WITH_HINT = PermissionError, OtherVersionError


class Checkpointer:
    """The checkpoints of a run: the `keep` newest ones and the best one.

    `validate` raises CheckpointError for a checkpoint that the run cannot use;
    `assert_same_folder` is called before each commit and removal, see `Lock`.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        log: Callable[[str], None] = console.line,
        validate: Callable[[Checkpoint], None] = lambda checkpoint: None,
        keep: int = 1,
        assert_same_folder: Callable[[], None] = lambda: None,
    ):
        self._folder, self._keep, self._log = Path(folder), keep, log
        self._validate, self._assert_same_folder = validate, assert_same_folder
        self._valid: dict[str, list] = {}  # name -> status of its verified files

    def save(self, snapshot: Snapshot) -> Path:
        """Commit a checkpoint and delete old ones; CheckpointError on failure."""
        tensors = {name: np.asarray(x) for name, x in snapshot.tensors.items()}
        snapshot = Snapshot(snapshot.step, tensors, snapshot.run_state)
        path = _retry_once(self._log, self._save, snapshot)
        best = snapshot.run_state.get("best")
        self._remove_old(best["step"] if best else None)
        return path

    def _save(self, snapshot):
        final = self._path(snapshot.step)
        try:
            self._assert_same_folder()
            self._folder.mkdir(exist_ok=True)
            store.sync(self._folder.parent)  # a killed process may have created it
            with store.aside(final) as temporary:
                write(temporary, snapshot)
                self._assert_same_folder()
        except (tf.errors.OpError, OSError, CheckpointError) as error:
            num_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
            raise CheckpointError(
                f"cannot save step {snapshot.step} in {self._folder}: "
                f"{error_reason(error)}; the tensors need {num_bytes:,} bytes, "
                f"{store.free_space(self._folder)} there; earlier checkpoints are "
                "intact, and the same command continues from them"
            ) from error
        self._valid[final.name] = _status(final)
        return final

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, valid or not, in increasing order."""
        return sorted(step for step in self._listing().values() if step >= 0)

    def read(self, step: int | str = "last") -> Checkpoint | None:
        """Return the valid checkpoint of a step, the "best" or the "last"."""
        is_number = isinstance(step, numbers.Integral) and not isinstance(step, bool)
        if step not in ("best", "last") and not (is_number and int(step) >= 0):
            raise ConfigError(f"step={step!r}: should be a number, 'best' or 'last'")
        if step == "best":
            if best := self.best_step(self._log):
                try:
                    return self._read(self._path(best))
                except CheckpointError as error:
                    self._log(f"rejected the best checkpoint {one_line(error)}")
        elif step != "last":
            return self._read(self._path(step))
        return self._newest()

    def read_new(self) -> Checkpoint | None:
        """Read the last valid checkpoint; None if it is the one read before."""
        return self._newest(known=self._valid)

    def _newest(self, known: Mapping[str, list] = {}) -> Checkpoint | None:
        rejections: dict[str, CheckpointError] = {}
        # List again after each rejection: a training run may have deleted the one that
        # was being read and committed a newer one.
        while untried := self._listing(without=rejections):
            name = max(untried, key=untried.__getitem__)
            path = self._folder / name
            status = _status(path)
            if status == known.get(name):
                return None
            try:
                checkpoint = _retry_once(self._log, self._read, path, _is_transient)
                self._valid[name] = status
                return checkpoint
            except CheckpointError as error:
                rejections[name] = error
                self._log(f"rejected checkpoint {one_line(error)}")
        if not rejections:
            return None
        errors = rejections.values()
        has_hint = any(isinstance(x.__cause__, _WITH_HINT) for x in errors)
        hint = "" if has_hint else " (--overwrite does)"
        reasons = (str(x).removeprefix(f"{self._folder}/") for x in errors)
        raise CheckpointError(
            f"none of the {len(rejections)} checkpoints in {self._folder} can be used, "
            f"and training does not silently start again{hint}: {'; '.join(reasons)}"
        )

    def best_step(self, log: Callable[[str], None] = lambda line: None) -> int | None:
        """Return the step of the best evaluation that has a checkpoint, or None."""
        best = self.stored("best", lambda value: value or {}, "last") or {}
        step = best.get("step")
        if step is None or step in self.steps():
            return step
        log(f"the best checkpoint is missing: {self._path(step)}; taking the last one")
        return None

    def stored(
        self, key: str, parse: Callable[[Any], T], step: int | str = "last"
    ) -> T | None:
        """Return a value of the run state of `step`, or of the newest valid one."""
        first = self.best_step() if step == "best" else step
        for candidate in sorted(self.steps(), key=lambda x: (x != first, -x)):
            try:
                return parse(read_run_state(self._path(candidate))[key])
            except (CheckpointError, ConfigError, KeyError):
                continue
        return None

    def recover(self) -> None:
        """Restore the name of a checkpoint that an interrupted save was replacing."""
        store.recover(self._folder)

    def remove_leftovers(self) -> None:
        """Remove `.tmp-*` folders of interrupted saves and log their size."""
        store.remove_leftovers(self._folder.glob(".tmp-*"), "save", self._log)

    def _remove_old(self, best_step):
        """Delete all checkpoints but the newest complete ones and the best one."""
        num_valid = 0
        for step in reversed(self.steps()):
            path = self._path(step)
            try:
                if num_valid < self._keep:
                    if self._valid.get(path.name) != _status(path):
                        validate_sizes(path, step)
                    num_valid += 1
                elif step != best_step:
                    self._assert_same_folder()
                    store.remove(path)
            except CheckpointError as error:
                self._log(f"kept {error}")
            except OSError as error:
                self._log(f"kept {path}: {error_reason(error)}")

    def _read(self, path):
        step = self._listing().get(path.name)
        if step is None:
            steps = ", ".join(map(str, self.steps())) or "no step"
            raise CheckpointError(f"no checkpoint {path}; there are {steps}")
        checkpoint = read(path)
        if checkpoint.step != step:
            raise CheckpointError(f"{path}: it holds step {checkpoint.step}")
        self._validate(checkpoint)
        return checkpoint

    def _path(self, step):
        return self._folder / folder_name(step)

    def _listing(self, without: Iterable[str] = ()) -> dict[str, int]:
        """Return name -> step of everything named `step-*`; -1 for other forms."""
        try:
            names = {x for x in os.listdir(self._folder) if x.startswith("step-")}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(f"cannot list {self._folder}: {error}") from error
        return {
            name: int(name[5:]) if _NAME.fullmatch(name) else -1
            for name in names.difference(without)
        }


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def _retry_once(log, action, argument, is_retried=lambda error: True):
    """Return the result of an action, repeated once after some CheckpointErrors."""
    try:
        return action(argument)
    except CheckpointError as error:
        if not is_retried(error):
            raise
        log(f"{one_line(error)}. Trying once more in {RETRY_SECS:g} s")
    time.sleep(RETRY_SECS)
    return action(argument)


def _is_transient(error):
    """Return whether a later read may succeed, as on a network file system."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EIO, errno.ESTALE)


def _status(path: Path) -> list[tuple[str, int, int, int]]:
    """Return names, inodes, sizes and times of the files, without reading them."""
    try:
        stats = [(each.name, each.lstat()) for each in (path, *sorted(path.iterdir()))]
    except OSError:
        return []
    return [(name, x.st_ino, x.st_size, x.st_ctime_ns) for name, x in stats]
