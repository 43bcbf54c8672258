"""The loop of a training: train, write, evaluate and save until the last step."""

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers import build
from towers.data.batches import EvalBatches
from towers.evaluation import accuracies, accuracy_line, record_of
from towers.optim.epochs import num_images
from towers.run.cluster import agree_on_steps, check_copies_of_workers
from towers.run.log import log_line
from towers.run.periods import Periods
from towers.run.run import Run, save

# Target duration of one compiled call: signals and the clock are served between calls.
CALL_SECS = 2.0


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
        images_per_eval=num_images(config.eval_every_epochs, parts.num_examples),
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
        num_steps = min(
            periods.next_due(run.step) - run.step,
            run.last_step - run.step,
            config.steps_per_loop,
            stopwatch.steps_in(CALL_SECS),
        )
        overdue = time.monotonic() - run.saved_at > config.checkpoint_every_secs > 0
        num_steps, overdue = agree_on_steps(run, num_steps, overdue)
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
        _finish_step(run, parts, periods, overdue)
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
        gradients = run.trainer.gradients()
    run.reports.histograms(step, gradients, "gradients")
    run.reports.images(step, batch["images"], "next_batch")


def _finish_step(
    run: Run, parts: build.Parts, periods: Periods, overdue: bool = False
) -> None:
    """Evaluates and saves where it is due, and writes the record of the step."""
    record, is_best = dict(run.pending_record), False
    if periods.evaluates(run.step):
        evaluation, is_best = _evaluate(run, parts)
        record |= evaluation
    if record.keys() - {"step", "epoch"}:
        run.reports.record(record)
    run.pending_record = None
    saves = is_best or overdue or periods.saves(run.step)
    if saves or run.step == run.last_step:
        check_copies_of_workers(run)
    if saves:
        save(run)


def _evaluate(run: Run, parts: build.Parts) -> tuple[dict[str, float], bool]:
    """The accuracy of the parameters and of their moving averages, as record entries,
    and whether it is the best yet.

    The moving averages decide, where the run keeps them; and only images held out of
    the training set may decide which step is best.
    """
    split, source = parts.eval_split
    batches = EvalBatches(source, parts.augment, run.config.batch_size, parts.part)
    if run.eval_feed is None:
        run.eval_feed = build.create_eval_feed(batches, run.trainer)
    kinds = (False, True) if run.config.ema_decay else (False,)
    with run.watchdog.activity("evaluating") as beat:
        evaluations = accuracies(
            run.trainer.evaluate(run.eval_feed, len(batches), kinds, beat)
        )
    record = record_of(evaluations, split)
    run.reports.scalars(run.step, record)
    run.say(accuracy_line(run.step, evaluations, split, run.config))
    run.accuracy = evaluations[max(evaluations)]["accuracy"]
    if split == "test":
        return record, False
    is_best = run.best is None or run.accuracy > run.best["accuracy"]
    if is_best:
        run.best = {"step": run.step, "accuracy": run.accuracy}
    return record, is_best
