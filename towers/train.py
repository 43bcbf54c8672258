"""Training: build, restore, then train, write, evaluate and save until it is done."""

import contextlib
import dataclasses
import os
import platform
import time

import keras
import numpy as np
import tensorflow as tf

import towers
from towers import build, checkpoints
from towers import config as configuration
from towers.config import Config
from towers.errors import ConfigError, NumericError, Preempted
from towers.evaluate import accuracy
from towers.parallel import devices as parallel_devices
from towers.parallel.devices import Devices
from towers.parallel.strategy import CONSISTENT_PHASES, IDLE, PHASES, Strategy
from towers.rhythm import Rhythm, Stopwatch
from towers.run_folder import RunFolder
from towers.summaries import Board, MetricsFile, log_line, say
from towers.watchdog import Watchdog

# A compiled call is sized to about this, so that signals and the clock are looked at.
CALL_SECS = 2.0


@dataclasses.dataclass
class Run:
    """A run under way.

    Attributes:
        last_step: where it ends: the schedule's last step, or max_steps before it.
        step: steps taken.
        best: step and accuracy of the best evaluation on held-out images.
        saved_step, saved_at: step and time of the last checkpoint.
        unfinished: the record of the last step until it is evaluated and written; a
            run that was stopped meanwhile begins with that.
    """

    config: Config
    folder: RunFolder
    parts: build.Parts
    strategy: Strategy
    watchdog: Watchdog
    last_step: int
    step: int = 0
    best: dict | None = None
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    saved_step: int = 0
    saved_at: float = 0.0
    unfinished: dict | None = None


def train(
    config: Config,
    workdir: str | os.PathLike,
    *,
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Trains a run to its end, from its last checkpoint or from the start.

    Args:
        config: what the run is.
        workdir: the run's folder; made where it is missing.
        overwrite: start anew; what an earlier run left there is removed.
        allow_change: fields that may differ from the stored config although their
            change makes it another run.

    Returns:
        The final canonical state.

    Raises:
        TowersError: see `towers.errors`; what was saved stays as it is.
    """
    configuration.check_environment()
    folder = RunFolder(workdir)
    folder.create()
    with contextlib.ExitStack() as stack:
        describe = stack.enter_context(folder.lock())
        if not overwrite:
            _check_stored_config(config, folder, allow_change)
        checkpoints.remove_leftovers(folder.checkpoints, say)

        # Devices, data, network, strategy.
        devices = parallel_devices.configure(
            config.device, config.num_towers, config.device_order
        )
        if config.deterministic:
            parallel_devices.enable_determinism()
        describe(device=devices.kind)
        parts = build.build(config)
        strategy = build.create_strategy(config, parts, devices)
        _print_banner(config, folder, parts, devices, strategy)

        watchdog = stack.enter_context(
            Watchdog(stuck_after_secs=config.stuck_after_secs, say=say)
        )
        last_step = min(config.max_steps or parts.total_steps, parts.total_steps)
        run = Run(config, folder, parts, strategy, watchdog, last_step)

        # Restore.
        if overwrite:
            folder.clear()  # not before everything else is known to be in order
        _restore(run)
        folder.write(folder.config, configuration.to_json(config))
        if run.step >= last_step and not run.unfinished:
            say(
                f"{folder.path} is finished: step {run.step} of {last_step}. Raise "
                "--max_steps or --num_epochs to go on; --overwrite starts anew"
            )
            return strategy.state()

        # Train.
        try:
            train_loop(run)
        except Preempted:
            pass  # a call was left behind, the parameters being a finished step's
        except NumericError:
            save(run)  # the parameters are those before the bad step
            raise
        save(run)
        if watchdog.stopped_by and (run.step < last_step or run.unfinished):
            saved = f"step {run.step} of {last_step} is saved in {folder.path}"
            raise Preempted(
                f"stopped by {watchdog.stopped_by}: "
                f"{saved if run.step else 'no step was taken'}; "
                "the same command continues"
            )
        say(f"done: step {run.step} of {last_step} is saved in {folder.path}")
        return strategy.state()


def train_loop(run: Run) -> None:
    """From the step where the run stands to its last, or until a signal."""
    config, strategy, stopwatch = run.config, run.strategy, run.stopwatch
    num_examples = run.parts.num_examples
    rhythm = Rhythm(
        total_steps=run.parts.total_steps,
        images_per_step=config.images_per_step,
        log_every_steps=config.log_every_steps,
        summary_every_steps=config.summary_every_steps,
        checkpoint_every_steps=config.checkpoint_every_steps,
        images_per_eval=config.eval_every_epochs * num_examples,
    )
    metrics_file = MetricsFile(
        run.folder.metrics, resume_step=run.step - 1 if run.unfinished else run.step
    )
    board = Board(run.folder.tensorboard, "train")
    run.saved_at = time.monotonic()
    staleness = []  # of asynchronous updates since the last log line
    if run.unfinished:
        _finish_step(run, rhythm, board, metrics_file)

    while run.step < run.last_step and not run.watchdog.stopped_by:
        # Train.
        num_steps = min(
            rhythm.next_due(run.step) - run.step,
            run.last_step - run.step,
            config.steps_per_loop,
            stopwatch.steps_in(CALL_SECS),
        )
        started = time.monotonic()
        metrics = run.watchdog.run(
            lambda n=num_steps: strategy.train(n),
            progress=strategy.progress,
            interruptible=CONSISTENT_PHASES,
            request_stop=strategy.request_stop,
        )
        if not metrics:
            break
        step = metrics.pop("step")
        staleness.extend(metrics.pop("staleness", ()))
        stopwatch.add(step - run.step, time.monotonic() - started)
        run.step = step
        record = {"step": step, "epoch": step * config.images_per_step / num_examples}
        run.unfinished = record

        # Write.
        if rhythm.logs(step):
            steps_per_sec = stopwatch.lap()
            if steps_per_sec:
                metrics["images_per_sec"] = steps_per_sec * config.images_per_step
            if staleness:
                metrics["staleness_mean"] = np.mean(staleness)
                metrics["staleness_max"] = np.max(staleness)
                board.histograms(step, {"updates": staleness}, "staleness")
                staleness.clear()
            record |= metrics
            say(log_line(record, run.last_step, steps_per_sec))
            board.scalars(step, metrics)
        if rhythm.summarizes(step):
            board.histograms(step, _params(strategy.state()), "params")
            gradients = run.watchdog.run(
                strategy.gradients,
                progress=lambda at=step: (at, "looking at gradients"),
                interruptible=("looking at gradients",),
            )
            board.histograms(step, gradients, "gradients")
            batch = run.watchdog.run(
                lambda at=step: run.parts.train_batches(tf.constant(at, tf.int64)),
                progress=lambda at=step: (at, "waiting for data"),
                interruptible=("waiting for data",),
            )
            board.images(step, batch["images"], "next_batch")
        _finish_step(run, rhythm, board, metrics_file)


def _finish_step(
    run: Run, rhythm: Rhythm, board: Board, metrics_file: MetricsFile
) -> None:
    """Evaluates and saves where it is due, and writes what is known of the step."""
    record, is_best = dict(run.unfinished), False
    if rhythm.evaluates(run.step):
        evaluation, is_best = _evaluate(run, board)
        record |= evaluation
    if len(record) > 2:
        metrics_file.append(record)
    run.unfinished = None
    every_secs = run.config.checkpoint_every_secs
    overdue = time.monotonic() - run.saved_at > every_secs > 0
    if is_best or overdue or rhythm.saves(run.step):
        save(run)


def _evaluate(run: Run, board: Board) -> tuple[dict[str, float], bool]:
    """Raw and averaged accuracy, as record entries, and whether it is the best yet.

    Only images held out of the training set may say which step is best.
    """
    split, source = run.parts.validation
    stream = run.parts.evaluation_stream(source, run.config.batch_size)
    record, averages = {}, [False, True] if run.config.ema_decay else [False]
    for use_averages in averages:
        counts = run.watchdog.run(
            lambda use=use_averages: accuracy(run.strategy, stream, use),
            progress=lambda: (run.step, "evaluating"),
            interruptible=("evaluating",),
        )
        suffix = "_averaged" if use_averages else ""
        record[f"{split}_accuracy{suffix}"] = counts["accuracy"]
        record[f"{split}_loss{suffix}"] = counts["loss"]
    board.scalars(run.step, record)
    raw = f"{record[f'{split}_accuracy']:.4f}"
    averaged = f" ({counts['accuracy']:.4f} averaged)" if len(averages) > 1 else ""
    say(f"step {run.step}: {split} accuracy {raw}{averaged}")
    if split == "test":
        return record, False
    is_best = run.best is None or counts["accuracy"] > run.best["accuracy"]
    if is_best:
        run.best = {"step": run.step, "accuracy": counts["accuracy"]}
    return record, is_best


def save(run: Run) -> None:
    """Saves the state, unless the last checkpoint holds it already."""
    state = run.watchdog.run(
        lambda: _settled_state(run.strategy),
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
    folder = run.folder.checkpoints
    checkpoints.save(folder, run.step, state, trainer_state)
    best_step = run.best["step"] if run.best else None
    checkpoints.keep(folder, run.config.keep_checkpoints, best_step, say)
    run.saved_step, run.saved_at = run.step, time.monotonic()


def _settled_state(strategy: Strategy) -> dict[str, np.ndarray]:
    """The state between two steps. A call that was left behind waiting for data may
    take its last step at this very moment; that step is then waited for."""
    while True:
        before = strategy.progress()
        state = strategy.state()
        is_settled = before[1] in (PHASES[IDLE], *CONSISTENT_PHASES)
        if is_settled and before == strategy.progress():
            return state
        time.sleep(0.01)


def _restore(run: Run) -> None:
    """Continues from the newest valid checkpoint, if there is any."""
    checkpoint = checkpoints.restore_latest(run.folder.checkpoints, say)
    if checkpoint is None:
        return
    checkpoints.check_architecture(
        checkpoints.architecture(run.strategy.state()),
        checkpoints.architecture(checkpoint.tensors),
    )
    run.strategy.load(checkpoint.tensors)
    run.step = run.saved_step = checkpoint.step
    stored = checkpoint.trainer_state
    run.best, run.unfinished = stored["best"], stored.get("unfinished")
    run.stopwatch = Stopwatch(
        **{field.name: stored[field.name] for field in dataclasses.fields(Stopwatch)}
    )
    say(f"restored step {run.step} from {checkpoint.path}")


def _check_stored_config(
    config: Config, folder: RunFolder, allow_change: tuple[str, ...]
) -> None:
    """Refuses to continue a run as another one."""
    for name in allow_change:
        if name not in configuration.FIELDS:
            raise ConfigError(
                f"--allow_change={name}: there is no such option; "
                + configuration.nearest(name, list(configuration.FIELDS)).strip()
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


def _print_banner(
    config: Config,
    folder: RunFolder,
    parts: build.Parts,
    devices: Devices,
    strategy: Strategy,
) -> None:
    """What will run, where and on what."""
    data, model = parts.data, parts.model
    height, width, channels = parts.augment.image_shape
    batch = f"{config.batch_size} images"
    if config.accumulate_steps > 1:
        batch = f"{config.accumulate_steps} x {batch}"
    lines = [
        ("run folder", folder.path),
        ("devices", ", ".join(devices.towers)),
        ("strategy", config.strategy),
        *(("", line) for line in strategy.describe()),
        (
            "data set",
            f"{data.name}: {parts.num_examples:,} training and "
            f"{data.test.num_examples:,} test images, {data.found}",
        ),
        (
            "network",
            f"{config.model} on {height}x{width}x{channels}, {config.precision}: "
            f"{model.count_params():,} parameters",
        ),
        ("batch", f"{batch} a step over all towers"),
        (
            "length",
            f"{parts.total_steps:,} steps, {config.num_epochs:g} epochs of "
            f"{parts.num_examples:,} images",
        ),
    ]
    lines += [("note", remark) for remark in devices.remarks]
    lines += [("warning", line) for line in configuration.ignored_options(config)]
    say(
        f"towers {towers.__version__}, TensorFlow {tf.__version__}, "
        f"Keras {keras.__version__}, Python {platform.python_version()}"
    )
    for name, text in lines:
        say(f"{name:12} {text}")


def _listed(record):
    """A record as JSON takes it; floats keep all their bits."""
    return {name: np.asarray(value).tolist() for name, value in record.items()}


def _params(state):
    prefix = "params/"
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
