"""The result of a training: its state, history and networks."""

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from towers.build.restored import RestoredRun
from towers.config import Config
from towers.run.dataset_info import DatasetInfo


class Curve(NamedTuple):
    """A metric over the steps: `plot(*curve)` draws it.

    Attributes:
        steps: int64 [n], increasing.
        values: float64 [n], or [n, towers] of a metric of each tower; NaN if one was
            not finite.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A run after training.

    Attributes:
        path: the run's folder.
        step: the last step taken.
        accuracy: accuracy of the last evaluation, with the moving averages if the run
            keeps them; None if there was none.
        state: the canonical state, name -> host array.
        history: the metrics in `metrics.jsonl` by name, such as "loss" and
            "test_accuracy"; empty on a worker that is not the chief, and if the file
            cannot be read.
        config: the Config of the run.
        dataset_info: classes and preprocessing of its data set.
    """

    path: pathlib.Path
    step: int
    accuracy: float | None
    state: dict[str, np.ndarray] = dataclasses.field(repr=False, compare=False)
    history: dict[str, Curve] = dataclasses.field(repr=False, compare=False)
    config: Config = dataclasses.field(repr=False)
    dataset_info: DatasetInfo = dataclasses.field(repr=False)

    @functools.cached_property
    def network(self) -> RestoredRun:
        """The trained network with its preprocessing, as `towers.load_run` gives it."""
        return RestoredRun(
            self.path, self.step, self.config, self.dataset_info, self.state
        )

    @property
    def model(self) -> keras.Model:
        """The network with the raw parameters, see `RestoredRun.model`."""
        return self.network.model

    @property
    def model_ema(self) -> keras.Model | None:
        """The network with their moving averages; None if the run keeps none."""
        return self.network.model_ema


def create_history(records: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curve of each metric in records of `metrics.jsonl`."""
    points = collections.defaultdict(list)
    for record in records:
        for name in record.keys() - {"step"}:
            value = np.asarray(record[name], np.float64)  # None is NaN
            points[name].append((record["step"], value))
    return {name: _curve(*zip(*points[name], strict=True)) for name in sorted(points)}


def _curve(steps, values):
    if values[0].ndim:  # a part of the run may have had fewer towers
        most = max(value.size for value in values)
        values = [np.pad(x, (0, most - x.size), constant_values=np.nan) for x in values]
    return Curve(np.array(steps, np.int64), np.array(values))
