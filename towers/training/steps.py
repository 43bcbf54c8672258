"""The steps of a training: train, write, evaluate and save until it is done."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from towers import build
from towers.data.batches import EvalBatches
from towers.evaluation.label_sets import thresholds_json
from towers.evaluation.predictions import LabelSets, worst_mistakes
from towers.evaluation.report import accuracies, accuracy_line, record_of
from towers.evaluation.restored import evaluated_weights
from towers.reporting.board import MOST_IMAGES, batch_picture, mistakes_picture
from towers.run.peers import agree_on_steps, validate_copies
from towers.run.periods import Periods
from towers.run.profile import Profile
from towers.run.progress import as_lists, is_better
from towers.run.session import (
    Session,
    call,
    call_of_checkpoints,
    save,
    scale_rate,
)
from towers.run.stopwatch import Lap

# Target duration of one compiled call: signals and the clock are served between calls.
CALL_SECS = 2.0


def train_steps(
    session: Session,
    parts: build.Parts,
    profile: Profile,
    after_call: Callable[[], None],
) -> None:
    """From the step that a run has reached to its last, or until a signal."""
    config, trainer, stopwatch = (
        session.config,
        session.trainer,
        session.progress.stopwatch,
    )
    periods = build.create_periods(config, parts)
    phase_ends = {phase.end_step for phase in parts.phases}
    session.saved_at = session.summarized_at = session.clock()
    staleness = []  # of asynchronous updates since the last log line
    options = dataclasses.asdict(config)
    call(session, "on_start", session.folder.path, options, session.progress.step)
    if session.progress.open_record:
        session.saved_step = -1  # its checkpoint lacks the evaluation
        _evaluate_and_save(session, parts, periods)

    while not session.is_at_end:
        session.background.raise_job_error()
        call_of_checkpoints(session)
        num_steps = min(
            1 if session.summarized_params else config.steps_per_loop,
            periods.next_due(session.progress.step) - session.progress.step,
            session.last_step - session.progress.step,
            stopwatch.steps_in(CALL_SECS),
            profile.steps_to_border(session.progress.step),
        )
        num_steps, save_due, summary_due = agree_on_steps(session, num_steps)
        if not num_steps:
            break

        # Train.
        profile.at(session.progress.step)
        started = time.monotonic()
        with session.watchdog.training():
            metrics = trainer.train(num_steps)
        if not metrics:
            break
        ended, step = time.monotonic(), metrics.pop("step")
        num_steps, before = step - session.progress.step, session.progress.step
        staleness.extend(metrics.pop("staleness", ()))
        stopwatch.add(num_steps, ended - started, metrics.pop("input_wait_secs"))
        if step in phase_ends:
            stopwatch.begin_phase()
        epoch = before * config.images_per_step // parts.num_examples
        session.progress.means.add(epoch, metrics.pop("sums"))
        session.progress.step = step
        profile.at(step)
        # A checkpoint stores it, so that a step is evaluated even after a preemption.
        epoch = step * config.images_per_step / parts.num_examples
        session.progress.open_record = {"step": step, "epoch": epoch}
        _show(session, metrics, periods)

        # Write.
        if session.summarized_params:
            log_update(session)
        if summary_due or periods.logs(step):
            _log(session, metrics, staleness)
        if summary_due or periods.summarizes(step):
            summarize(session, parts)

        # Evaluate and save.
        _evaluate_and_save(session, parts, periods, save_due)
        stopwatch.add_pause(num_steps, time.monotonic() - ended)
        after_call()


def _show(session: Session, metrics: dict[str, Any], periods: Periods) -> None:
    """Gives the display what is known after a call."""
    step, last_step, stopwatch = (
        session.progress.step,
        session.last_step,
        session.progress.stopwatch,
    )
    evaluations = periods.num_evaluations(step - 1, last_step)
    means = session.progress.means.means(session.config.images_per_step)
    loss, accuracy = means or (None, None)
    session.display.update(
        step=step,
        epoch=session.progress.open_record["epoch"],
        loss=loss,
        accuracy=accuracy,
        learning_rate=metrics["learning_rate"],
        skipped_steps=metrics.get("skipped_steps", 0),
        secs_left=stopwatch.secs_left(last_step - step, evaluations),
        **_speed(session, stopwatch.speed()),
    )


def _speed(session: Session, lap: Lap | None) -> dict[str, float]:
    """Figures of a lap; none before there is one."""
    if lap is None:
        return {}
    images_per_sec = lap.steps_per_sec * session.config.images_per_step
    return {
        "images_per_sec": images_per_sec,
        "input_wait_percent": lap.input_wait_percent,
    }


def _log(session: Session, metrics: dict[str, Any], staleness: list[int]) -> None:
    """The curves of a step, whose metrics join its record."""
    metrics |= _speed(session, session.progress.stopwatch.lap())
    if staleness:
        metrics["staleness_mean"] = np.mean(staleness)
        metrics["staleness_max"] = np.max(staleness)
        session.reports.histograms(
            session.progress.step, {"updates": staleness}, "staleness"
        )
        staleness.clear()
    session.progress.open_record |= metrics
    session.reports.scalars(session.progress.step, metrics)


def _evaluate_and_save(
    session: Session, parts: build.Parts, periods: Periods, save_due: bool = False
) -> None:
    """Evaluates and saves where it is due, and writes the record of the step."""
    is_best = periods.evaluates(session.progress.step) and _evaluate(session, parts)
    record = session.progress.open_record
    if is_of_interest := record.keys() - {"step", "epoch"}:
        session.reports.record(record)
    session.progress.open_record = None  # before what may raise: it is counted
    if is_of_interest:
        metrics = as_lists(record)
        call(session, "on_log", metrics.pop("step"), metrics)
    save_due = save_due or is_best or periods.saves(session.progress.step)
    if save_due or session.is_at_end:
        validate_copies(session)
    if save_due:
        save(session)


def _epoch_of_evaluation(session: Session, parts: build.Parts) -> float:
    """The epoch that an evaluation is named by: a multiple of their period, although of
    the last batch some images are of the next epoch; else as far as the run is."""
    config, epoch = session.config, session.progress.open_record["epoch"]
    every = config.eval_every_epochs
    multiple = math.floor(epoch / every + 1e-9) * every
    if epoch - multiple < config.images_per_step / parts.num_examples:
        epoch = multiple
    return round(min(epoch, config.num_epochs), 3)


def _evaluate(session: Session, parts: build.Parts) -> bool:
    """Evaluates, and returns whether the step is the best so far.

    A run reports the accuracy of the EMA weights, where it keeps them; and only
    images held out of the training set may decide which step is best.
    """
    split, source = parts.eval_split
    batches = EvalBatches(source, parts.augment, session.config.batch_size, parts.share)
    if session.eval_feed is None:
        session.eval_feed = build.create_eval_feed(batches, session.trainer)
    weights = evaluated_weights(session.config)
    started = time.monotonic()
    with session.watchdog.activity("evaluating") as heartbeat:
        counts = session.trainer.evaluate(
            session.eval_feed, len(batches), weights, heartbeat
        )
    evaluation = counts.map(accuracies)
    session.progress.stopwatch.add_evaluation(time.monotonic() - started)
    record = record_of(evaluation, split)
    if means := session.progress.means.means(session.config.images_per_step):
        record["epoch_loss"], record["epoch_accuracy"] = means
    session.progress.open_record |= record
    report_evaluation(session, parts, record, evaluation.reported["predictions"])
    epoch = _epoch_of_evaluation(session, parts)
    session.say(accuracy_line(f"epoch {epoch:g}", evaluation, split, session.config))
    call(session, "on_evaluation", session.progress.step, as_lists(record))
    accuracy, loss = (evaluation.reported[name] for name in ("accuracy", "loss"))
    session.progress.accuracy = accuracy
    session.evaluated = session.progress.step, evaluation
    if split != "validation":
        return False
    loss = loss if abs(loss) < 2**63 else None
    result = {"step": session.progress.step, "accuracy": accuracy, "loss": loss}
    if not is_better(result, session.progress.best, session.config.best_by):
        session.progress.num_worse += 1
        by_accuracy = session.config.choice_of("schedule").by_accuracy
        if (
            by_accuracy
            and session.progress.num_worse % session.config.plateau_patience == 0
        ):
            session.progress.num_plateaus += 1
            scale_rate(session.trainer, session.config, session.progress.num_plateaus)
        return False
    session.progress.best = result
    session.progress.num_worse = 0
    predictions = evaluation.reported["predictions"]
    if isinstance(predictions, LabelSets):
        thresholds = thresholds_json(predictions, parts.data.class_names)
        session.reports.file(session.folder.thresholds, thresholds)
    return True


# What TensorBoard gets besides curves.


def summarize(session: Session, parts: build.Parts) -> None:
    """Histograms of the parameters and gradients, and the images of the next step."""
    state = session.trainer.state().items()
    params = {k.removeprefix("params/"): v for k, v in state if k.startswith("params/")}
    session.reports.histograms(session.progress.step, params, "params")
    with session.watchdog.activity("waiting for data"):
        batch = parts.train_batches(tf.constant(session.progress.step, tf.int64))
    with session.watchdog.activity("computing gradients for the summary"):
        gradients = session.trainer.gradients()
    session.reports.histograms(session.progress.step, gradients, "gradients")
    session.reports.picture(
        session.progress.step,
        "training_batch",
        lambda: batch_picture(
            batch["images"].numpy(), batch["labels"].numpy(), parts.data.class_names
        ),
        "Augmented images of the next step; each is stretched to the whole range",
    )
    session.summarized_at, session.summarized_params = session.clock(), params


def log_update(session: Session) -> None:
    """The length of the step after a summary."""
    before, session.summarized_params = session.summarized_params, None
    state = session.trainer.state()
    update, norm = 0.0, 0.0
    for name, values in before.items():
        values = values.astype(np.float64)
        update += np.sum((state[f"params/{name}"] - values) ** 2)
        norm += np.sum(values**2)
    if norm:
        ratio = np.sqrt(update / norm)
        session.reports.scalars(session.progress.step, {"update_ratio": ratio})


def report_evaluation(
    session: Session, parts: build.Parts, record: dict[str, Any], predictions
) -> None:
    """Curves and the worst mistakes."""
    split, source = parts.eval_split
    reports, names = session.reports, parts.data.class_names
    values = {k.removeprefix(f"{split}_"): v for k, v in record.items()}
    reports.scalars(session.progress.step, values, split)

    def draw_mistakes():
        images, _ = source.read(tf.constant(worst, tf.int64))
        texts = [predictions.texts(index, names) for index in worst]
        return mistakes_picture(images.numpy(), texts)

    worst = worst_mistakes(predictions, MOST_IMAGES)
    if len(worst):
        about = "The mistakes with the largest loss"
        reports.picture(session.progress.step, "mistakes", draw_mistakes, about, split)
