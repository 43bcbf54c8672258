"""Metrics by which an evaluation on held-out images is the best, the highest first."""

import math
from collections.abc import Callable
from typing import NamedTuple

from towers.config import choices, factories
from towers.errors import ConfigError
from towers.evaluation.calibration import mean_f1
from towers.evaluation.predictions import LabelSets, Predictions
from towers.evaluation.report import Figures


class Metric(NamedTuple):
    """A metric of the predictions for all images; NaN is worse than any number."""

    name: str  # in records, after the split
    function: Callable[[Predictions | LabelSets], float]
    is_recorded: bool  # whether a run records it next to the usual ones

    def score(self, figures: Figures) -> float:
        """The metric of an evaluation; what `report.accuracies` has is not computed
        again."""
        if self.is_recorded:
            return figures[self.name]
        if self.name in ("auto", "map") and "map" in figures:
            return figures["map"]
        return self.function(figures["predictions"])


def create_metric(name: str) -> Metric:
    """The metric of `--best_by`: a name in `choices.METRICS`, or FILE.py:FUNCTION of
    labels, int64 [n] or bool [n, classes], and probabilities, float64 [n, classes]."""
    function = factories.resolve("best_by", name)
    if not choices.find("best_by", name).is_in_a_file:
        usual = "auto", "accuracy", "loss", "map"
        return Metric(name, function, name not in usual)

    def compute(predictions):
        number = function(predictions.labels, predictions.all_probabilities)
        try:
            return float(number)
        except (TypeError, ValueError):
            reason = f"gave {type(number).__name__}, and not a number"
            raise ConfigError(f"best_by={name}: {reason}") from None

    return Metric(name.rpartition(":")[2], compute, True)


def accuracy(predictions: Predictions | LabelSets) -> float:
    """The part of images that are predicted correctly."""
    return float(predictions.correct.mean())


def negative_loss(predictions: Predictions | LabelSets) -> float:
    """The mean loss, negative."""
    mean = float(predictions.losses.mean())
    return -mean if math.isfinite(mean) else math.nan


def macro_f1(predictions: Predictions | LabelSets) -> float:
    """The mean F1 over the classes with images or predictions."""
    return mean_f1(predictions.labels, predictions.classes)
