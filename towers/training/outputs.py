"""The outputs of a run: its lock, checkpoints and reports, which the chief writes."""

import contextlib
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from towers import console
from towers.errors import NumericError
from towers.parallel.loop import ACTIVITIES, CONSISTENT_ACTIVITIES, IDLE
from towers.parallel.trainer import Trainer
from towers.run.checkpoint import Snapshot, Tensors
from towers.run.checkpointer import Checkpointer, folder_name
from towers.run.folder import Lock, RunFolder
from towers.run.records import NoReports, Reports
from towers.threads import Background

_BETWEEN_STEPS = (ACTIVITIES[IDLE], *CONSISTENT_ACTIVITIES)


class Outputs:
    """Checkpoints and reports of a run; a context manager that waits for them.

    Attributes:
        saved_step: the step of the last checkpoint that was begun, or restored; 0
            before the first, as step 0 is not saved; -1 if it is to be replaced.
        committed: steps and folders of checkpoints, until they are taken.
    """

    def __init__(self, folder: RunFolder, lock: Lock, checkpointer: Checkpointer):
        self.lock, self._folder, self._checkpointer = lock, folder, checkpointer
        self.reports = Reports(folder, "train", lock.assert_same_folder)
        self.saved_step: int | None = 0
        self.committed: list[tuple[int, pathlib.Path]] = []
        self._background, self._stack = Background(), contextlib.ExitStack()

    def __enter__(self) -> "Outputs":
        self._stack.enter_context(self.reports)
        self._stack.enter_context(self._background)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def say(self, line: str) -> None:
        """Print a line about the run, once for all workers."""
        console.line(line)

    def save(
        self,
        take_snapshot: Callable[[], Snapshot | None],
        saving: Callable[[], contextlib.AbstractContextManager],
    ) -> None:
        """Write a checkpoint, unless None, in the background; raise earlier errors."""
        self.lock.assert_same_folder()
        snapshot = take_snapshot()
        if snapshot is None:
            return

        def write():
            self.reports.sync()
            self.committed.append((snapshot.step, self._checkpointer.save(snapshot)))
            if best := snapshot.run_state["best"]:
                self.reports.file(self._folder.best, f"{folder_name(best['step'])}\n")

        with saving():
            self._background.submit(write)
        self.saved_step = snapshot.step

    def wait(self) -> None:
        """Wait until the last checkpoint is committed; raise its error."""
        self._background.wait()

    def raise_error(self) -> None:
        """Raise the error of a checkpoint that could not be written; do not wait."""
        self._background.raise_job_error()


class NoOutputs(Outputs):
    """Outputs of a worker that is not the chief: nothing is written or printed."""

    def __init__(self):
        self.reports, self.saved_step, self.committed = NoReports(), None, []

    def _do_nothing(self, *args, **kwargs):
        pass

    __enter__ = __exit__ = say = save = wait = raise_error = _do_nothing


def is_between_steps(trainer: Trainer) -> bool:
    """Return whether no update is under way, so that the state is consistent."""
    return trainer.progress()[1] in _BETWEEN_STEPS


def settled_state(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return the state between two steps, after one that ends at this moment."""
    while True:
        before = trainer.progress()
        state = trainer.state()
        if before[1] in _BETWEEN_STEPS and before == trainer.progress():
            return state
        time.sleep(0.01)


def validate_finite(tensors: Tensors, step: int) -> None:
    """Raise NumericError if a value is not finite, as an update may make it."""
    for name, array in tensors.items():
        is_float = array.dtype.kind not in "biu"
        if is_float and not np.isfinite(array.astype(np.float64, copy=False)).all():
            why = f"{name} is not finite after step {step}, and therefore not saved"
            way = "A lower --learning_rate or --clip_norm may help"
            raise NumericError(f"{why}; loss and gradients were finite. {way}")
