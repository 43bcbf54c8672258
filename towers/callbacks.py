"""Callbacks of a training, and trackers, which write it elsewhere.

towers.train("runs/a", config, callbacks=[callbacks.MLflow()])
"""

import contextlib
import numbers
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from towers.errors import ConfigError, Preempted

Metrics = Mapping[str, Any]


class Callback:
    """Base class of callbacks; override the methods that you need.

    The chief alone calls them, between steps, in the thread that trains. What they
    raise ends the run: it is saved, and `towers.train` raises the same error, also
    SystemExit and KeyboardInterrupt.

    Metrics are floats by the names in `metrics.jsonl`, such as "epoch", "loss" and
    "validation_accuracy", and lists of floats, "tower_losses".
    """

    def on_start(
        self, workdir: pathlib.Path, options: Mapping[str, Any], step: int
    ) -> None:
        """Prepare before the first step.

        Args:
            workdir: the run folder.
            options: the fields of the run's Config by name.
            step: the step from which the run continues; 0 for a new run.
        """

    def on_log(self, step: int, metrics: Metrics) -> None:
        """Handle a step that is logged, with its evaluation, if any."""

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        """Handle an evaluation, before its `on_log`."""

    def on_checkpoint(self, step: int, path: pathlib.Path) -> None:
        """Handle a checkpoint some time after it was committed.

        It may be removed by now. Not called for the last checkpoint of a run that is
        stopped or ends with an error.
        """

    def on_end(self, step: int) -> None:
        """Finish after the last step, unless `on_exception` is called."""

    def on_exception(self, step: int, error: BaseException) -> None:
        """Finish a run that is stopped, with `Preempted`, or ends with another error.

        The run is saved before. May be called before `on_start`; not called if a
        callback hangs. Errors of this method become warnings.
        """


class Tracker(Callback):
    """Base class of callbacks that write a run elsewhere.

    What they raise after `on_start` is a warning, and the run continues.
    """


if TYPE_CHECKING:
    Callbacks = Sequence[Callback]
else:  # `validate` says what is wrong
    Callbacks = Any


def validate(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Return the argument of `towers.train`; ConfigError if it has other objects."""
    listed = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
    wrong = [x for x in listed if not isinstance(x, Callback)]
    if wrong or isinstance(callbacks, Callback):
        raise ConfigError(
            f"callbacks: {(wrong or listed)[0]}: give a list of objects, of classes "
            "derived from towers.callbacks.Callback. For Keras' callbacks there are "
            "patience, schedule=plateau, metrics.jsonl and others: see "
            "docs/coming_from.md"
        )
    return listed


@contextlib.contextmanager
def _begins(name: str, hint: str = ""):
    """Convert errors at the start of a tracker into ConfigErrors."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} cannot begin: {error}{hint}") from error


class MLflow(Tracker):
    """Tracks a run with MLflow: options as parameters, and metrics.

    Args:
        uri: URI of the tracking server, or a folder for a database, for `mlflow ui
            --backend-store-uri=sqlite:///FOLDER/mlflow.db`; default:
            MLFLOW_TRACKING_URI.
        experiment: name of the experiment, which is created if it is missing.

    Raises:
        ConfigError: the package mlflow is not installed.
    """

    def __init__(self, uri: str | None = None, experiment: str = "towers"):
        with _begins("mlflow", "; install it: pip install mlflow"):
            import mlflow
            from mlflow import entities

        self._new_client, self._entities = mlflow.MlflowClient, entities
        self._uri, self._experiment, self._run = uri, experiment, None

    @_begins("MLflow")
    def on_start(self, workdir, options, step):
        """Create a run with its parameters, or continue that of the run folder."""
        uri, file = self._uri, workdir / ".mlflow-run"
        if uri and ":" not in uri:
            uri = os.path.expanduser(uri)
            os.makedirs(uri, exist_ok=True)
            uri = f"sqlite:///{os.path.abspath(uri)}/mlflow.db"
        client = self._client = self._new_client(uri)
        if step and file.exists():
            continued = file.read_text().strip()
            with _begins("MLflow", f"; without {file} another run begins there"):
                client.update_run(continued, "RUNNING")
            self._run = continued
            return
        experiment = client.get_experiment_by_name(self._experiment)
        number = experiment and experiment.experiment_id
        number = number or client.create_experiment(self._experiment)
        self._run = client.create_run(number, run_name=workdir.name).info.run_id
        file.write_text(self._run)
        param = self._entities.Param
        params = [param(name, str(value)[:6000]) for name, value in options.items()]
        client.log_batch(self._run, params=params)

    def on_log(self, step, metrics):
        """Log the metrics."""
        at, metric = round(time.time() * 1000), self._entities.Metric
        values = [metric(k, x, at, step) for k, x in _numbers(metrics).items()]
        self._client.log_batch(self._run, metrics=values)

    def on_end(self, step):
        """End the run."""
        self._end("FINISHED")

    def on_exception(self, step, error):
        """End the run as killed or failed."""
        self._end("KILLED" if isinstance(error, Preempted) else "FAILED")

    def _end(self, status):
        run, self._run = self._run, None
        if run:
            self._client.set_terminated(run, status)


class WandB(Tracker):
    """Tracks a run with Weights & Biases: options as its config, and metrics.

    WANDB_MODE=offline writes into the run's folder alone.

    Args:
        project: name of the project.
        **options: further arguments of `wandb.init`.

    Raises:
        ConfigError: the package wandb is not installed.
    """

    def __init__(self, project: str = "towers", **options: Any):
        with _begins("wandb", "; install it: pip install wandb"):
            import wandb

        self._wandb = wandb
        self._options, self._run = {"project": project} | options, None

    @_begins("W&B")
    def on_start(self, workdir, options, step):
        """Create a run, or continue that of the run folder."""
        file = workdir / ".wandb-run"
        continued = file.read_text().strip() if step and file.exists() else None
        about = {"name": workdir.name, "dir": str(workdir), "config": dict(options)}
        about |= {"id": continued, "resume": "allow"} | self._options
        self._run = self._wandb.init(**about)
        file.write_text(self._run.id)

    def on_log(self, step, metrics):
        """Log the metrics."""
        self._run.log(_numbers(metrics), step=step)

    def on_end(self, step):
        """End the run."""
        self._end()

    def on_exception(self, step, error):
        """End the run as failed."""
        self._end(exit_code=1)

    def _end(self, **options):
        run, self._run = self._run, None
        if run:
            run.finish(**options)


# Values of --track: name -> (class, what follows the name and a colon, its first
# argument).
TRACKERS: dict[str, tuple[Callable[[str], Tracker], str]] = {
    "mlflow": (MLflow, "FOLDER or URI"),
    "wandb": (WandB, "PROJECT"),
}
TRACKERS_TEXT = ", ".join(f"{name}:{what}" for name, (_, what) in TRACKERS.items())


def tracker(text: str) -> Tracker:
    """Return the tracker of a value of --track; ConfigError if there is none."""
    name, _, argument = text.partition(":")
    if name not in TRACKERS or not argument:
        raise ConfigError(f"track={text}: must be one of {TRACKERS_TEXT}")
    return TRACKERS[name][0](argument)


def _numbers(metrics: Metrics) -> dict[str, float]:
    """Return single numbers, and numbers per tower as "tower_losses_0" and so on."""
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, numbers.Real):
            values[name] = float(value)
        elif isinstance(value, list):
            values |= {f"{name}_{i}": float(x) for i, x in enumerate(value)}
    return values
