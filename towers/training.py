"""Training: build, restore, then train, write, evaluate and save until it is done."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from towers import build
from towers.config import Config, checks, to_json
from towers.config.cluster import Cluster
from towers.data.batches import evaluation_stream
from towers.errors import (
    CheckpointError,
    Preempted,
    RunFolderError,
    StuckError,
    WorkerLostError,
    data_errors_of_tensorflow,
)
from towers.evaluation import accuracy, record_of, tta_remark
from towers.parallel import devices as parallel_devices
from towers.parallel.memory import check_budget
from towers.parallel.trainer import CONSISTENT_ACTIVITIES
from towers.run import checkpoints
from towers.run.background import Background
from towers.run.banner import start_banner
from towers.run.cluster import (
    agree_on_steps,
    check_copies_of_workers,
    check_data,
    cluster_of,
    how_far,
    join,
    start_from_chief,
    wait_for_chief,
)
from towers.run.folder import RunFolder
from towers.run.log import log_line, say
from towers.run.periods import Periods
from towers.run.reports import NoReports, Reports
from towers.run.restore import check_changes, newest_checkpoint, restore
from towers.run.run import (
    Run,
    TrainResult,
    is_between_steps,
    save,
    save_and_wait,
    saved_aside,
    try_to_save,
)
from towers.run.watchdog import Watchdog

# Target duration of one compiled call: signals and the clock are served between calls.
CALL_SECS = 2.0


def train(
    workdir: str | os.PathLike,
    config: Config,
    *,
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    after_call: Callable[[], None] = lambda: None,
) -> TrainResult:
    """Trains a run to its end, from its last checkpoint or from the start.

    Args:
        workdir: the run's folder; made where it is missing.
        config: of the run.
        overwrite: start again; the files of an earlier run there are removed.
        allow_change: fields that may differ from the stored config although their
            change makes it another run.
        cluster: the workers of the run, of which this process is one; by default those
            of TF_CONFIG or Slurm, if any. The chief alone uses the run's folder.
        allow_public_address: whether anybody may be able to reach the workers.
        after_call: called after each compiled call, when everything due is done.

    Raises:
        TowersError: see `towers.errors`; what was saved stays as it is.
    """
    checks.check_environment()
    cluster = cluster_of(config, cluster, allow_public_address)
    is_chief = cluster is None or cluster.index == 0
    folder, lock, checkpoint = RunFolder(workdir), None, None
    with contextlib.ExitStack() as stack:
        if is_chief:
            folder.create()
            lock = stack.enter_context(folder.lock())
            checkpoint = None if overwrite else newest_checkpoint(folder)
            check_changes(config, folder, checkpoint, allow_change)
            lock.check()
            folder.remove_leftovers()
            checkpoints.remove_leftovers(folder.checkpoints, say)

        # Build.
        devices = parallel_devices.configure(
            config.device,
            config.num_towers,
            config.device_order,
            config.device_memory_mb,
        )
        if config.deterministic:
            parallel_devices.enable_determinism()
        if lock:
            lock.describe(device=devices.kind)
        workers = join(cluster, config, devices)
        stack.enter_context(workers.noticing_losses())
        part = build.part_of(config, devices, workers)
        parts = build.build(config, part=part)
        check_data(workers, parts.data, parts.num_examples)
        trainer = build.create_trainer(config, parts, devices, workers)
        if config.device_memory_mb:
            check_budget(trainer.memory(), config.device_memory_mb)
        if is_chief:
            for line in start_banner(
                config,
                folder,
                devices,
                trainer,
                data=parts.data,
                image_shape=parts.augment.image_shape,
                model=parts.model,
                phases=parts.phases,
                num_examples=parts.num_examples,
                total_steps=parts.total_steps,
            ):
                say(line)
        watchdog = Watchdog(
            trainer,
            CONSISTENT_ACTIVITIES,
            stuck_after_secs=config.stuck_after_secs,
            say=say,
        )
        stack.enter_context(watchdog)
        reports = NoReports()
        if is_chief:
            reports = stack.enter_context(Reports(folder, "train", say, lock.check))
        background = stack.enter_context(Background(say))
        last_step = min(config.max_steps or parts.total_steps, parts.total_steps)
        run = Run(
            config,
            folder,
            lock,
            reports,
            trainer,
            watchdog,
            background,
            last_step,
            workers,
        )

        # Restore.
        if overwrite and is_chief:  # only now that all else is known to be in order
            lock.check()
            folder.clear()
        restore(run, checkpoint)
        start_from_chief(run)
        reports.file(folder.config, to_json(config))

        # Train.
        if run.step < last_step or run.pending_record:
            _train_and_save(run, parts, after_call, overwrite)
            run.say(f"done: step {run.step} of {last_step} is saved in {folder.path}")
        else:
            run.say(
                f"{folder.path} is finished: step {run.step} of {last_step}. Raise "
                "--max_steps or --num_epochs to continue; --overwrite starts again"
            )
        return TrainResult(folder.path, run.step, run.accuracy, trainer.state())


def _train_and_save(
    run: Run, parts: build.Parts, after_call: Callable[[], None], overwrite: bool
) -> None:
    """Trains in a worker thread, which this one watches, and saves.

    Raises:
        Preempted: a signal came before the end; what was trained is saved.
        RunFolderError: the run's folder is gone; the state is saved beside it.
        StuckError: a step, or a save, did not end.
    """
    watchdog = run.watchdog
    try:
        try:
            with data_errors_of_tensorflow():
                watchdog.run(train_loop, run, parts, after_call)
        except Preempted:
            pass  # an activity was abandoned; the state is that of a finished step
        watchdog.run(save_and_wait, run)
        wait_for_chief(run)
    except RunFolderError as error:
        raise watchdog.run(saved_aside, run, error) from None
    except (CheckpointError, StuckError):
        raise
    except WorkerLostError as error:
        watchdog.run(try_to_save, run)
        raise WorkerLostError(f"{error}; {how_far(run)}") from None
    except Exception:
        if is_between_steps(run.trainer):
            try:
                watchdog.run(try_to_save, run)
            except StuckError as stuck:
                say(str(stuck))
        raise
    stopped = run.stopped or watchdog.stop_requested
    if stopped and (run.step < run.last_step or run.pending_record):
        signal = watchdog.stopped_by or "a signal to another worker"
        saved = f"step {run.step} of {run.last_step} is saved in {run.folder.path}"
        raise Preempted(
            f"stopped by {signal}: {saved if run.step else 'no step was taken'}; the "
            f"same command {'without --overwrite ' if overwrite else ''}continues"
        )


def train_loop(
    run: Run, parts: build.Parts, after_call: Callable[[], None] = lambda: None
) -> None:
    """From the step that the run has reached to its last, or until a signal."""
    config, trainer, watchdog = run.config, run.trainer, run.watchdog
    stopwatch = run.stopwatch
    periods = Periods(
        total_steps=parts.total_steps,
        images_per_step=config.images_per_step,
        log_every_steps=config.log_every_steps,
        summary_every_steps=config.summary_every_steps,
        checkpoint_every_steps=config.checkpoint_every_steps,
        images_per_eval=config.eval_every_epochs * parts.num_examples,
    )
    reports = run.reports
    phase_ends = {phase.end_step for phase in parts.phases}
    run.saved_at = time.monotonic()
    staleness = []  # of asynchronous updates since the last log line
    if run.pending_record:
        _finish_step(run, parts, periods)

    while run.step < run.last_step:
        run.background.check()
        if run.lock:
            run.lock.check()
        num_steps = agree_on_steps(
            run,
            min(
                periods.next_due(run.step) - run.step,
                run.last_step - run.step,
                config.steps_per_loop,
                stopwatch.steps_in(CALL_SECS),
            ),
        )
        if not num_steps:
            break
        started = time.monotonic()
        with watchdog.training():
            metrics = trainer.train(num_steps)
        if not metrics:
            break
        step = metrics.pop("step")
        staleness.extend(metrics.pop("staleness", ()))
        waited = metrics.pop("input_wait_secs")
        stopwatch.add(step - run.step, time.monotonic() - started, waited)
        if step in phase_ends:
            stopwatch.begin_phase()
        run.step = step
        epoch = step * config.images_per_step / parts.num_examples
        # A checkpoint stores it, so that a step is evaluated even after a preemption.
        run.pending_record = {"step": step, "epoch": epoch}

        # Write.
        if periods.logs(step):
            lap = stopwatch.lap()
            if lap:
                metrics["images_per_sec"] = lap.steps_per_sec * config.images_per_step
                metrics["input_wait_percent"] = lap.input_wait_percent
            if staleness:
                metrics["staleness_mean"] = np.mean(staleness)
                metrics["staleness_max"] = np.max(staleness)
                reports.histograms(step, {"updates": staleness}, "staleness")
                staleness.clear()
            run.pending_record |= metrics
            steps_per_sec = lap.steps_per_sec if lap else None
            start_secs = stopwatch.last_start_secs
            run.say(
                log_line(run.pending_record, run.last_step, steps_per_sec, start_secs)
            )
            reports.scalars(step, metrics)
        if periods.summarizes(step):
            _summarize(run, parts)

        # Evaluate and save.
        _finish_step(run, parts, periods)
        after_call()


def _summarize(run: Run, parts: build.Parts) -> None:
    """Histograms of the parameters and gradients, and the images of the next step."""
    step, prefix = run.step, "params/"
    params = {
        name.removeprefix(prefix): value
        for name, value in run.trainer.state().items()
        if name.startswith(prefix)
    }
    run.reports.histograms(step, params, "params")
    with run.watchdog.activity("waiting for data"):
        batch = parts.train_batches(tf.constant(np.array(step, np.int64)))
    with run.watchdog.activity("computing gradients for the summary"):
        gradients = run.trainer.gradients(batch)
    run.reports.histograms(step, gradients, "gradients")
    run.reports.images(step, batch["images"], "next_batch")


def _finish_step(run: Run, parts: build.Parts, periods: Periods) -> None:
    """Evaluates and saves where it is due, and writes the record of the step."""
    record, is_best = dict(run.pending_record), False
    if periods.evaluates(run.step):
        evaluation, is_best = _evaluate(run, parts)
        record |= evaluation
    if record.keys() - {"step", "epoch"}:
        run.reports.record(record)
    run.pending_record = None
    if periods.saves(run.step):
        check_copies_of_workers(run)
    every_secs = run.config.checkpoint_every_secs
    overdue = time.monotonic() - run.saved_at > every_secs > 0
    if is_best or overdue or periods.saves(run.step):
        save(run)


def _evaluate(run: Run, parts: build.Parts) -> tuple[dict[str, float], bool]:
    """Raw and averaged accuracy, as record entries, and whether it is the best yet.

    Only images held out of the training set may decide which step is best.
    """
    split, source = parts.eval_split
    if run.eval_batches is None:
        run.eval_batches = evaluation_stream(
            source, parts.augment, run.config.batch_size, parts.part
        )
    record, averages = {}, [False, True] if run.config.ema_decay else [False]
    for use_averages in averages:
        with run.watchdog.activity("evaluating") as beat:
            counts = accuracy(
                run.trainer, _with_beats(run.eval_batches, beat), use_averages
            )
        suffix = "_averaged" if use_averages else ""
        record |= record_of(counts, split, suffix)
        record[f"{split}_loss{suffix}"] = counts["loss"]
    run.reports.scalars(run.step, record)
    raw = f"{record[f'{split}_accuracy']:.4f}"
    averaged = f" ({counts['accuracy']:.4f} averaged)" if len(averages) > 1 else ""
    tta = tta_remark(counts, run.config)
    run.say(f"step {run.step}: {split} accuracy {raw}{averaged}{tta}")
    run.accuracy = counts["accuracy"]
    if split == "test":
        return record, False
    is_best = run.best is None or run.accuracy > run.best["accuracy"]
    if is_best:
        run.best = {"step": run.step, "accuracy": run.accuracy}
    return record, is_best


def _with_beats(batches: Iterable, beat: Callable[[], None]) -> Iterator:
    """The batches; each one that was evaluated counts as progress."""
    for batch in batches:
        yield batch
        beat()
