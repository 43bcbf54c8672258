"""Training: build, restore, then train, write, evaluate and save until it is done."""

import contextlib
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from towers import build
from towers.config import Config, checks, to_json
from towers.config.cluster import Cluster
from towers.config.config import depends_on_length, length_is_free
from towers.errors import (
    CheckpointError,
    Preempted,
    RunFolderError,
    StuckError,
    WorkerLostError,
    data_errors_of_tensorflow,
)
from towers.output import say
from towers.parallel import devices as parallel_devices
from towers.parallel.loop import CONSISTENT_ACTIVITIES, STARTING_ACTIVITIES
from towers.run import checkpoints
from towers.run.background import Background
from towers.run.banner import start_banner
from towers.run.cluster import (
    LOCK_SECS,
    check_data,
    cluster_of,
    how_far,
    join,
    start_from_chief,
    wait_for_chief,
)
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.lock import Lock
from towers.run.reports import NoReports, Reports
from towers.run.restore import (
    check_changes,
    check_dataset,
    newest_checkpoint,
    restore,
)
from towers.run.run import (
    Run,
    is_between_steps,
    save_and_wait,
    saved_aside,
    try_to_save,
)
from towers.run.watchdog import Watchdog
from towers.training.loop import train_loop
from towers.training.result import TrainResult, create_history


def train(
    workdir: str | os.PathLike,
    config: Config,
    *,
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
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
        origins: option -> the layer of the command that set it, for the start banner,
            which lists the others under "config".
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
            wait_secs = 0.0 if cluster is None else LOCK_SECS
            lock = stack.enter_context(folder.lock(wait_secs))
            checkpoint = None if overwrite else newest_checkpoint(folder)
            check_changes(config, folder, checkpoint, allow_change)
            _remove_leftovers(folder, lock)

        # Build.
        devices = parallel_devices.configure(
            config.device,
            config.num_towers,
            config.device_order,
            config.device_memory_mb,
        )
        if config.deterministic:
            parallel_devices.enable_determinism()
        if is_chief:
            lock.describe(device=devices.kind)
        workers = join(cluster, config, devices)
        part = build.part_of(config, devices, workers)
        parts = build.build(config, device_kind=devices.kind, part=part)
        check_dataset(parts.data, checkpoint, allow_change)
        check_data(workers, parts.data, parts.num_examples)
        trainer = build.create_trainer(config, parts, devices, workers)
        if config.device_memory_mb:
            parallel_devices.check_memory(
                trainer.variable_bytes(), config.device_memory_mb
            )
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
                origins=origins,
            ):
                say(line)
        watchdog = Watchdog(
            trainer,
            CONSISTENT_ACTIVITIES,
            starting=STARTING_ACTIVITIES,
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
            DatasetInfo.of(parts.data),
            workers,
        )

        # Restore.
        if is_chief:
            if overwrite:  # only now that everything else is known to be in order
                lock.check()
                folder.clear()
                reports.file(folder.config, to_json(config))
            restore(run, checkpoint)
            reports.file(folder.config, to_json(config))
            reports.file(folder.dataset_info, run.dataset_info.to_json())
        watchdog.run(start_from_chief, run)

        # Train.
        if run.step < last_step or run.pending_record:
            _train_and_save(run, parts, after_call, overwrite)
            run.say(f"done: step {run.step} of {last_step} is saved in {folder.path}")
        else:
            run.say(
                f"{folder.path} is finished: step {run.step} of {last_step}. "
                f"{_way_on(config, parts.total_steps)}; --overwrite starts again"
            )
        return TrainResult(
            path=folder.path,
            step=run.step,
            accuracy=run.accuracy,
            state=trainer.state(),
            history=create_history(reports.records()),
            config=config,
            dataset_info=run.dataset_info,
        )


def _way_on(config: Config, total_steps: int) -> str:
    """The option with which a finished run goes on."""
    if 0 < config.max_steps < total_steps:
        return (
            f"It ended at --max_steps={config.max_steps}: raise it to continue, or set "
            f"--max_steps=0 for all {total_steps} steps"
        )
    epochs = 2 * config.num_epochs
    and_steps = " --max_steps=0" if config.max_steps else ""
    if length_is_free(config):
        return f"To continue raise --num_epochs: --num_epochs={epochs:g}{and_steps}"
    because = f"schedule={config.schedule}"
    if not depends_on_length(config.schedule):
        because = f"early_sizes={config.early_sizes}"
    return (
        f"Its {because} depends on the length: --num_epochs={epochs:g}{and_steps} "
        f"--allow_change=num_epochs continues as a run of {epochs:g} epochs would "
        "from here on"
    )


def _remove_leftovers(folder: RunFolder, lock: Lock) -> None:
    """Removes what killed processes have left."""
    lock.check()
    folder.remove_leftovers()
    checkpoints.remove_leftovers(folder.checkpoints, say)


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
            with data_errors_of_tensorflow(), run.workers.noticing_losses():
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
        watchdog.run(try_to_save, run, error)
        raise WorkerLostError(f"{error}; {how_far(run)}") from None
    except Exception as error:
        if is_between_steps(run.trainer):
            try:
                watchdog.run(try_to_save, run, error)
            except StuckError as stuck:
                say(str(stuck))
        raise
    stopped = run.stopped or watchdog.stop_requested
    if stopped and (run.step < run.last_step or run.pending_record):
        signal = watchdog.stopped_by or "a signal to another worker"
        saved = f"step {run.step} of {run.last_step} is saved in {run.folder.path}"
        if not run.workers.is_chief:
            saved = f"the chief saves step {run.step} of {run.last_step}"
        raise Preempted(
            f"stopped by {signal}: {saved if run.step else 'no step was taken'}; the "
            f"same command {'without --overwrite ' if overwrite else ''}continues"
        )
