"""Functions of the metrics in `towers/config/metrics.py`, and tables of an evaluation.

They are computed in NumPy, in float64, from what the devices give for each image:
strategy, towers and batch size change only the rounding of the logits.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers.config import choices, factories, parse_json
from towers.config.metrics import METRICS, metrics_of, recorded_metrics
from towers.errors import ConfigError
from towers.messages import one_line
from towers.metrics.predictions import (
    LabelSets,
    Predictions,
    average_precision,
    below,
    precision_recall,
    to_probabilities,
)

Figures = dict[str, Any]  # see `figures`

# Confidence level of the intervals.
CONFIDENCE = 0.95

# Bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599.
NUM_BINS = 15


def figures(
    predictions: Predictions | LabelSets,
    class_names: Sequence[str],
    thresholds: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return the figures of `result.json`, of Python's types.

    These are the metrics of the task, and NAME_interval of shares; "correct", "images",
    "classes" and, with one label an image, "confusion_matrix", `confusion_entries`. As
    in scikit-learn with `zero_division=0`, a ratio of nothing is 0.
    """
    if isinstance(predictions, LabelSets):
        predictions = dataclasses.replace(predictions, thresholds=thresholds)
    names = metrics_of(predictions.multi_label)
    result = compute(predictions, names) | counts_of(predictions)
    labels, classes = predictions.labels, predictions.classes
    counts = class_counts(labels, classes, len(class_names)).tolist()
    result["classes"] = rows = [
        {"name": name, "images": labeled, "predictions": taken}
        | {"f1": 2 * hits / max(labeled + taken, 1)}
        | ratio("precision", hits, taken)
        | ratio("recall", hits, labeled)
        for name, hits, labeled, taken in zip(class_names, *counts, strict=True)
    ]
    if isinstance(predictions, Predictions):
        entries = confusion_entries(labels, classes, len(class_names))
        return result | {"confusion_matrix": entries.tolist()}
    for number, row in enumerate(rows):
        row["average_precision"] = float(predictions.average_precisions[number])
        if thresholds is not None:
            row["threshold"] = float(thresholds[number])
    return result


def compute(
    predictions: Predictions | LabelSets, names: Iterable[str]
) -> dict[str, Any]:
    """Return the metrics that apply, and the intervals of shares."""
    result: dict[str, Any] = {}
    for name in names:
        function, suffix = METRICS[name].target or name, "_at_thresholds"
        decided: Any = predictions
        if function.endswith(suffix):
            decided, function = decided.at_thresholds, function.removesuffix(suffix)
        value = None if decided is None else globals()[function](decided)
        if isinstance(value, np.ndarray):
            result |= ratio(name, int(value.sum()), len(value))
        elif value is not None:
            result[name] = value
    return result


def counts_of(predictions: Predictions | LabelSets) -> dict[str, int]:
    """Return the numbers of "correct" predictions and "images"."""
    num_correct = int(predictions.correct.sum())
    return {"correct": num_correct, "images": len(predictions.labels)}


# Functions of the metrics.


def accuracy(predictions: Predictions | LabelSets) -> np.ndarray:
    """Return which images are predicted correctly, bool [n]."""
    return predictions.correct


def accuracy_tta(predictions: Predictions | LabelSets) -> np.ndarray | None:
    """Return which images are correct with TTA, bool [n]."""
    return predictions.correct_tta


def top5_accuracy(predictions: Predictions) -> np.ndarray | None:
    """Return which labels are in the top five, bool [n]."""
    return predictions.in_top


def loss(predictions: Predictions | LabelSets) -> float:
    """Return the mean loss."""
    return float(predictions.losses.mean())


def balanced_accuracy(predictions: Predictions) -> float:
    """Return the mean recall over the classes with images."""
    hits, images, _ = class_counts(predictions.labels, predictions.classes)
    return float(np.mean(hits[images > 0] / images[images > 0]))


def macro_f1(predictions: Predictions | LabelSets) -> float:
    """Return the mean F1 over the classes with images or predictions, or 0."""
    hits, labeled, taken = class_counts(predictions.labels, predictions.classes)
    total = labeled + taken
    each = 2 * hits[total > 0] / total[total > 0]
    return float(each.mean()) if each.size else 0.0


def micro_f1(predictions: LabelSets) -> float:
    """Return F1 over all pairs of an image and a class."""
    labels, classes = predictions.labels, predictions.classes
    total = labels.sum() + classes.sum()
    return float(2 * (labels & classes).sum() / max(total, 1))


def mean_average_precision(predictions: LabelSets) -> float:
    """Return the mean over the classes with images; 0 without any."""
    each = predictions.average_precisions[predictions.labels.any(0)]
    return float(each.mean()) if each.size else 0.0


def map_micro(predictions: LabelSets) -> float:
    """Return the average precision of all pairs of an image and a class."""
    return average_precision(predictions.labels.ravel(), predictions.scores.ravel())


def calibration_error(predictions: Predictions | LabelSets) -> float:
    """Return the mean distance of probability and accuracy over the bins."""
    probabilities, is_right = predictions.decisions
    surplus = np.bincount(_bins(probabilities), probabilities - is_right, NUM_BINS)
    return float(np.abs(surplus).sum() / len(is_right))


# Counts.


def ratio(name: str, successes: int, trials: int) -> dict[str, Any]:
    """Return a share by its name, and its interval as NAME_interval."""
    interval = wilson_interval(successes, trials)
    return {name: successes / max(trials, 1), f"{name}_interval": interval}


def wilson_interval(successes: int, trials: int) -> list[float]:
    """Return the score interval of a binomial proportion (Wilson 1927)."""
    if not trials:
        return [0.0, 1.0]
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, weight = successes / trials, z * z / trials
    center = (share + weight / 2) / (1 + weight)
    reach = math.sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    # At the ends rounding would miss 0 and 1.
    low = center - reach if successes else 0.0
    return [low, center + reach if successes < trials else 1.0]


def class_counts(
    labels: np.ndarray, classes: np.ndarray, num_classes: int = 0
) -> np.ndarray:
    """Count correct predictions, images and predictions, int64 [3, classes]."""
    if labels.ndim == 2:
        return np.array([x.sum(0) for x in (labels & classes, labels, classes)])
    num_classes = num_classes or 1 + max(labels.max(), classes.max())
    each = labels[labels == classes], labels, classes[classes >= 0]
    return np.array([np.bincount(x, minlength=num_classes) for x in each])


def confusion_entries(
    labels: np.ndarray, classes: np.ndarray, num_classes: int
) -> np.ndarray:
    """Return rows of label, class and number of images that is not 0.

    Images without a class, -1, are left out.
    """
    labels, classes = labels[classes >= 0], classes[classes >= 0]
    pairs, counts = np.unique(labels * num_classes + classes, return_counts=True)
    return np.stack([*np.divmod(pairs, num_classes), counts], 1)


def frequent_mistakes(entries: np.ndarray, most: int) -> np.ndarray:
    """Return the entries of different classes with the most images."""
    wrong = entries[entries[:, 0] != entries[:, 1]]
    return wrong[np.argsort(-wrong[:, 2], kind="stable")[:most]]


def worst_confusion(
    entries: np.ndarray, num_classes: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the classes with the most mistakes, their confusion matrix, and images."""
    labels, predicted, counts = entries.T
    wrong = counts * (labels != predicted)
    images = np.bincount(labels, counts, num_classes).astype(np.int64)
    mistakes = sum(np.bincount(x, wrong, num_classes) for x in (labels, predicted))
    classes = np.sort(np.argsort(-mistakes, kind="stable")[:most])
    place = np.full(num_classes, len(classes))  # other classes: outside of the result
    place[classes] = np.arange(len(classes))
    matrix = np.zeros([len(classes) + 1] * 2, np.int64)
    matrix[place[labels], place[predicted]] = counts
    return classes, matrix[:-1, :-1], images[classes]


# Calibration.


def _bins(probabilities):
    # Equal bins (low, high].
    bins = np.ceil(np.nan_to_num(probabilities) * NUM_BINS)
    return np.clip(bins, 1, NUM_BINS).astype(np.int64) - 1


def reliability(predictions: Predictions | LabelSets) -> list[dict[str, Any]]:
    """Return the bins of the calibration error, for `charts.reliability`."""
    probabilities, is_right = predictions.decisions
    bins, rows = _bins(probabilities), []
    for number in range(NUM_BINS):
        is_in = bins == number
        images, correct = int(is_in.sum()), int(is_right[is_in].sum())
        low, high = number / NUM_BINS, (number + 1) / NUM_BINS
        row: dict[str, Any] = {"low": low, "high": high, "images": images}
        if images:
            row["probability"] = float(probabilities[is_in].mean())
            row |= ratio("accuracy", correct, images)
        rows.append(row)
    return rows


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature of the lowest cross-entropy (arXiv:1706.04599)."""
    logits = logits.astype(np.float64)
    multi_label = labels.ndim == 2
    targets = labels if multi_label else np.eye(logits.shape[1])[labels]

    def slope(log_temperature):
        # Its sign is that of the derivative of the convex cross-entropy.
        probabilities = to_probabilities(
            logits * math.exp(-log_temperature), multi_label
        )
        return np.sum(logits * (probabilities - targets))

    low, high = -math.log(100), math.log(100)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.exp((low + high) / 2)


# Label sets.


def best_thresholds(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the threshold of each class with the highest F1, or 1/2 without images.

    It is halfway between two probabilities; both arguments are [n, classes].
    """
    thresholds = np.full(labels.shape[1], 0.5)
    for number in np.flatnonzero(labels.any(0)):
        precision, recall, scores = precision_recall(
            labels[:, number], probabilities[:, number]
        )
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
        thresholds[number] = below(scores, int(f1.argmax()))
    return thresholds


def thresholds_json(predictions: LabelSets, class_names: Sequence[str]) -> str:
    """Return the content of `thresholds.json`, `best_thresholds` by class name."""
    values = best_thresholds(predictions.labels, predictions.probabilities).tolist()
    return json.dumps(dict(zip(class_names, values, strict=True)), indent=2) + "\n"


def read_thresholds(
    path: pathlib.Path, class_names: Sequence[str]
) -> np.ndarray | None:
    """Return the thresholds in a file, float64 [classes]; None without a file."""
    try:
        values = parse_json(path.read_bytes())
        chosen = [values[name] for name in class_names]
        thresholds = np.array(chosen, np.float64)
        if thresholds.ndim != 1 or not ((thresholds >= 0) & (thresholds <= 1)).all():
            raise ValueError(f"{one_line(chosen, 60)} are not all from 0 to 1")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"{path}: has no threshold for each class ({one_line(error)})"
        way = "remove it, and the next best evaluation of the training writes it anew"
        raise ConfigError(f"{why}; {way}") from None
    return thresholds


# The metric of --best_by.


class Metric(NamedTuple):
    """The metric that decides which step is best."""

    name: str  # in records, after the split
    function: Callable[[Predictions | LabelSets], float]
    is_recorded: bool  # whether only best_by asks for it
    higher_is_better: bool = True

    def score(self, figures: Figures) -> float:
        """Return the metric of an evaluation; higher is better."""
        value = figures[self.name]
        return value if self.higher_is_better else -value


def create_metric(name: str) -> Metric:
    """Return the metric of `--best_by`, of METRICS or FILE.py:FUNCTION."""
    function = factories.resolve("best_by", name)
    if not choices.find("best_by", name).is_in_a_file:
        row = METRICS["accuracy" if name == "auto" else name]
        is_recorded = name not in ("accuracy", "loss", "map")
        return Metric(name, function, is_recorded, row.higher_is_better)
    short = name.rpartition(":")[2]
    if short in (*recorded_metrics(), "correct", "images", "predictions"):
        way = "rename the function"
        raise ConfigError(f"best_by={name}: {short} is another figure; {way}")

    def compute_score(predictions):
        logits, multi_label = predictions.logits, predictions.multi_label
        number = function(predictions.labels, to_probabilities(logits, multi_label))
        try:
            return float(number)
        except (TypeError, ValueError):
            reason = f"gave {type(number).__name__}, and not a number"
            raise ConfigError(f"best_by={name}: {reason}") from None

    return Metric(short, compute_score, True)
