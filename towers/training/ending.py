"""The end of a training: what is saved then, and how the run continues."""

import contextlib
from collections.abc import Iterator

from towers.config import Config
from towers.errors import (
    CheckpointError,
    Preempted,
    RunFolderError,
    StuckError,
    WorkerLostError,
    data_errors_of_tensorflow,
)
from towers.output import say
from towers.run.peers import how_far, wait_for_chief
from towers.run.run import (
    Run,
    is_between_steps,
    save_and_wait,
    saved_aside,
    try_to_save,
)


@contextlib.contextmanager
def saved_at_the_end(run: Run, overwrite: bool) -> Iterator[None]:
    """Saves after the steps that a run takes inside, also after a signal or an error.

    Raises:
        Preempted: a signal came before the end; what was trained is saved.
        RunFolderError: the run's folder is gone; the state is saved beside it.
        StuckError: a step, or a save, did not end.
    """
    watchdog = run.watchdog
    try:
        # After an activity was abandoned, the state is that of a finished step.
        with contextlib.suppress(Preempted):
            with data_errors_of_tensorflow(), run.workers.noticing_losses():
                yield
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
        saved = f"{progress(run)} is saved in {run.folder.path}"
        if not run.workers.is_chief:
            saved = f"the chief saves {progress(run)}"
        raise Preempted(
            f"stopped by {signal}: {saved if run.step else 'no step was taken'}; the "
            f"same command {'without --overwrite ' if overwrite else ''}continues"
        )


def progress(run: Run) -> str:
    """Such as "step 5 of 10"."""
    if run.step > run.last_step:
        return f"step {run.step}, beyond {run.last_step}"
    return f"step {run.step} of {run.last_step}"


def how_to_continue(config: Config, total_steps: int) -> str:
    """The options with which a finished run goes on, in a sentence."""
    if 0 < config.max_steps < total_steps:
        return (
            f"It ended at --max_steps={config.max_steps}: raise it to continue, or set "
            f"--max_steps=0 for all {total_steps} steps"
        )
    epochs = f"{2 * config.num_epochs:g}"
    options = f"--num_epochs={epochs}{' --max_steps=0' if config.max_steps else ''}"
    if config.length_is_free:
        return f"To continue raise --num_epochs: {options}"
    because = f"schedule={config.schedule}"
    if not config.choice_of("schedule").by_length:
        because = f"early_sizes={config.early_sizes}"
    return (
        f"Its {because} depends on the length: {options} --allow_change=num_epochs "
        f"continues as a run of {epochs} epochs would from here on"
    )
