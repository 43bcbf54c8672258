"""A run under way, and how it is saved."""

import contextlib
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable

import numpy as np

from towers.config import Config, to_json
from towers.errors import CheckpointError, NumericError, RunFolderError, one_line
from towers.output import say
from towers.parallel.feed import Feed
from towers.parallel.loop import ACTIVITIES, CONSISTENT_ACTIVITIES, IDLE
from towers.parallel.trainer import Trainer
from towers.parallel.workers import ALONE, Workers
from towers.run import checkpoints, files
from towers.run.background import Background
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.lock import Lock
from towers.run.reports import Reports
from towers.run.stopwatch import Stopwatch
from towers.run.watchdog import Watchdog

# A checkpoint that cannot be written is tried once more after this time.
RETRY_SECS = 2.0

_BETWEEN_STEPS = (ACTIVITIES[IDLE], *CONSISTENT_ACTIVITIES)


@dataclasses.dataclass
class Run:
    """A run under way.

    Attributes:
        lock: of the folder; None of a worker that is not the chief, which writes
            nothing.
        reports: TensorBoard, `metrics.jsonl` and small files.
        last_step: the last step of the schedule, or max_steps before it.
        dataset_info: classes and preprocessing of the data set.
        workers: processes that train together.
        clock: seconds, from which what is due by the clock is known.
        stopped: whether they agreed to stop before the last step.
        step: steps taken.
        best: step and accuracy of the best evaluation on held-out images.
        accuracy: of the last evaluation.
        saved_step, saved_at: step and time of the last snapshot for a checkpoint.
        summarized_at: time of the last summary.
        pending_record: that of the last step until it is evaluated and written. A run
            that was stopped before that begins with it.
        eval_feed: of every evaluation, from the first on. TensorFlow traces the
            functions of each data set that is made, and never frees all of that.
        say_once: as `say`, but each line only once.
    """

    config: Config
    folder: RunFolder
    lock: Lock | None
    reports: Reports
    trainer: Trainer
    watchdog: Watchdog
    background: Background
    last_step: int
    dataset_info: DatasetInfo
    workers: Workers = ALONE
    clock: Callable[[], float] = time.monotonic
    stopped: bool = False
    step: int = 0
    best: dict | None = None
    accuracy: float | None = None
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    saved_step: int = 0
    saved_at: float = 0.0
    summarized_at: float = 0.0
    pending_record: dict | None = None
    eval_feed: Feed | None = None
    say_once: Callable[[str], None] = dataclasses.field(
        default_factory=lambda: functools.cache(say)
    )

    def say(self, line: str) -> None:
        """Prints a line about the run, once for all workers."""
        if self.workers.is_chief:
            say(line)


def save(run: Run) -> None:
    """Saves a snapshot of the state in the background, unless the last checkpoint holds
    it already; the chief does that for all workers. To be called inside of
    `Watchdog.run`.

    Raises:
        CheckpointError: the previous snapshot could not be written.
        NumericError: a parameter is not finite.
        RunFolderError: the run's folder is gone, or that of its checkpoints exchanged
            for something else.
    """
    if not run.workers.is_chief:
        return
    _check_folder(run)
    if is_between_steps(run.trainer) and run.trainer.progress()[0] == run.saved_step:
        run.step = run.saved_step
        return
    state, trainer_state = _snapshot(run)
    step, best_step = run.step, run.best["step"] if run.best else None

    check_folder = functools.partial(_check_folder, run)

    def write():
        check_folder()
        run.reports.sync()
        unwritten = run.reports.metrics.kept_back(step)
        stored = trainer_state | {"unwritten": unwritten}
        checkpoints.save(run.folder.checkpoints, step, state, stored, check_folder)
        run.reports.kept_steps = {record["step"] for record in unwritten}
        checkpoints.keep(
            run.folder.checkpoints,
            run.config.keep_checkpoints,
            best_step,
            run.say_once,
            check_folder,
        )

    def write_or_try_again():
        try:
            write()
        except CheckpointError as error:
            say(f"{error}. Trying once more in {RETRY_SECS:g} s")
            time.sleep(RETRY_SECS)
            write()

    with run.watchdog.saving():  # the previous one may still be written
        run.background.submit(write_or_try_again)
    run.saved_step, run.saved_at = step, run.clock()


def save_and_wait(run: Run) -> None:
    """Saves as `save`, and waits until the checkpoint is committed."""
    save(run)
    with run.watchdog.saving():
        run.background.wait()


def _check_folder(run):
    run.lock.check()
    run.folder.check_checkpoints()


def try_to_save(run: Run, because: Exception) -> None:
    """Saves before a run ends because of an error; says why where that fails for
    another reason."""
    try:
        save_and_wait(run)
    except (CheckpointError, NumericError, RunFolderError) as error:
        if str(error) != str(because):
            say(str(error))


def saved_aside(run: Run, error: RunFolderError) -> RunFolderError:
    """Saves the state in a new run folder beside that of the run, which is gone; the
    error with the name of that folder, or with the reason why there is none."""
    try:
        path = _save_aside(run)
    except (OSError, CheckpointError, NumericError) as failure:
        reason = one_line(failure, 150)
        return RunFolderError(f"{error}; it cannot be saved beside it: {reason}")
    return RunFolderError(
        f"{error}; step {run.step} is saved in {path}: continue with that --workdir"
    )


def _save_aside(run):
    state, trainer_state = _snapshot(run)
    path = run.folder.path.absolute()
    for number in itertools.count(1):
        aside = RunFolder(path.with_name(f"{path.name}-aside-{number}"))
        with contextlib.suppress(FileExistsError):
            aside.path.mkdir()
            break
    try:
        with run.watchdog.saving():
            files.sync(path.parent)
            checkpoints.save(aside.checkpoints, run.step, state, trainer_state)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(aside.path)
        raise
    # The run continues without these as well.
    with contextlib.suppress(OSError, ValueError):
        files.write_text(aside.config, to_json(run.config))
        files.write_text(aside.dataset_info, run.dataset_info.to_json())
        records = run.reports.metrics.records()
        text = "".join(json.dumps(record) + "\n" for record in records)
        files.write_text(aside.metrics, text)
    return aside.path


def _snapshot(run):
    """(state, trainer state) for a checkpoint; sets the run's step to that of both."""
    with run.watchdog.saving():
        state = settled_state(run.trainer)
    run.step = int(state["step"])
    _check_finite(state, run.step)
    return state, {
        "images_seen": run.step * run.config.images_per_step,
        "seed": run.config.seed,
        "best": run.best,
        "unfinished": run.pending_record and _as_lists(run.pending_record),
        "unwritten": run.reports.metrics.kept_back(run.step),
        "config": dataclasses.asdict(run.config),
        "dataset_info": dataclasses.asdict(run.dataset_info),
        **dataclasses.asdict(run.stopwatch),
    }


def _check_finite(state, step):
    """A loss and gradients that are finite may give an update that is not."""
    for name, array in state.items():
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


def _as_lists(record):
    """A record as JSON takes it; floats keep all their bits."""
    return {name: np.asarray(value).tolist() for name, value in record.items()}
