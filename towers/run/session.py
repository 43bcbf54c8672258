"""A training under way, and how it is saved."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from towers import console
from towers.callbacks import Callback, Tracker
from towers.cluster.workers import ALONE, Workers
from towers.config import Config
from towers.errors import CheckpointError, NumericError, RunFolderError, one_line
from towers.parallel.evaluator import Evaluation
from towers.parallel.feed import Feed
from towers.parallel.loop import ACTIVITIES, CONSISTENT_ACTIVITIES, IDLE
from towers.parallel.trainer import Trainer
from towers.reporting.display import Display
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer, folder_name
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.lock import Lock
from towers.run.progress import Progress
from towers.run.reports import Reports
from towers.run.watchdog import Watchdog
from towers.threads import Background

_BETWEEN_STEPS = (ACTIVITIES[IDLE], *CONSISTENT_ACTIVITIES)


@dataclasses.dataclass
class Session:
    """A training under way.

    Attributes:
        lock, checkpointer: of the folder; None of a worker that is not the chief, which
            writes nothing.
        reports: TensorBoard, `metrics.jsonl` and small files.
        display: of the progress.
        last_step: the last step of the schedule, or max_steps before it.
        dataset_info: classes and preprocessing of the data set.
        workers: processes that train together.
        clock: seconds, from which what is due by the clock is known.
        progress: what a checkpoint stores of the run.
        stopped: whether they agreed to stop before the last step.
        evaluated: step and accuracies of the last evaluation.
        saved_step, saved_at: step and time of the last snapshot for a checkpoint.
        summarized_at: time of the last summary.
        summarized_params: name -> array, those of a summary until the step after it.
        callbacks: of the user.
        is_calling: whether one of them is called.
        committed: steps and folders of checkpoints that they are not told yet.
        eval_feed: of every evaluation, from the first on. TensorFlow traces the
            functions of each data set that is made, and never frees all of that.
    """

    config: Config
    folder: RunFolder
    lock: Lock | None
    checkpointer: Checkpointer | None
    reports: Reports
    trainer: Trainer
    watchdog: Watchdog
    background: Background
    display: Display
    last_step: int
    dataset_info: DatasetInfo
    workers: Workers = ALONE
    clock: Callable[[], float] = time.monotonic
    stopped: bool = False
    progress: Progress = dataclasses.field(default_factory=Progress)
    evaluated: tuple[int, Evaluation[Mapping[str, Any]]] | None = None
    saved_step: int = 0
    saved_at: float = 0.0
    summarized_at: float = 0.0
    summarized_params: dict[str, np.ndarray] | None = None
    eval_feed: Feed | None = None
    callbacks: tuple[Callback, ...] = ()
    is_calling: bool = False
    committed: list[tuple[int, pathlib.Path]] = dataclasses.field(default_factory=list)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the run ends here, as evaluations have long been no better."""
        return 0 < self.config.patience <= self.progress.num_worse

    @property
    def is_at_end(self) -> bool:
        """Whether no step is left."""
        return self.progress.step >= self.last_step or self.is_out_of_patience

    def say(self, line: str) -> None:
        """Prints a line about the run, once for all workers."""
        if self.workers.is_chief:
            console.line(line)


def scale_rate(trainer: Trainer, config: Config, num_plateaus: int) -> None:
    """Gives a trainer the factor that so many plateaus have made of the rate, where
    evaluations lower it."""
    if config.choice_of("schedule").by_accuracy:
        trainer.scale_rate(config.decay_factor**num_plateaus)


def save(session: Session) -> None:
    """Saves a snapshot of the state in the background, unless the last checkpoint holds
    it already; the chief does that for all workers. To be called inside of
    `Watchdog.run`.

    Raises:
        CheckpointError: the previous snapshot could not be written.
        NumericError: a parameter is not finite.
        RunFolderError: the run's folder is gone.
    """
    if not session.workers.is_chief:
        return
    session.lock.assert_same_folder()
    trainer, reports = session.trainer, session.reports
    if is_between_steps(trainer) and trainer.progress()[0] == session.saved_step:
        session.progress.step = session.saved_step
        return
    with session.watchdog.saving():
        tensors = settled_state(trainer)
    step = session.progress.step = int(tensors["step"])
    _validate_finite(tensors, step)
    trainer_state = {
        "images_seen": step * session.config.images_per_step,
        "seed": session.config.seed,
        "teacher": session.trainer.teacher and session.trainer.teacher.checksum,
        "config": dataclasses.asdict(session.config),
        "dataset_info": dataclasses.asdict(session.dataset_info),
        **session.progress.to_json(),
    }

    def write():
        reports.sync()
        path = session.checkpointer.save(Snapshot(step, tensors, trainer_state))
        session.committed.append((step, path))
        if best := trainer_state["best"]:
            reports.file(session.folder.best, f"{folder_name(best['step'])}\n")

    with session.watchdog.saving():  # the previous one may still be written
        session.background.submit(write)
    session.saved_step, session.saved_at = step, session.clock()


def save_and_wait(session: Session) -> None:
    """Saves as `save`, and waits until the checkpoint is committed."""
    save(session)
    with session.watchdog.saving():
        session.background.wait()


class CallbackError(BaseException):
    """Carries an exception of any type that a callback of the user has raised, its
    `__cause__`, past the handlers of errors of the run itself."""


def call(session: Session, method: str, *args: Any) -> None:
    """Calls a method of all callbacks.

    Raises:
        CallbackError: one of them raised an error; not one of a tracker that has begun,
            which is a report that cannot be written.
    """
    session.is_calling = True
    try:
        for callback in session.callbacks:
            bound = functools.partial(getattr(callback, method), *args)
            if isinstance(callback, Tracker) and method != "on_start":
                name = f"{type(callback).__name__}.{method}"
                session.reports.attempt(name, bound, Exception)
            else:
                bound()
    except BaseException as error:
        raise CallbackError(error) from error
    finally:
        session.is_calling = False


def call_of_checkpoints(session: Session) -> None:
    """Tells the callbacks of checkpoints that were committed."""
    while session.committed:
        call(session, "on_checkpoint", *session.committed.pop(0))


def end_callbacks(session: Session) -> None:
    """Tells the callbacks that the run is at its end."""
    call_of_checkpoints(session)
    call(session, "on_end", session.progress.step)


def notify_exception(session: Session, error: BaseException) -> None:
    """Tells the callbacks, all of them, that the run ends with an error."""
    for callback in session.callbacks:
        try:
            callback.on_exception(session.progress.step, error)
        except BaseException as other:
            reason = one_line(f"{type(other).__name__}: {other}")
            console.warn(f"{type(callback).__name__}: {reason}")


def try_to_save(session: Session, because: BaseException) -> None:
    """Saves before a run ends because of an error; says why where that fails for
    another reason."""
    try:
        save_and_wait(session)
    except (CheckpointError, NumericError, RunFolderError) as error:
        if str(error) != str(because):
            console.line(str(error))


def _validate_finite(tensors, step):
    """A loss and gradients that are finite may give an update that is not."""
    for name, array in tensors.items():
        is_float = array.dtype.kind not in "biu"
        if is_float and not np.isfinite(array.astype(np.float64, copy=False)).all():
            raise NumericError(
                f"{name} is not finite after step {step}, which is therefore not "
                "saved; loss and gradients were finite. A lower --learning_rate or "
                "--clip_norm may help"
            )


def is_between_steps(trainer: Trainer) -> bool:
    """True if no update is under way, so that the parameters are those of a step."""
    return trainer.progress()[1] in _BETWEEN_STEPS


def settled_state(trainer: Trainer) -> dict[str, np.ndarray]:
    """The state between two steps.

    A call that was abandoned waiting for data may take its last step at this very
    moment; that step is then waited for.
    """
    while True:
        before = trainer.progress()
        state = trainer.state()
        if before[1] in _BETWEEN_STEPS and before == trainer.progress():
            return state
        time.sleep(0.01)
