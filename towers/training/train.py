"""Training: open the run, build, restore, then train to the end."""

import contextlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from towers import console
from towers.build import assembly
from towers.build.builder import with_given
from towers.callbacks import Callbacks
from towers.callbacks import validate as validate_callbacks
from towers.cluster.agreement import LOCK_SECS
from towers.cluster.spec import Cluster
from towers.config import Config, to_json
from towers.config.metrics import title_of
from towers.data.sets.arrays import Data
from towers.messages import command_of_program, duration
from towers.metrics.results import headline
from towers.pretrained.hub import fetch, is_named
from towers.pretrained.standardization import with_options_of_weights
from towers.report.run_report import result_of_records, try_to_write
from towers.run.checkpoint import Checkpoint
from towers.run.folder import RunFolder
from towers.run.progress import Progress
from towers.run.restore import checkpointer_of
from towers.training.banner import print_banner
from towers.training.budget import chosen_by_trial
from towers.training.callback_list import CallbackError
from towers.training.display import Status, create_display
from towers.training.ending import (
    callbacks_at_the_end,
    how_to_continue,
    progress_text,
    report_run,
    saved_at_the_end,
)
from towers.training.linear_probe import fit_head
from towers.training.outputs import NoOutputs, Outputs
from towers.training.profile import Profile
from towers.training.restore import load_trainer, validate_changes
from towers.training.result import TrainResult, create_history
from towers.training.run import Run
from towers.training.setup import build_run, cluster_of, join_workers


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
    minutes: float = 0.0,
    largest_batch: bool = False,
) -> TrainResult:
    """Train a run to its end, from its last checkpoint or from the start.

    The same call continues a run that was interrupted. It may be made in any thread; in
    the main one Ctrl-C, SIGTERM and SIGHUP save first.

    Args:
        workdir: the run's folder; created if it is missing.
        config: the Config of the run.
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
        cluster: the workers of the run, including this process; by default the cluster
            that TF_CONFIG or Slurm describe, if any. The chief alone uses the folder.
        allow_public_address: whether workers may have public addresses; their server
            knows no passwords.
        origins: option -> the layer of a command that set it, for the start banner,
            which lists the others under "config", or as the trained weights'.
        progress: "live" for bars at the end of a terminal, "plain" for lines by the
            clock, "off" for none; "auto" is live if standard output is a terminal.
        profile_steps: the steps before and after a part of the run that is traced for
            TensorBoard's profile plugin.
        report: write a web page about the run at its end, `report/index.html`.
        callbacks: see `towers.callbacks`; only the chief calls them.
        minutes: a time budget in place of `config.num_epochs`, for a run of one
            process: steps are timed first, and `config` gets as many epochs as fit.
        largest_batch: replace `config.batch_size` by the largest that fits on the GPUs.

    Returns:
        The run's `path`, the last `step`, the `accuracy` of the last evaluation (None
        if there was none), the `state`, name -> array, the `history` of its metrics,
        name -> (steps, values), and the trained networks `model` and `model_ema`.

    Raises:
        TowersError: see `towers.errors`; what was saved stays.
    """
    # Open.
    callbacks = validate_callbacks(callbacks)
    if minutes or largest_batch:
        config = chosen_by_trial(
            workdir,
            config,
            minutes,
            largest_batch,
            overwrite=overwrite,
            model=model,
            data=data,
            class_names=class_names,
            cluster=cluster,
            allow_public_address=allow_public_address,
        )
    config, architecture = with_given(config, model, data, class_names)
    cluster = cluster_of(config, cluster, allow_public_address)
    is_chief = cluster is None or cluster.index == 0
    if not is_chief:  # the chief alone uses the folder, and prints
        progress, profile_steps, callbacks, report = "off", (), (), False
    folder, checkpoint = RunFolder(workdir), None
    outputs: Outputs = NoOutputs()
    profile = Profile(profile_steps, folder.tensorboard)
    with contextlib.ExitStack() as stack:
        if is_chief:
            outputs, checkpoint, overwrite = open_run(
                stack, folder, config, cluster, overwrite, allow_change
            )

        # Build.
        config = with_options_of_weights(config, checkpoint)
        devices = assembly.configure_devices(config)
        if is_chief:
            outputs.lock.describe(device=devices.kind)
        workers = join_workers(cluster, config, devices)
        parts, trainer = build_run(config, devices, checkpoint, allow_change, workers)
        if is_chief:
            print_banner(config, folder, devices, parts, trainer, origins)
        status = Status(
            parts.last_step,
            config.num_epochs,
            epochs_per_step=config.images_per_step / parts.num_examples,
        )
        display = create_display(progress, status)
        run = Run(config, folder, parts, trainer, outputs, display, callbacks)
        stack.enter_context(run.watchdog)
        stack.enter_context(outputs)

        # Restore.
        if is_chief:
            restore(run, checkpoint, overwrite, architecture)
        run.watchdog.call(run.start_from_chief)

        # Train, write, evaluate and save.
        if run.is_at_end and not run.progress.open_record:
            say_finished(run)
        else:
            try:
                with (
                    callbacks_at_the_end(run),
                    run.display,
                    saved_at_the_end(run, overwrite),
                    profile,
                ):
                    run.watchdog.call(loop, run, profile)
            except CallbackError as carrier:  # a generator cannot raise StopIteration
                raise carrier.error from carrier.error.__cause__
            finish(run, report)
        return TrainResult(
            path=folder.path,
            step=run.step,
            accuracy=run.progress.accuracy,
            state=trainer.state(),
            history=create_history(run.reports.records()),
            config=config,
            dataset_info=run.dataset_info,
        )


def loop(run: Run, profile: Profile) -> None:
    """Train, write, evaluate and save, to the last step or a signal."""
    run.begin()
    while not run.is_at_end:
        run.outputs.raise_error()
        run.callbacks.notify_checkpoints()
        until_trace = profile.steps_until_trace_event(run.step)
        num_steps, save_due, summary_due = run.plan_next_call(until_trace)
        if not num_steps:
            break
        profile.at(run.step)
        started = time.monotonic()
        with run.watchdog.training():
            metrics = run.trainer.train(num_steps)
        if not metrics:
            break
        ended = time.monotonic()
        num_taken = run.count(metrics, ended - started)
        profile.at(run.step)
        run.write(metrics, summary_due)
        run.evaluate_and_save(save_due)
        run.progress.stopwatch.add_pause(num_taken, time.monotonic() - ended)


def open_run(
    stack: contextlib.ExitStack,
    folder: RunFolder,
    config: Config,
    cluster: Cluster | None,
    overwrite: bool,
    allow_change: tuple[str, ...],
) -> tuple[Outputs, Checkpoint | None, bool]:
    """Lock a run's folder and read its checkpoint; a restart does not overwrite."""
    folder.validate_not_inside_data(config.teacher, config.dataset, config.data_dir)
    folder.create()
    lock = stack.enter_context(folder.lock(LOCK_SECS if cluster else 0.0))
    if overwrite and folder.is_restarted():
        console.line("a restart of the job that began it: the run continues")
        overwrite = False
    checkpointer = checkpointer_of(
        folder, keep=config.keep_checkpoints, assert_same_folder=lock.assert_same_folder
    )
    checkpointer.recover()
    checkpoint = None if overwrite else checkpointer.read()
    validate_changes(config, folder, checkpoint, allow_change)
    lock.assert_same_folder()
    folder.remove_leftovers()
    checkpointer.remove_leftovers()
    return Outputs(folder, lock, checkpointer), checkpoint, overwrite


def restore(
    run: Run, checkpoint: Checkpoint | None, overwrite: bool, architecture: str
) -> None:
    """Load the checkpoint, or initial values, and write what describes the run."""
    config, folder, reports = run.config, run.folder, run.reports
    new = load_trainer(run.trainer, config, checkpoint, run.parts.data.class_names)
    if checkpoint is not None:
        run.progress = Progress.from_json(checkpoint.run_state)
        run.outputs.saved_step = checkpoint.step
        console.line(f"restored step {run.step} from {checkpoint.path}")
    elif is_named(config.init_from):
        _, facts = fetch(config.init_from)
        console.line("weights: " + ", ".join(f"{k} {v}" for k, v in facts.items()))
        run.progress.weights = facts
    if config.linear_probe:
        options = config, new, run.watchdog.activity
        run.watchdog.call(fit_head, run.trainer, run.parts, *options)
    if overwrite:  # only now that everything else is known to be in order
        run.outputs.lock.assert_same_folder()
        for path in folder.clear():
            console.line(f"{path} stays: no run wrote it")
        folder.record_job()
    # A step whose record is not finished is evaluated and logged once more.
    reports.open_metrics(run.step - bool(run.progress.open_record), run.step)
    if architecture:
        folder.write_network(architecture)
    reports.file(folder.config, to_json(config))
    reports.file(folder.dataset_info, run.dataset_info.to_json())


def finish(run: Run, report: bool) -> None:
    """Print what the run has reached, and write its report."""
    split, say = run.parts.eval_split[0], run.outputs.say
    run.reports.on_board(lambda board: board.end(), split)
    say(f"done: {progress_text(run)} is saved in {run.folder.path}")
    if best := run.progress.best:
        figure = f"accuracy {best['accuracy']:.4f}"
        if best["best_by"] == "map":
            figure = f"mAP {best['score']:.4f}"
        loss = "not finite" if best["loss"] is None else f"{best['loss']:.4g}"
        say(f"best: step {best['step']}, validation {figure}, loss {loss}")
    if report:
        try_to_write(lambda: run.watchdog.call(report_run, run))
    result = result_of_records(run.reports.records())
    if name := result["reported"]:
        name, metric = headline(result)
        weights = name.replace("_ema", " of the EMA weights")
        weights = weights.replace(metric, title_of(metric)).replace("_", " ")
        secs = duration(run.progress.stopwatch.train_secs)
        place = f"at step {result['step']}, after {secs} in steps"
        say(f"result: {result[name]:.4f} {weights}, {place}")
        if warning := run.parts.data.inventory.inferred.get("warning"):
            say(f"warning: {warning}")
    folder = shlex.quote(os.fspath(run.folder.path))
    for name, rest in ("predict", "IMAGES"), ("export", "--format=saved_model"):
        say(f"{name}: {shlex.join(command_of_program(name))} --workdir={folder} {rest}")
    say(f"curves: tensorboard --logdir={folder}")


def say_finished(run: Run) -> None:
    """Print that no step is left, and how the run can go on."""
    is_early = run.is_out_of_patience and run.step < run.last_step
    hint = how_to_continue(run.config, run.step, run.parts.total_steps, is_early)
    reached = f"{run.folder.path} is finished: {progress_text(run)}"
    run.outputs.say(f"{reached}. {hint}; --overwrite starts again")
