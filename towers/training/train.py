"""Training: open the run, build, restore, then train to the end."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from towers import build, console
from towers.callbacks import Callbacks
from towers.callbacks import validate as validate_callbacks
from towers.cluster.cluster_spec import Cluster
from towers.config import FIELDS, Config, checks, non_defaults, to_json
from towers.data.files.paths import data_folder
from towers.data.sets.arrays import Data
from towers.evaluation.run_report import try_to_write
from towers.parallel.loop import CONSISTENT_ACTIVITIES, STARTING_ACTIVITIES
from towers.parallel.trainer import Trainer
from towers.reporting.display import Status, create_display
from towers.run.checkpoint import Checkpoint
from towers.run.checkpointer import Checkpointer
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.lock import Lock
from towers.run.peers import LOCK_SECS, cluster_of, join, start_from_chief
from towers.run.profile import Profile
from towers.run.reports import NoReports, Reports
from towers.run.restore import (
    checkpointer_of,
    load_values,
    open_metrics,
    validate_changes,
)
from towers.run.session import CallbackError, Session
from towers.run.watchdog import Watchdog
from towers.threads import Background
from towers.training.ending import (
    callbacks_at_the_end,
    how_to_continue,
    progress_text,
    report_run,
    saved_at_the_end,
)
from towers.training.linear_probe import fit_head
from towers.training.result import TrainResult, create_history
from towers.training.setup import (
    build_run,
    print_banner,
    with_given,
)
from towers.training.steps import train_steps

# In TensorBoard's table of hyperparameters, besides those that are not defaults.
HPARAMS = ("dataset", "model", "batch_size", "optimizer", "learning_rate", "num_epochs")


def train(
    workdir: str | os.PathLike,
    config: Config,
    *,
    model: Any = None,
    data: Data | None = None,
    class_names: Sequence[str | int] = (),
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
    progress: str = "auto",
    profile_steps: Sequence[int] = (),
    report: bool = True,
    callbacks: Callbacks = (),
    after_call: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """Trains a run to its end, from its last checkpoint or from the start: the same
    call continues a run that was interrupted.

    It may be called in any thread; in the main one Ctrl-C, SIGTERM and SIGHUP save
    first.

    Args:
        workdir: the run's folder; made where it is missing.
        config: of the run.
        model: a Keras model, Functional or Sequential, that is trained in place of
            `config.model`, beginning with its weights; the object itself does not
            change. The run's folder keeps its architecture.
        data: images and labels in place of `config.dataset`: (x, y), of which a tenth
            is held out for testing, ((x, y), (x_test, y_test)), or three pairs, the
            second for validation. x are images [n, height, width, channels] from 0 to
            255, y integers [n]; a `tf.data.Dataset` of known length may be in place of
            a pair, and is read into memory. (x, y, sample_weight) has factors [n] on
            the losses of training images, at least 0.
        class_names: of `data`, in the order of the labels.
        overwrite: start again; the files of an earlier run there are removed.
        allow_change: fields that may differ from the stored config although their
            change makes it another run.
        cluster: the workers of the run, of which this process is one; by default those
            that TF_CONFIG or Slurm describe, if any. The chief alone uses the folder.
        allow_public_address: whether workers may have public addresses; their server
            knows no passwords.
        origins: option -> the layer of a command that set it, for the start banner,
            which lists the others under "config".
        progress: "live" for bars at the end of a terminal, "plain" for lines by the
            clock, "off" for none; "auto" is live where standard output is a terminal.
        profile_steps: the steps before and after a part of the run that is traced for
            TensorBoard's profile plugin; a summary is printed.
        report: write a web page about the run at its end, `report/index.html`.
        callbacks: see `towers.callbacks`; only the chief calls them.
        after_call: called after each compiled call, when everything due is done.
        clock: seconds, from which what is due by the clock is known.

    Returns:
        The run's `path`, the last `step`, the `accuracy` of the last evaluation (None
        if there was none), the `state`, name -> array, the `history` of its metrics,
        name -> (steps, values), and the trained networks `model` and `model_ema`.

    Raises:
        TowersError: see `towers.errors`; what was saved stays.
    """
    checks.check_environment()
    callbacks = validate_callbacks(callbacks)
    config, architecture = with_given(config, model, data, class_names)
    cluster = cluster_of(config, cluster, allow_public_address)
    is_chief = cluster is None or cluster.index == 0
    folder = RunFolder(workdir)
    profile = Profile(profile_steps if is_chief else (), folder.tensorboard)
    with contextlib.ExitStack() as stack:
        # Of several workers the chief alone uses the folder.
        lock = checkpointer = checkpoint = None
        if is_chief:
            lock, checkpointer, checkpoint, overwrite = open_run(
                stack, folder, config, cluster, overwrite, allow_change
            )

        # Build.
        devices = build.configure_devices(config)
        if is_chief:
            lock.describe(device=devices.kind)
        workers = join(cluster, config, devices)
        parts, trainer = build_run(
            config, devices, workers, checkpoint=checkpoint, allow_change=allow_change
        )
        if is_chief:
            print_banner(config, folder, devices, parts, trainer, origins)
        session = create_session(
            stack,
            config,
            parts,
            trainer,
            progress,
            folder=folder,
            lock=lock,
            checkpointer=checkpointer,
            clock=clock,
            callbacks=callbacks if is_chief else (),
        )
        if is_chief:
            restore(session, parts, checkpoint, overwrite, architecture)
        session.watchdog.run(start_from_chief, session)

        # Train, write, evaluate and save.
        if session.is_at_end and not session.progress.open_record:
            say_finished(session, parts.total_steps)
        else:
            run_steps(session, parts, profile, overwrite, after_call)
            finish(session, parts, report)
        return TrainResult(
            path=folder.path,
            step=session.progress.step,
            accuracy=session.progress.accuracy,
            state=trainer.state(),
            history=create_history(session.reports.records()),
            config=config,
            dataset_info=session.dataset_info,
        )


def open_run(
    stack: contextlib.ExitStack,
    folder: RunFolder,
    config: Config,
    cluster: Cluster | None,
    overwrite: bool,
    allow_change: tuple[str, ...],
) -> tuple[Lock, Checkpointer, Checkpoint | None, bool]:
    """Locks the folder of a run, which `stack` ends, and reads its last checkpoint;
    None where the run starts again. The bool says whether it does."""
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
    return lock, checkpointer, checkpoint, overwrite


def create_session(
    stack: contextlib.ExitStack,
    config: Config,
    parts: build.Parts,
    trainer: Trainer,
    progress: str,
    *,
    folder: RunFolder,
    lock: Lock | None,
    **others: Any,
) -> Session:
    """The session of a run, with what watches it and reports about it, which `stack`
    ends; `others` are further attributes."""
    workers, reports = trainer.workers, NoReports()
    last_step = build.last_step_of(config, parts)
    epochs_per_step = config.images_per_step / parts.num_examples
    status = Status(last_step, config.num_epochs, epochs_per_step=epochs_per_step)
    display = create_display(progress if workers.is_chief else "off", status)
    watchdog = Watchdog(
        trainer,
        CONSISTENT_ACTIVITIES,
        starting=STARTING_ACTIVITIES,
        stuck_after_secs=config.stuck_after_secs,
        tick=display.tick,
    )
    stack.enter_context(watchdog)
    if workers.is_chief:
        reports = Reports(folder, "train", lock.assert_same_folder)
        stack.enter_context(reports)
    return Session(
        config=config,
        folder=folder,
        lock=lock,
        reports=reports,
        trainer=trainer,
        watchdog=watchdog,
        background=stack.enter_context(Background()),
        display=display,
        last_step=last_step,
        dataset_info=DatasetInfo.of(parts.data),
        workers=workers,
        **others,
    )


def restore(
    session: Session,
    parts: build.Parts,
    checkpoint: Checkpoint | None,
    overwrite: bool,
    architecture: str,
) -> None:
    """Loads the checkpoint, or the initial values, and writes what describes the run.

    Args:
        architecture: of a network that a Python program gives, in JSON, or empty.
    """
    folder, reports, watchdog = session.folder, session.reports, session.watchdog
    config, new = session.config, load_values(session, checkpoint)
    if config.linear_probe and new:
        activity = watchdog.activity
        watchdog.run(fit_head, session.trainer, parts, config, new, activity)
    if overwrite:  # only now that everything else is known to be in order
        session.lock.assert_same_folder()
        for path in folder.clear():
            console.line(f"{path} stays: no run wrote it")
        folder.note_job()
    open_metrics(session, checkpoint)
    if architecture:
        folder.write_network(architecture)
    reports.file(folder.config, to_json(config))
    reports.file(folder.dataset_info, session.dataset_info.to_json())


def run_steps(
    session: Session,
    parts: build.Parts,
    profile: Profile,
    overwrite: bool,
    after_call: Callable[[], None],
) -> None:
    """`train_steps` in another thread, which this one watches. The run is saved and
    the callbacks are notified, however it ends."""
    config, reports = session.config, session.reports
    hparams = [n for n in FIELDS if n in {*HPARAMS, *non_defaults(config)}]
    reports.begin(parts.eval_split[0], dataclasses.asdict(config), hparams)
    epoch = session.progress.step * config.images_per_step / parts.num_examples
    session.display.update(step=session.progress.step, epoch=epoch)
    try:
        with (
            callbacks_at_the_end(session),
            session.display,
            saved_at_the_end(session, overwrite),
        ):
            try:
                session.watchdog.run(train_steps, session, parts, profile, after_call)
            finally:
                profile.end(session.progress.step)
    except CallbackError as carrier:  # a generator cannot raise StopIteration
        raise carrier.__cause__ from carrier.__cause__.__cause__
    reports.end(parts.eval_split[0])


def finish(session: Session, parts: build.Parts, report: bool) -> None:
    """Says what the run has reached, and writes its report."""
    session.say(f"done: {progress_text(session)} is saved in {session.folder.path}")
    if best := session.progress.best:
        message = "best: step {step}, validation accuracy {accuracy:.4f}, loss "
        loss = "not finite" if best["loss"] is None else f"{best['loss']:.4g}"
        session.say(message.format(**best) + loss)
    if session.workers.is_chief and report:
        try_to_write(lambda: session.watchdog.run(report_run, session, parts))


def say_finished(session: Session, total_steps: int) -> None:
    """Says that no step is left, and how the run can go on."""
    hint = how_to_continue(session.config, session.progress.step, total_steps)
    if session.is_out_of_patience and session.progress.step < session.last_step:
        hint = "To continue raise --patience, or set it to 0"
    session.say(
        f"{session.folder.path} is finished: {progress_text(session)}. {hint}; "
        "--overwrite starts again"
    )
