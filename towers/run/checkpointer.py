"""The checkpoints of a run: committed by a rename, verified before use.

A checkpoint is a folder `step-00001200`, see `checkpoint`. It is written aside, read
back, flushed and renamed: a folder with its final name and a manifest that holds *is*
the commit, so a process may be killed at any moment. One process at a time may write to
a folder (the run's lock sees to that); any may read.
"""

import errno
import numbers
import os
import re
import time
from collections.abc import Callable, Container, Mapping
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
    read_trainer_state,
    validate_sizes,
    write,
)

T = TypeVar("T")

# After an error of the disk it is tried once more after this time.
RETRY_SECS = 2.0

# Causes that are no damage; their messages name the way out.
_WITH_HINT = PermissionError, OtherVersionError


class Checkpointer:
    """Saves and restores the checkpoints of a run.

    Args:
        folder: of the checkpoints; the first save makes it.
        log: takes a line for the user.
        validate: checks the trainer state of one that is read; CheckpointError.
        keep: number of the newest that are kept, besides the best one.
        assert_same_folder: called before each commit and removal, see `Lock`.
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
        self._valid: dict[str, list] = {}  # name -> status of the files that were read

    def save(self, snapshot: Snapshot) -> Path:
        """Write, read back and commit a checkpoint in place of any of its step, and
        delete old ones. CheckpointError if that fails twice; earlier ones are
        intact.
        """
        tensors = {name: np.asarray(x) for name, x in snapshot.tensors.items()}
        snapshot = Snapshot(snapshot.step, tensors, snapshot.trainer_state)
        path = _retry_once(self._log, self._save, snapshot)
        best = snapshot.trainer_state.get("best")
        self._remove_old(best["step"] if best else None)
        return path

    def _save(self, snapshot):
        final = self._path(snapshot.step)
        try:
            self._assert_same_folder()
            self._folder.mkdir(exist_ok=True)
            store.sync(self._folder.parent)  # a killed process may have made it
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
        """The steps of the checkpoints, valid or not, in increasing order."""
        return sorted(step for step in self._listing().values() if step >= 0)

    def read(self, step: int | str = "last") -> Checkpoint | None:
        """Reads and verifies the checkpoint of a step, the "last" valid one, or the
        "best", which is the last one of a run without held-out images. Logs each that
        is rejected with its reason and goes on to the one before.

        None where there is no `step-*` at all. CheckpointError, with reasons, where
        there is none of this step, or none valid.
        """
        is_number = isinstance(step, numbers.Integral) and not isinstance(step, bool)
        if not ((is_number and step >= 0) or step in ("best", "last")):
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
        # Listed again after each rejection: next to a training run, the checkpoint that
        # was being read may have been deleted meanwhile and a newer one committed.
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
        """A value of the newest checkpoint whose trainer state is valid, or None; the
        tensors are not read. `parse` raises ConfigError where the state holds no such
        value; the checkpoint of `step`, or the "best", is tried first.
        """
        if step == "best":
            step = self.best_step()
        for candidate in sorted(self.steps(), key=lambda x: (x != step, -x)):
            try:
                return parse(read_trainer_state(self._path(candidate))[key])
            except (CheckpointError, ConfigError, KeyError):
                continue
        return None

    def recover(self) -> None:
        """Name a checkpoint again that an interrupted save was replacing."""
        store.recover(self._folder)

    def remove_leftovers(self) -> None:
        """Removes what interrupted saves left (`.tmp-*`) and logs its size."""
        store.remove_leftovers(self._folder.glob(".tmp-*"), "save", self._log)

    def _remove_old(self, best_step):
        """Delete all but the newest whole checkpoints, and the best one."""
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

    def _listing(self, without: Container[str] = ()) -> dict[str, int]:
        """Name -> step of everything named `step-*`; -1 for a name of another form."""
        try:
            names = [name for name in os.listdir(self._folder) if name[:5] == "step-"]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(f"cannot list {self._folder}: {error}") from error
        steps = {n: int(n[5:]) if re.fullmatch("[0-9]+", n[5:]) else -1 for n in names}
        # With more zeros it would be a second name of the same step.
        steps = {n: s if n == self._path(s).name else -1 for n, s in steps.items()}
        return {n: s for n, s in steps.items() if n not in without}


def folder_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def _retry_once(log, action, argument, is_retried=lambda error: True):
    """The result of an action, which is tried once more after some CheckpointErrors."""
    try:
        return action(argument)
    except CheckpointError as error:
        if not is_retried(error):
            raise
        log(f"{one_line(error)}. Trying once more in {RETRY_SECS:g} s")
    time.sleep(RETRY_SECS)
    return action(argument)


def _is_transient(error):
    """True if a later read may succeed: an error of a disk or a network file system."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EIO, errno.ESTALE)


def _status(path: Path) -> list[tuple[str, int, int, int]]:
    """Names, inodes, sizes and times of the files of a checkpoint; none is read."""
    try:
        stats = [(each.name, each.lstat()) for each in (path, *sorted(path.iterdir()))]
    except OSError:
        return []
    return [(name, x.st_ino, x.st_size, x.st_ctime_ns) for name, x in stats]
