"""A run under way: what it consists of, and how it is saved and restored."""

import dataclasses
import time

import numpy as np

from towers import build
from towers import config as configuration
from towers.config import Config, checks
from towers.errors import CheckpointError, ConfigError
from towers.parallel.trainer import ACTIVITIES as PHASES
from towers.parallel.trainer import CONSISTENT_ACTIVITIES as CONSISTENT_PHASES
from towers.parallel.trainer import IDLE
from towers.parallel.trainer import Trainer as Strategy
from towers.run import checkpoint_files, checkpoints
from towers.run.background import Background
from towers.run.folder import RunFolder
from towers.run.periods import Stopwatch
from towers.run.summaries import say
from towers.run.watchdog import Watchdog


@dataclasses.dataclass
class Run:
    """A run under way.

    Attributes:
        last_step: where it ends: the schedule's last step, or max_steps before it.
        step: steps taken.
        best: step and accuracy of the best evaluation on held-out images.
        saved_step, saved_at: step and time of the last snapshot for a checkpoint.
        unfinished: the record of the last step until it is evaluated and written; a
            run that was stopped meanwhile begins with that.
    """

    config: Config
    folder: RunFolder
    parts: build.Parts
    strategy: Strategy
    watchdog: Watchdog
    background: Background
    last_step: int
    step: int = 0
    best: dict | None = None
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    saved_step: int = 0
    saved_at: float = 0.0
    unfinished: dict | None = None


def save(run: Run) -> None:
    """Takes a snapshot of the state, unless the last checkpoint holds it already, and
    has it written in the background."""
    state = run.watchdog.run(
        lambda: settled_state(run.strategy),
        progress=run.strategy.progress,
        interruptible=(),
    )
    run.step = int(state["step"])
    if run.step == run.saved_step:
        return
    trainer_state = {
        "images_seen": run.step * run.config.images_per_step,
        "seed": run.config.seed,
        "best": run.best,
        "unfinished": run.unfinished and _listed(run.unfinished),
        "config": dataclasses.asdict(run.config),
        **dataclasses.asdict(run.stopwatch),
    }
    folder, step = run.folder.checkpoints, run.step
    best_step = run.best["step"] if run.best else None

    def write():
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
    run.strategy.load(checkpoint_files.fitted(checkpoint.tensors, run.strategy.state()))
    run.step = run.saved_step = checkpoint.step
    stored = checkpoint.trainer_state
    run.best, run.unfinished = stored["best"], stored.get("unfinished")
    run.stopwatch = Stopwatch(
        **{f.name: stored.get(f.name, f.default) for f in dataclasses.fields(Stopwatch)}
    )
    say(f"restored step {run.step} from {checkpoint.path}")


def _start_from(run):
    """Takes another run's parameters and model state where name and shape match.

    Moving averages start at the parameters, slots and the step at zero, as always.
    """
    folder = RunFolder(run.config.init_from)
    checkpoint = checkpoints.restore_latest(folder.checkpoints, say)
    if checkpoint is None:
        raise CheckpointError(
            f"init_from={run.config.init_from}: {folder.checkpoints} holds no "
            "checkpoint"
        )
    state, taken, rest = run.strategy.state(), set(), []
    for name, value in state.items():
        kind, _, variable = name.partition("/")
        if kind not in ("params", "state", "averages"):
            continue
        source = f"params/{variable}" if kind == "averages" else name
        found = checkpoint.tensors.get(source)
        if found is not None and found.shape == value.shape:
            state[name] = found
            taken.add(source)
        elif source == name:
            there = "is not there" if found is None else f"is {list(found.shape)} there"
            rest.append(f"{name} {list(value.shape)} {there}")
    if not taken:
        raise CheckpointError(
            f"init_from={run.config.init_from}: nothing in {checkpoint.path} fits; "
            f"{rest[0]}"
        )
    rest += [
        f"{name} is only there"
        for name in checkpoint.tensors
        if name.split("/")[0] in ("params", "state") and name not in state
    ]
    run.strategy.load(state)
    say(f"starting from {len(taken)} variables of {checkpoint.path}")
    for line in rest:
        say(f"not taken: {line}")


def check_stored_config(
    config: Config, folder: RunFolder, allow_change: tuple[str, ...]
) -> None:
    """Refuses to continue a run as another one."""
    for name in allow_change:
        if name not in configuration.FIELDS:
            raise ConfigError(
                f"--allow_change={name}: there is no such option; "
                + checks.nearest(name, list(configuration.FIELDS)).strip()
            )
    if not checkpoints.list_steps(folder.checkpoints) or not folder.config.exists():
        return
    changed = configuration.changed_mathematics(folder.stored_config(), config)
    refused = {k: v for k, v in changed.items() if k not in allow_change}
    if refused:
        listed = ", ".join(
            f"{name} was {before!r} and is {after!r}"
            for name, (before, after) in refused.items()
        )
        raise ConfigError(
            f"{folder.path} holds another run: {listed}. Choose another --workdir, "
            f"start anew with --overwrite, or --allow_change={','.join(refused)}"
        )


def settled_state(strategy: Strategy) -> dict[str, np.ndarray]:
    """The state between two steps. A call that was left behind waiting for data may
    take its last step at this very moment; that step is then waited for."""
    while True:
        before = strategy.progress()
        state = strategy.state()
        is_settled = before[1] in (PHASES[IDLE], *CONSISTENT_PHASES)
        if is_settled and before == strategy.progress():
            return state
        time.sleep(0.01)


def _listed(record):
    """A record as JSON takes it; floats keep all their bits."""
    return {name: np.asarray(value).tolist() for name, value in record.items()}
