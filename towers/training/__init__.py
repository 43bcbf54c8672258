"""Training: build, restore, then train, write, evaluate and save until it is done."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from towers import build, console
from towers.callbacks import validate as validate_callbacks
from towers.config import FIELDS, Config, checks, non_defaults, to_json
from towers.data.batches import EvalBatches
from towers.data.paths import data_folder
from towers.evaluation import accuracies, accuracy_line, record_of
from towers.evaluation.restored import evaluated_weights
from towers.evaluation.run_report import try_to_write
from towers.parallel.loop import CONSISTENT_ACTIVITIES, STARTING_ACTIVITIES
from towers.run.background import Background
from towers.run.cluster_spec import Cluster
from towers.run.dataset_info import DatasetInfo
from towers.run.display import Status, create_display
from towers.run.folder import RunFolder
from towers.run.peers import (
    LOCK_SECS,
    agree_on_steps,
    cluster_of,
    join,
    start_from_chief,
    validate_copies,
)
from towers.run.periods import Periods
from towers.run.profile import Profile
from towers.run.reports import NoReports, Reports
from towers.run.restore import (
    checkpointer_of,
    load_values,
    open_metrics,
    validate_changes,
)
from towers.run.session import (
    CallbackError,
    Session,
    as_lists,
    call,
    call_of_checkpoints,
    is_better,
    save,
    scale_rate,
)
from towers.run.stopwatch import Lap
from towers.run.watchdog import Watchdog
from towers.training.ending import (
    callbacks_at_the_end,
    how_to_continue,
    report_run,
    saved_at_the_end,
    standing,
)
from towers.training.linear_probe import fit_head
from towers.training.result import TrainResult, create_history
from towers.training.setup import (
    configure_devices,
    create_trainer,
    print_banner,
    with_given,
)
from towers.training.summaries import log_update, report_evaluation, summarize

# Target duration of one compiled call: signals and the clock are served between calls.
CALL_SECS = 2.0

# In TensorBoard's table of hyperparameters, besides those that are not defaults.
HPARAMS = ("dataset", "model", "batch_size", "optimizer", "learning_rate", "num_epochs")


def train(
    workdir: str | os.PathLike,
    config: Config,
    *,
    model: Any = None,
    data: Any = None,
    class_names: Sequence[str | int] = (),
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
    progress: str = "auto",
    profile_steps: Sequence[int] = (),
    report: bool = True,
    callbacks: Any = (),
    after_call: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """See `towers.train`.

    Args:
        after_call: called after each compiled call, when everything due is done.
        clock: seconds, from which what is due by the clock is known.
    """
    checks.check_environment()
    callbacks = validate_callbacks(callbacks)
    config, architecture = with_given(config, model, data, class_names)
    cluster = cluster_of(config, cluster, allow_public_address)
    is_chief = cluster is None or cluster.index == 0
    folder = RunFolder(workdir)
    profile = Profile(profile_steps if is_chief else (), folder.tensorboard)
    lock = checkpointer = checkpoint = None
    with contextlib.ExitStack() as stack:
        # Folder. Of several workers the chief alone uses it.
        if is_chief:
            folder.validate_teacher(config.teacher)
            if config.dataset == "image_folder":
                folder.validate_outside_of(data_folder(config.data_dir))
            folder.create()
            lock = stack.enter_context(folder.lock(LOCK_SECS if cluster else 0.0))
            if overwrite and folder.is_restarted():
                console.line("a restart of the job that began it: the run continues")
                overwrite = False
            checkpointer = checkpointer_of(
                folder,
                keep=config.keep_checkpoints,
                assert_same_folder=lock.assert_same_folder,
            )
            checkpointer.recover()
            checkpoint = None if overwrite else checkpointer.restore()
            validate_changes(config, folder, checkpoint, allow_change)
            lock.assert_same_folder()
            folder.remove_leftovers()
            checkpointer.remove_leftovers()

        # Build.
        devices = configure_devices(config)
        if is_chief:
            lock.describe(device=devices.kind)
        workers = join(cluster, config, devices)
        parts, trainer = create_trainer(
            config, devices, workers, checkpoint=checkpoint, allow_change=allow_change
        )
        if is_chief:
            print_banner(config, folder, devices, parts, trainer, origins)
        last_step = build.last_step_of(config, parts)
        status = Status(
            last_step,
            config.num_epochs,
            epochs_per_step=config.images_per_step / parts.num_examples,
        )
        display = create_display(progress if is_chief else "off", status)
        watchdog = Watchdog(
            trainer,
            CONSISTENT_ACTIVITIES,
            starting=STARTING_ACTIVITIES,
            stuck_after_secs=config.stuck_after_secs,
            tick=display.tick,
        )
        stack.enter_context(watchdog)
        reports = NoReports()
        if is_chief:
            reports = Reports(folder, "train", lock.assert_same_folder)
            stack.enter_context(reports)
        session = Session(
            config,
            folder,
            lock,
            checkpointer,
            reports,
            trainer,
            watchdog,
            stack.enter_context(Background()),
            display,
            last_step,
            DatasetInfo.of(parts.data),
            workers,
            clock,
            callbacks=callbacks if is_chief else (),
        )

        # Restore.
        if is_chief:
            new = load_values(session, checkpoint)
            if config.linear_probe and new:
                watchdog.run(fit_head, trainer, parts, config, new, watchdog.activity)
            if overwrite:  # only now that everything else is known to be in order
                lock.assert_same_folder()
                for path in folder.clear():
                    console.line(f"{path} stays: no run wrote it")
                folder.note_job()
            open_metrics(session, checkpoint)
            if architecture:
                folder.write_network(architecture)
            reports.file(folder.config, to_json(config))
            reports.file(folder.dataset_info, session.dataset_info.to_json())
        watchdog.run(start_from_chief, session)

        # Train, write, evaluate and save: in another thread, which this one watches.
        if not session.is_at_end or session.open_record:
            hparams = [n for n in FIELDS if n in {*HPARAMS, *non_defaults(config)}]
            reports.begin(parts.eval_split[0], dataclasses.asdict(config), hparams)
            epoch = session.step * status.epochs_per_step
            display.update(step=session.step, epoch=epoch)
            try:
                with (
                    callbacks_at_the_end(session),
                    display,
                    saved_at_the_end(session, overwrite),
                ):
                    try:
                        watchdog.run(train_steps, session, parts, profile, after_call)
                    finally:
                        profile.end(session.step)
            except CallbackError as carrier:  # a generator cannot raise StopIteration
                raise carrier.__cause__ from carrier.__cause__.__cause__
            reports.end(parts.eval_split[0])
            session.say(f"done: {standing(session)} is saved in {folder.path}")
            if best := session.best:
                words = "best: step {step}, validation accuracy {accuracy:.4f}, loss "
                loss = "not finite" if best["loss"] is None else f"{best['loss']:.4g}"
                session.say(words.format(**best) + loss)
            if is_chief and report:
                try_to_write(lambda: watchdog.run(report_run, session, parts))
        else:
            way_on = how_to_continue(config, session.step, parts.total_steps)
            if session.is_out_of_patience and session.step < session.last_step:
                way_on = "To continue raise --patience, or set it to 0"
            session.say(
                f"{folder.path} is finished: {standing(session)}. {way_on}; "
                "--overwrite starts again"
            )
        return TrainResult(
            path=folder.path,
            step=session.step,
            accuracy=session.accuracy,
            state=trainer.state(),
            history=create_history(reports.records()),
            config=config,
            dataset_info=session.dataset_info,
        )


def train_steps(
    session: Session,
    parts: build.Parts,
    profile: Profile,
    after_call: Callable[[], None],
) -> None:
    """From the step that a run has reached to its last, or until a signal."""
    config, trainer, stopwatch = session.config, session.trainer, session.stopwatch
    periods = build.create_periods(config, parts)
    phase_ends = {phase.end_step for phase in parts.phases}
    session.saved_at = session.summarized_at = session.clock()
    staleness = []  # of asynchronous updates since the last log line
    options = dataclasses.asdict(config)
    call(session, "on_start", session.folder.path, options, session.step)
    if session.open_record:
        session.saved_step = -1  # its checkpoint lacks the evaluation
        _evaluate_and_save(session, parts, periods)

    while not session.is_at_end:
        session.background.raise_job_error()
        call_of_checkpoints(session)
        num_steps = min(
            1 if session.summarized_params else config.steps_per_loop,
            periods.next_due(session.step) - session.step,
            session.last_step - session.step,
            stopwatch.steps_in(CALL_SECS),
            profile.steps_to_border(session.step),
        )
        num_steps, save_due, summary_due = agree_on_steps(session, num_steps)
        if not num_steps:
            break

        # Train.
        profile.at(session.step)
        started = time.monotonic()
        with session.watchdog.training():
            metrics = trainer.train(num_steps)
        if not metrics:
            break
        ended, step = time.monotonic(), metrics.pop("step")
        num_steps, before = step - session.step, session.step
        staleness.extend(metrics.pop("staleness", ()))
        stopwatch.add(num_steps, ended - started, metrics.pop("input_wait_secs"))
        if step in phase_ends:
            stopwatch.begin_phase()
        epoch = before * config.images_per_step // parts.num_examples
        session.means.add(epoch, metrics.pop("sums"))
        session.step = step
        profile.at(step)
        # A checkpoint stores it, so that a step is evaluated even after a preemption.
        epoch = step * config.images_per_step / parts.num_examples
        session.open_record = {"step": step, "epoch": epoch}
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
    step, last_step, stopwatch = session.step, session.last_step, session.stopwatch
    evaluations = periods.num_evaluations(step - 1, last_step)
    means = session.means.means(session.config.images_per_step)
    loss, accuracy = means or (None, None)
    session.display.update(
        step=step,
        epoch=session.open_record["epoch"],
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
    metrics |= _speed(session, session.stopwatch.lap())
    if staleness:
        metrics["staleness_mean"] = np.mean(staleness)
        metrics["staleness_max"] = np.max(staleness)
        session.reports.histograms(session.step, {"updates": staleness}, "staleness")
        staleness.clear()
    session.open_record |= metrics
    session.reports.scalars(session.step, metrics)


def _evaluate_and_save(
    session: Session, parts: build.Parts, periods: Periods, save_due: bool = False
) -> None:
    """Evaluates and saves where it is due, and writes the record of the step."""
    is_best = periods.evaluates(session.step) and _evaluate(session, parts)
    record = session.open_record
    if is_of_interest := record.keys() - {"step", "epoch"}:
        session.reports.record(record)
    session.open_record = None  # before what may raise: it is counted
    if is_of_interest:
        metrics = as_lists(record)
        call(session, "on_log", metrics.pop("step"), metrics)
    save_due = save_due or is_best or periods.saves(session.step)
    if save_due or session.is_at_end:
        validate_copies(session)
    if save_due:
        save(session)


def _epoch_of_evaluation(session: Session, parts: build.Parts) -> float:
    """The epoch that an evaluation is named by: a multiple of their period, although of
    the last batch some images are of the next epoch; else as far as the run is."""
    config, epoch = session.config, session.open_record["epoch"]
    every = config.eval_every_epochs
    multiple = math.floor(epoch / every + 1e-9) * every
    if epoch - multiple < config.images_per_step / parts.num_examples:
        epoch = multiple
    return round(min(epoch, config.num_epochs), 3)


def _evaluate(session: Session, parts: build.Parts) -> bool:
    """Evaluates, and returns whether the step is the best so far.

    The accuracy of a run is that of the moving averages, where it keeps them; and only
    images held out of the training set may decide which step is best.
    """
    split, source = parts.eval_split
    batches = EvalBatches(source, parts.augment, session.config.batch_size, parts.part)
    if session.eval_feed is None:
        session.eval_feed = build.create_eval_feed(batches, session.trainer)
    weights = evaluated_weights(session.config)
    started = time.monotonic()
    with session.watchdog.activity("evaluating") as heartbeat:
        counts = session.trainer.evaluate(
            session.eval_feed, len(batches), weights, heartbeat
        )
    evaluation = counts.map(accuracies)
    session.stopwatch.add_evaluation(time.monotonic() - started)
    record = record_of(evaluation, split)
    if means := session.means.means(session.config.images_per_step):
        record["epoch_loss"], record["epoch_accuracy"] = means
    session.open_record |= record
    report_evaluation(session, parts, record, evaluation.reported["predictions"])
    epoch = _epoch_of_evaluation(session, parts)
    session.say(accuracy_line(f"epoch {epoch:g}", evaluation, split, session.config))
    call(session, "on_evaluation", session.step, as_lists(record))
    accuracy, loss = (evaluation.reported[name] for name in ("accuracy", "loss"))
    session.accuracy = accuracy
    session.evaluated = session.step, evaluation
    if split != "validation":
        return False
    loss = loss if abs(loss) < 2**63 else None
    result = {"step": session.step, "accuracy": accuracy, "loss": loss}
    if not is_better(result, session.best, session.config.best_by):
        session.num_worse += 1
        by_accuracy = session.config.choice_of("schedule").by_accuracy
        if by_accuracy and session.num_worse % session.config.plateau_patience == 0:
            session.num_plateaus += 1
            scale_rate(session.trainer, session.config, session.num_plateaus)
        return False
    session.best = result
    session.num_worse = 0
    return True
