"""A run under way: its state, saved and restored."""

import dataclasses
import pathlib
import time

import numpy as np

from towers.config import FIELDS, Config, changed_mathematics
from towers.config.choices import nearest
from towers.errors import CheckpointError, ConfigError
from towers.parallel.trainer import ACTIVITIES, CONSISTENT_ACTIVITIES, IDLE, Trainer
from towers.run import checkpoint_files, checkpoints
from towers.run.background import Background
from towers.run.folder import RunFolder, fsync
from towers.run.stopwatch import Stopwatch
from towers.run.summaries import last_accuracy, say
from towers.run.watchdog import Watchdog


@dataclasses.dataclass
class Run:
    """A run under way.

    Attributes:
        last_step: the last step of the schedule, or max_steps before it.
        step: steps taken.
        best: step and accuracy of the best evaluation on held-out images.
        accuracy: of the last evaluation.
        saved_step, saved_at: step and time of the last snapshot for a checkpoint.
        pending_record: that of the last step until it is evaluated and written. A run
            that was stopped before that begins with it.
    """

    config: Config
    folder: RunFolder
    trainer: Trainer
    watchdog: Watchdog
    background: Background
    last_step: int
    step: int = 0
    best: dict | None = None
    accuracy: float | None = None
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    saved_step: int = 0
    saved_at: float = 0.0
    pending_record: dict | None = None


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A run after training.

    Attributes:
        path: the run's folder.
        step: the last step taken.
        accuracy: of the last evaluation, with the moving averages where the run keeps
            them; None if there was none.
        state: the canonical state, name -> host array.
    """

    path: pathlib.Path
    step: int
    accuracy: float | None
    state: dict[str, np.ndarray] = dataclasses.field(repr=False, compare=False)


def save(run: Run) -> None:
    """Saves a snapshot of the state in the background, unless the last checkpoint holds
    it already. To be called inside of `Watchdog.run`."""
    with run.watchdog.saving():
        state = settled_state(run.trainer)
    run.step = int(state["step"])
    if run.step == run.saved_step:
        return
    trainer_state = {
        "images_seen": run.step * run.config.images_per_step,
        "seed": run.config.seed,
        "best": run.best,
        "unfinished": run.pending_record and _as_lists(run.pending_record),
        "config": dataclasses.asdict(run.config),
        **dataclasses.asdict(run.stopwatch),
    }
    folder, step = run.folder.checkpoints, run.step
    best_step = run.best["step"] if run.best else None

    def write():
        if run.folder.metrics.exists():  # its lines last as long as the checkpoint
            fsync(run.folder.metrics)
            fsync(run.folder.path)
        checkpoints.save(folder, step, state, trainer_state)
        checkpoints.keep(folder, run.config.keep_checkpoints, best_step, say)

    run.background.submit(write)
    run.saved_step, run.saved_at = step, time.monotonic()


def restore(run: Run) -> None:
    """Continues from the newest valid checkpoint; where there is none, starts from the
    parameters of another run if `init_from` names one."""
    checkpoint = checkpoints.restore_latest(run.folder.checkpoints, say)
    if checkpoint is None:
        if run.config.init_from:
            _start_from(run)
        return
    run.trainer.load(
        checkpoint_files.restore_fitting(checkpoint.tensors, run.trainer.state())
    )
    run.step = run.saved_step = checkpoint.step
    stored = checkpoint.trainer_state
    run.best, run.pending_record = stored["best"], stored.get("unfinished")
    run.stopwatch = Stopwatch(
        **{f.name: stored.get(f.name, f.default) for f in dataclasses.fields(Stopwatch)}
    )
    run.accuracy = last_accuracy(run.folder.metrics, run.step)
    say(f"restored step {run.step} from {checkpoint.path}")


def _start_from(run):
    """Loads another run's parameters and model state where name and shape match.

    Moving averages start at the parameters, slots and the step at zero, as always.
    """
    folder = RunFolder(run.config.init_from)
    checkpoint = checkpoints.restore_latest(folder.checkpoints, say)
    if checkpoint is None:
        raise CheckpointError(
            f"init_from={run.config.init_from}: {folder.checkpoints} holds no "
            "checkpoint; give the folder of a run that was trained, or drop --init_from"
        )
    state, taken, not_taken = run.trainer.state(), set(), []
    for name, value in state.items():
        kind, _, variable = name.partition("/")
        if kind not in ("params", "state", "averages"):
            continue
        source = f"params/{variable}" if kind == "averages" else name
        tensor = checkpoint.tensors.get(source)
        if tensor is not None and tensor.shape == value.shape:
            state[name] = tensor
            taken.add(source)
        elif source == name:
            there = f"is {list(tensor.shape)}" if tensor is not None else "is not"
            not_taken.append(f"{name} {list(value.shape)} {there} there")
    if not taken:
        raise CheckpointError(
            f"init_from={run.config.init_from}: nothing in {checkpoint.path} fits; "
            f"{not_taken[0]}"
        )
    not_taken += [
        f"{name} is only there"
        for name in checkpoint.tensors
        if name.split("/")[0] in ("params", "state") and name not in state
    ]
    run.trainer.load(state)
    say(f"starting from {len(taken)} variables of {checkpoint.path}")
    for line in not_taken:
        say(f"not taken: {line}")


def check_stored_config(
    config: Config, folder: RunFolder, allow_change: tuple[str, ...]
) -> None:
    """Refuses to continue a run with options that would make it another run.

    Raises:
        ConfigError: the options are listed.
    """
    for name in allow_change:
        if name not in FIELDS:
            raise ConfigError(
                f"--allow_change={name}: there is no such option; "
                + nearest(name, list(FIELDS)).strip()
            )
    if not checkpoints.list_steps(folder.checkpoints) or not folder.config.exists():
        return
    changed = changed_mathematics(folder.stored_config(), config)
    refused = {k: v for k, v in changed.items() if k not in allow_change}
    if refused:
        listed = ", ".join(
            f"{name} was {before!r} and is {after!r}"
            for name, (before, after) in refused.items()
        )
        raise ConfigError(
            f"{folder.path} holds another run: {listed}. Choose another --workdir, "
            f"start again with --overwrite, or --allow_change={','.join(refused)}"
        )


def settled_state(trainer: Trainer) -> dict[str, np.ndarray]:
    """The state between two steps.

    A call that was abandoned waiting for data may take its last step at this very
    moment; that step is then waited for.
    """
    while True:
        before = trainer.progress()
        state = trainer.state()
        is_settled = before[1] in (ACTIVITIES[IDLE], *CONSISTENT_ACTIVITIES)
        if is_settled and before == trainer.progress():
            return state
        time.sleep(0.01)


def _as_lists(record):
    """A record as JSON takes it; floats keep all their bits."""
    return {name: np.asarray(value).tolist() for name, value in record.items()}
