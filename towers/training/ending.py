"""The end of a training: what is saved then, and how the run continues."""

import contextlib
from collections.abc import Iterator

from towers import console
from towers.build import Parts
from towers.config import Config
from towers.errors import (
    CheckpointError,
    Preempted,
    RunFolderError,
    StuckError,
    WorkerLostError,
    data_errors_of_tensorflow,
)
from towers.evaluation.run_report import Evaluated, write_report
from towers.run.checkpoint import versions
from towers.run.peers import last_step_text, wait_for_chief
from towers.run.session import (
    CallbackError,
    Session,
    end_callbacks,
    is_between_steps,
    notify_exception,
    save_and_wait,
    try_to_save,
)


@contextlib.contextmanager
def callbacks_at_the_end(session: Session) -> Iterator[None]:
    """Tells the callbacks how the steps that a run takes inside have ended."""
    try:
        yield
        session.watchdog.run(end_callbacks, session)
    except BaseException as raised:
        error = raised.__cause__ if isinstance(raised, CallbackError) else raised
        # One that hangs is not waited for again.
        if not (session.is_calling and isinstance(error, StuckError)):
            try:
                session.watchdog.run(notify_exception, session, error)
            except StuckError as stuck:
                console.line(str(stuck))
        del error  # and with its traceback the state of the run
        raise


@contextlib.contextmanager
def saved_at_the_end(session: Session, overwrite: bool) -> Iterator[None]:
    """Saves after the steps that a run takes inside, also after a signal or an error.

    Raises:
        Preempted: a signal came before the end; what was trained is saved.
        RunFolderError: the run's folder is gone.
        StuckError: a step, or a save, did not end.
    """
    watchdog = session.watchdog
    try:
        # After an activity was abandoned, the state is that of a finished step.
        with contextlib.suppress(Preempted):
            with data_errors_of_tensorflow(), session.workers.noticing_losses():
                yield
        watchdog.run(save_and_wait, session)
        wait_for_chief(session)
    except (CheckpointError, RunFolderError, StuckError):
        raise
    except WorkerLostError as error:
        watchdog.run(try_to_save, session, error)
        raise WorkerLostError(f"{error}; {last_step_text(session)}") from None
    except BaseException as error:
        if is_between_steps(session.trainer):
            try:
                watchdog.run(try_to_save, session, error)
            except StuckError as stuck:
                console.line(str(stuck))
        raise
    step = session.progress.step
    stopped = session.stopped or watchdog.stop_requested
    if stopped and (not session.is_at_end or session.progress.open_record):
        signal = watchdog.stopped_by or "a signal to another worker"
        saved = f"{progress_text(session)} is saved in {session.folder.path}"
        if not session.workers.is_chief:
            saved = f"the chief saves {progress_text(session)}"
        raise Preempted(
            f"stopped by {signal}: {saved if step else 'no step was taken'}; "
            f"the same command {'without --overwrite ' if overwrite else ''}continues"
        )


def report_run(session: Session, parts: Parts) -> None:
    """Writes the report of a run, with its last evaluation: nothing is computed again.
    To be called inside of `Watchdog.run`; after a signal it is abandoned."""
    evaluated, step = None, session.progress.step
    if session.evaluated is not None:
        step, evaluation = session.evaluated
        evaluated = Evaluated.of_counts(*parts.eval_split, evaluation)
    with session.watchdog.activity("writing the report"):
        session.lock.assert_same_folder()
        page = write_report(
            session.folder,
            session.config,
            parts.data.class_names,
            session.reports.records(),
            evaluated,
            step=step,
            images=step * session.config.images_per_step,
            stopwatch=session.progress.stopwatch,
            versions=versions(),
            is_training=True,
        )
    session.say(f"report: {page}")


def progress_text(session: Session) -> str:
    """Such as "step 5 of 10"."""
    if session.progress.step > session.last_step:
        return f"step {session.progress.step}, beyond {session.last_step}"
    message = f"step {session.progress.step} of {session.last_step}"
    if session.is_out_of_patience:
        message += f", after {session.progress.num_worse} evaluations without a better "
        message += f"{session.config.best_by},"
    return message


def how_to_continue(config: Config, step: int, total_steps: int) -> str:
    """The options with which a finished run goes on, in a sentence."""
    if step < total_steps:
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
