"""Training: build, restore, then train, write, evaluate and save until it is done."""

import contextlib
import os
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers import build
from towers import config as configuration
from towers.config import Config, checks
from towers.errors import (
    CheckpointError,
    DataError,
    NumericError,
    Preempted,
    data_errors_of_tensorflow,
)
from towers.evaluation import accuracy, record_of, tta_remark
from towers.parallel import devices as parallel_devices
from towers.parallel.memory import check_budget
from towers.parallel.trainer import CONSISTENT_ACTIVITIES as CONSISTENT_PHASES
from towers.run import checkpoints
from towers.run.background import Background
from towers.run.banner import start_banner
from towers.run.folder import RunFolder
from towers.run.periods import Rhythm
from towers.run.run import Run, check_stored_config, restore, save
from towers.run.summaries import Board, MetricsFile, log_line, say
from towers.run.watchdog import Watchdog

# A compiled call is sized to about this, so that signals and the clock are looked at.
CALL_SECS = 2.0


def train(
    config: Config,
    workdir: str | os.PathLike,
    *,
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    after_call: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Trains a run to its end, from its last checkpoint or from the start.

    Args:
        config: what the run is.
        workdir: the run's folder; made where it is missing.
        overwrite: start anew; what an earlier run left there is removed.
        allow_change: fields that may differ from the stored config although their
            change makes it another run.
        after_call: called after each call of some steps, and after what was due then.

    Returns:
        The final canonical state.

    Raises:
        TowersError: see `towers.errors`; what was saved stays as it is.
    """
    checks.check_environment()
    folder = RunFolder(workdir)
    folder.create()
    with contextlib.ExitStack() as stack:
        describe = stack.enter_context(folder.lock())
        if not overwrite:
            check_stored_config(config, folder, allow_change)
        checkpoints.remove_leftovers(folder.checkpoints, say)

        # Devices, data, network, strategy.
        devices = parallel_devices.configure(
            config.device,
            config.num_towers,
            config.device_order,
            config.device_memory_mb,
        )
        if config.deterministic:
            parallel_devices.enable_determinism()
        describe(device=devices.kind)
        parts = build.build(config)
        strategy = build.create_trainer(config, parts, devices)
        if config.device_memory_mb:
            check_budget(strategy.memory(), config.device_memory_mb)
        for line in start_banner(config, folder, parts, devices, strategy):
            say(line)

        watchdog = stack.enter_context(
            Watchdog(stuck_after_secs=config.stuck_after_secs, say=say)
        )
        last_step = min(config.max_steps or parts.total_steps, parts.total_steps)
        background = stack.enter_context(Background(say))
        run = Run(config, folder, parts, strategy, watchdog, background, last_step)

        # Restore.
        if overwrite:
            folder.clear()  # not before everything else is known to be in order
        restore(run)
        folder.write(folder.config, configuration.to_json(config))
        if run.step >= last_step and not run.unfinished:
            say(
                f"{folder.path} is finished: step {run.step} of {last_step}. Raise "
                "--max_steps or --num_epochs to go on; --overwrite starts anew"
            )
            return strategy.state()

        # Train.
        try:
            with data_errors_of_tensorflow():
                train_loop(run, after_call)
        except Preempted:
            pass  # a call was left behind, the parameters being a finished step's
        except (NumericError, DataError):
            try:
                save(run)  # the parameters are those before the bad step
            except CheckpointError as earlier:
                say(str(earlier))
            raise
        save(run)
        background.wait()
        if watchdog.stopped_by and (run.step < last_step or run.unfinished):
            saved = f"step {run.step} of {last_step} is saved in {folder.path}"
            raise Preempted(
                f"stopped by {watchdog.stopped_by}: "
                f"{saved if run.step else 'no step was taken'}; "
                "the same command continues"
            )
        say(f"done: step {run.step} of {last_step} is saved in {folder.path}")
        return strategy.state()


def train_loop(run: Run, after_call: Callable[[], None] = lambda: None) -> None:
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
    stage_ends = {phase.end_step for phase in run.parts.phases}
    run.saved_at = time.monotonic()
    staleness = []  # of asynchronous updates since the last log line
    if run.unfinished:
        _finish_step(run, rhythm, board, metrics_file)

    while run.step < run.last_step and not run.watchdog.stopped_by:
        # Train.
        run.background.check()
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
        waited = metrics.pop("input_wait_secs")
        stopwatch.add(step - run.step, time.monotonic() - started, waited)
        if step in stage_ends:
            stopwatch.begin_phase()
        run.step = step
        record = {"step": step, "epoch": step * config.images_per_step / num_examples}
        run.unfinished = record

        # Write.
        if rhythm.logs(step):
            lap = stopwatch.lap()
            if lap:
                metrics["images_per_sec"] = lap.steps_per_sec * config.images_per_step
                metrics["input_wait_percent"] = lap.input_wait_percent
            if staleness:
                metrics["staleness_mean"] = np.mean(staleness)
                metrics["staleness_max"] = np.max(staleness)
                board.histograms(step, {"updates": staleness}, "staleness")
                staleness.clear()
            record |= metrics
            speed, start_secs = lap and lap.steps_per_sec, stopwatch.last_start_secs
            say(log_line(record, run.last_step, speed, start_secs))
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
        after_call()


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
        progress = [0, "evaluating"]  # each batch counts as a step
        counts = run.watchdog.run(
            lambda use=use_averages, progress=progress: accuracy(
                run.strategy, _counted(stream, progress), use
            ),
            progress=lambda progress=progress: tuple(progress),
            interruptible=("evaluating",),
        )
        suffix = "_averaged" if use_averages else ""
        record |= record_of(counts, split, suffix)
        record[f"{split}_loss{suffix}"] = counts["loss"]
    board.scalars(run.step, record)
    raw = f"{record[f'{split}_accuracy']:.4f}"
    averaged = f" ({counts['accuracy']:.4f} averaged)" if len(averages) > 1 else ""
    tta = tta_remark(counts, run.config)
    say(f"step {run.step}: {split} accuracy {raw}{averaged}{tta}")
    if split == "test":
        return record, False
    is_best = run.best is None or counts["accuracy"] > run.best["accuracy"]
    if is_best:
        run.best = {"step": run.step, "accuracy": counts["accuracy"]}
    return record, is_best


def _counted(batches, progress):
    for batch in batches:
        yield batch
        progress[0] += 1


def _params(state):
    prefix = "params/"
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
