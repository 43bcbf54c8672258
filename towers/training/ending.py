"""The end of a training: what is saved then, and how the run continues."""

import contextlib
import time
from collections.abc import Iterator

from towers import console, errors
from towers.config import Config
from towers.messages import counted
from towers.metrics.metrics import figures
from towers.report.run_report import Evaluated, write_report
from towers.run.checkpoint import versions
from towers.training.callback_list import CallbackError
from towers.training.outputs import is_between_steps
from towers.training.run import Run


@contextlib.contextmanager
def callbacks_at_the_end(run: Run) -> Iterator[None]:
    """Notify the callbacks how the steps inside have ended."""
    callbacks, watchdog = run.callbacks, run.watchdog
    try:
        yield
        watchdog.call(callbacks.end, run.step)
    except BaseException as raised:
        error = raised.error if isinstance(raised, CallbackError) else raised
        # A callback that hangs is not called again.
        if not (callbacks.is_calling and isinstance(error, errors.StuckError)):
            try:
                watchdog.call(callbacks.notify_exception, run.step, error)
            except errors.StuckError as stuck:
                console.line(str(stuck))
        del error  # its traceback holds the state of the run
        raise


@contextlib.contextmanager
def saved_at_the_end(run: Run, overwrite: bool) -> Iterator[None]:
    """Save after the steps inside, also after a signal or an error."""
    watchdog = run.watchdog
    try:
        # An abandoned activity leaves the state of a finished step.
        with (
            contextlib.suppress(errors.Preempted),
            errors.data_errors_of_tensorflow(),
            run.workers.raising_worker_lost(),
        ):
            yield
        watchdog.call(run.save_and_wait)
        run.wait_for_chief()
    except (errors.CheckpointError, errors.RunFolderError, errors.StuckError):
        raise
    except errors.WorkerLostError as error:
        watchdog.call(run.try_to_save, error)
        step = int(run.trainer.progress()[0])
        clock = time.strftime("%H:%M:%S", time.localtime(watchdog.progress_at))
        is_saved = run.outputs.saved_step == step
        place = f", and is saved in {run.folder.path}" if is_saved else ""
        last = f"step {step} was the last, at {clock}{place}"
        why, way = f"{error}; {last}", "the same command continues"
        raise errors.WorkerLostError(f"{why}; {way}") from None
    except BaseException as error:
        if is_between_steps(run.trainer):
            try:
                watchdog.call(run.try_to_save, error)
            except errors.StuckError as stuck:
                console.line(str(stuck))
        raise
    stopped = run.stopped or watchdog.stop_requested
    if stopped and (not run.is_at_end or run.progress.open_record):
        signal = watchdog.stopped_by or "a signal to another worker"
        saved = f"the chief saves {progress_text(run)}"
        if run.outputs.saved_step == run.step:
            saved = f"{progress_text(run)} is saved in {run.folder.path}"
        way = f"the same command {'without --overwrite ' if overwrite else ''}continues"
        saved = saved if run.step else "no step was taken"
        raise errors.Preempted(f"stopped by {signal}: {saved}; {way}")


def report_run(run: Run) -> None:
    """Write the report of a run with its last evaluation, until a signal."""
    evaluated, step, names = None, run.step, run.parts.data.class_names
    with run.watchdog.activity("writing the report"):
        if run.evaluated is not None:
            step, evaluation = run.evaluated
            predictions = evaluation.map(lambda x: x["predictions"])
            results = predictions.map(lambda x: figures(x, names))
            evaluated = Evaluated(*run.parts.eval_split, names, predictions, results)
        run.outputs.lock.assert_same_folder()
        page = write_report(
            run.folder,
            run.config,
            run.parts.data,
            run.reports.records(),
            evaluated,
            step=step,
            images=step * run.config.images_per_step,
            stopwatch=run.progress.stopwatch,
            versions=versions(),
        )
    run.outputs.say(f"report: {page}")


def progress_text(run: Run) -> str:
    """Return the steps taken, such as "step 5 of 10"."""
    if run.step > run.last_step:
        return f"step {run.step}, beyond {run.last_step}"
    message = f"step {run.step} of {run.last_step}"
    if run.is_out_of_patience:
        message += f", after {run.progress.num_worse} evaluations without a better "
        message += f"{run.best_by},"
    return message


def how_to_continue(config: Config, step: int, total_steps: int, is_early: bool) -> str:
    """Return the options with which a finished run goes on, in a sentence."""
    if is_early:
        return "To continue raise --patience, or set it to 0"
    if step < total_steps:
        way = f"raise it to continue, or set --max_steps=0 for all {total_steps} steps"
        return f"It ended at --max_steps={config.max_steps}: {way}"
    epochs = f"{2 * config.num_epochs:g}"
    options = f"--num_epochs={epochs}{' --max_steps=0' if config.max_steps else ''}"
    if config.length_is_resumable:
        return f"To continue raise --num_epochs: {options}"
    because = f"schedule={config.schedule}"
    if not config.choice_of("schedule").by_length:
        because = f"early_sizes={config.early_sizes}"
    longer = counted(2 * config.num_epochs, "epoch")
    way = f"{options} --allow_change=num_epochs continues as a run of {longer} would"
    return f"Its {because} depends on the length: {way}"
