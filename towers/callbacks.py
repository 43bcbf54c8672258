"""Callbacks: what is called during a training, and ready ones that track it elsewhere.

towers.train("runs/a", config, callbacks=[callbacks.MLflow()])
"""

import contextlib
import numbers
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from towers.errors import ConfigError, Preempted

Metrics = Mapping[str, Any]


class Callback:
    """The base of callbacks, which does nothing; override what you need.

    The methods are called by the chief alone, between steps, in the thread that trains;
    it waits for them. What they raise ends the run: it is saved, and `towers.train`
    raises the same error, also SystemExit and KeyboardInterrupt.

    Metrics are floats by the names in `metrics.jsonl`, such as "epoch", "loss" and
    "validation_accuracy", and lists of floats, "tower_losses".
    """

    def on_start(
        self, workdir: pathlib.Path, options: Mapping[str, Any], step: int
    ) -> None:
        """Before the first step.

        Args:
            workdir: the run's folder.
            options: of the run, the fields of its Config by name.
            step: that the run continues from; 0 at its begin.
        """

    def on_log(self, step: int, metrics: Metrics) -> None:
        """Called after a step that is logged; with the evaluation, if there was one."""

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        """Called after an evaluation, before its `on_log`; with its metrics."""

    def on_checkpoint(self, step: int, path: pathlib.Path) -> None:
        """Called some time after a checkpoint was committed; it may be removed by now.
        Not for the last one of a run that is stopped or ends with an error.
        """

    def on_end(self, step: int) -> None:
        """Called after the last step; not if `on_exception` is called, unless another
        callback raises here.
        """

    def on_exception(self, step: int, error: BaseException) -> None:
        """Called when the run is stopped, with `Preempted`, or ends with another error,
        after it was saved; perhaps before `on_start`. Errors of this method become
        warnings. Not called if a callback hangs.
        """


class Tracker(Callback):
    """The base of callbacks that write a run elsewhere: like a report that cannot be
    written, what they raise after `on_start` is a warning, and the run goes on.
    """


if TYPE_CHECKING:
    Callbacks = Sequence[Callback]
else:  # `validate` says what is wrong
    Callbacks = Any


def validate(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """The argument of `towers.train`. ConfigError where it holds something else."""
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
        uri: of the tracking server, or a folder, in which a database is made, for
            `mlflow ui --backend-store-uri=sqlite:///FOLDER/mlflow.db`; by default
            MLFLOW_TRACKING_URI.
        experiment: its name there; made where it is missing.

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
        at, metric = round(time.time() * 1000), self._entities.Metric
        values = [metric(k, x, at, step) for k, x in _numbers(metrics).items()]
        self._client.log_batch(self._run, metrics=values)

    def on_end(self, step):
        self._end("FINISHED")

    def on_exception(self, step, error):
        self._end("KILLED" if isinstance(error, Preempted) else "FAILED")

    def _end(self, status):
        run, self._run = self._run, None
        if run:
            self._client.set_terminated(run, status)


class WandB(Tracker):
    """Tracks a run with Weights & Biases: options as its config, and metrics.

    WANDB_MODE=offline writes into the run's folder alone.

    Args:
        project: its name there.
        **options: of `wandb.init`.

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
        file = workdir / ".wandb-run"
        continued = file.read_text().strip() if step and file.exists() else None
        about = {"name": workdir.name, "dir": str(workdir), "config": dict(options)}
        about |= {"id": continued, "resume": "allow"} | self._options
        self._run = self._wandb.init(**about)
        file.write_text(self._run.id)

    def on_log(self, step, metrics):
        self._run.log(_numbers(metrics), step=step)

    def on_end(self, step):
        self._end()

    def on_exception(self, step, error):
        self._end(exit_code=1)

    def _end(self, **options):
        run, self._run = self._run, None
        if run:
            run.finish(**options)


def tracker(text: str) -> Callback:
    """The callback of --track: "mlflow:FOLDER" or its URI, or "wandb:PROJECT".

    Raises:
        ConfigError: it is none of these, or its package is not installed.
    """
    kind, _, rest = text.partition(":")
    trackers = {"mlflow": MLflow, "wandb": WandB}
    if kind not in trackers or not rest:
        raise ConfigError(
            f"track={text}: give mlflow:FOLDER, mlflow:URI or wandb:PROJECT"
        )
    return trackers[kind](rest)


def _numbers(metrics: Metrics) -> dict[str, float]:
    """The single numbers, and numbers per tower as "tower_losses_0" and so on."""
    values = {}
    for name, value in metrics.items():
        if isinstance(value, numbers.Real):
            values[name] = float(value)
        elif isinstance(value, list):
            values |= {f"{name}_{i}": float(x) for i, x in enumerate(value)}
    return values
