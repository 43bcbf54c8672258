"""The figures of an evaluation, from the logits and labels of all test images.

They are computed in NumPy, in float64, from what the devices give for each image, so
that strategy, towers and batch size change nothing but the rounding of the logits.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers.config import choices, factories, parse_json
from towers.errors import ConfigError
from towers.evaluation.predictions import TOP, LabelSets, Predictions, sigmoid, softmax
from towers.messages import one_line

Figures = Mapping[str, Any]  # see `figures`

# Of the intervals.
CONFIDENCE = 0.95

# Bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599.
NUM_BINS = 15


def figures(
    predictions: Predictions | LabelSets,
    class_names: Sequence[str],
    thresholds: np.ndarray | None = None,
) -> dict[str, Any]:
    """The figures of `result.json`, of Python's types. Label sets are predicted at 1/2,
    and where there are `thresholds`, float64 [classes], also at these.

    A ratio of nothing, such as the precision of a class that is never predicted, is 0,
    as in scikit-learn with `zero_division=0`. The mean F1 leaves out classes without
    images and predictions, as scikit-learn does by default.

    Returns:
        "accuracy", "correct", "images", "loss" (the mean); "accuracy_interval";
        "accuracy_tta" with test-time augmentation; "calibration_error"; "macro_f1", the
        mean F1 over the classes; "classes", a row of each class. With one label an
        image "balanced_accuracy", the mean recall over the classes with images;
        "top5_accuracy" and its interval where there are more classes than TOP;
        "confusion_matrix", see `confusion_entries`. Of label sets "accuracy" is the
        fraction of images whose labels are all predicted, and no others; "map" the mean
        of the average precisions of classes with images, "map_micro" of all pairs of an
        image and a class; "micro_f1" of these pairs.
    """
    labels, classes = predictions.labels, predictions.classes
    images, correct = len(labels), int(predictions.correct.sum())
    counts = class_counts(labels, classes, len(class_names)).tolist()
    rows = [
        {"name": name, "images": labeled, "predictions": taken}
        | {"f1": 2 * hits / max(labeled + taken, 1)}
        | ratio("precision", hits, taken)
        | ratio("recall", hits, labeled)
        for name, hits, labeled, taken in zip(class_names, *counts, strict=True)
    ]
    result = ratio("accuracy", correct, images) | {
        "loss": float(predictions.losses.mean()),
        "correct": correct,
        "images": images,
        "calibration_error": calibration_error(predictions),
        "macro_f1": mean_f1(labels, classes),
        "classes": rows,
    }
    if predictions.correct_tta.size:
        result["accuracy_tta"] = int(predictions.correct_tta.sum()) / images
    if isinstance(predictions, LabelSets):
        return result | _label_set_figures(predictions, rows, thresholds)
    entries = confusion_entries(labels, classes, len(class_names))
    result["confusion_matrix"] = entries.tolist()
    result["balanced_accuracy"] = balanced_accuracy(predictions)
    if len(class_names) > TOP and predictions.in_top.size:
        result |= ratio("top5_accuracy", int(predictions.in_top.sum()), images)
    return result


def _label_set_figures(predictions, rows, thresholds):
    """The figures of label sets alone; adds columns to the rows of the classes."""
    labels, scores = predictions.labels, predictions.scores
    for row, *columns in zip(rows, labels.T, scores.T, strict=True):
        row["average_precision"] = average_precision(*columns)
    each = [row["average_precision"] for row in rows if row["images"]]
    result = {
        "map": float(np.mean(each)) if each else 0.0,
        "map_micro": average_precision(labels.ravel(), scores.ravel()),
        "micro_f1": _micro_f1(labels, predictions.classes),
    }
    if thresholds is not None:
        chosen = labels, predictions.probabilities >= thresholds
        result["macro_f1_at_thresholds"] = mean_f1(*chosen)
        result["micro_f1_at_thresholds"] = _micro_f1(*chosen)
        for row, threshold in zip(rows, thresholds.tolist(), strict=True):
            row["threshold"] = threshold
    return result


def _micro_f1(labels, classes):
    """F1 over all pairs of an image and a class."""
    total = labels.sum() + classes.sum()
    return float(2 * (labels & classes).sum() / max(total, 1))


def ratio(name: str, successes: int, trials: int) -> dict[str, Any]:
    """A proportion under a name, and its interval under NAME_interval."""
    interval = wilson_interval(successes, trials)
    return {name: successes / max(trials, 1), f"{name}_interval": interval}


def wilson_interval(successes: int, trials: int) -> list[float]:
    """The score interval of a binomial proportion, [low, high] (Wilson 1927)."""
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
    """Count correct predictions, images and predictions, int64 [3, classes], of labels
    and classes [n], or bool [n, classes].
    """
    if labels.ndim == 2:
        return np.array([x.sum(0) for x in (labels & classes, labels, classes)])
    num_classes = num_classes or 1 + max(labels.max(), classes.max())
    each = labels[labels == classes], labels, classes
    return np.array([np.bincount(x, minlength=num_classes) for x in each])


def mean_f1(labels: np.ndarray, classes: np.ndarray) -> float:
    """The mean F1 over the classes with images or predictions; 0 without any."""
    hits, labeled, taken = class_counts(labels, classes)
    total = labeled + taken
    each = 2 * hits[total > 0] / total[total > 0]
    return float(each.mean()) if each.size else 0.0


def balanced_accuracy(predictions: Predictions) -> float:
    """The mean recall over the classes with images."""
    hits, images, _ = class_counts(predictions.labels, predictions.classes)
    return float(np.mean(hits[images > 0] / images[images > 0]))


def confusion_entries(
    labels: np.ndarray, classes: np.ndarray, num_classes: int
) -> np.ndarray:
    """Return rows of label, class and number of images that is not 0."""
    pairs, counts = np.unique(labels * num_classes + classes, return_counts=True)
    return np.stack([*np.divmod(pairs, num_classes), counts], 1)


def frequent_mistakes(entries: np.ndarray, most: int) -> np.ndarray:
    """The entries of pairs of different classes with the largest numbers of images."""
    wrong = entries[entries[:, 0] != entries[:, 1]]
    return wrong[np.argsort(-wrong[:, 2], kind="stable")[:most]]


def worst_confusion(
    entries: np.ndarray, num_classes: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the classes with the most mistakes, in increasing order, their confusion
    matrix, and the numbers of their images.
    """
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
    """int64 [n], the numbers of the bins: NUM_BINS equal ones (low, high]."""
    bins = np.ceil(np.nan_to_num(probabilities) * NUM_BINS)
    return np.clip(bins, 1, NUM_BINS).astype(np.int64) - 1


def calibration_error(predictions: Predictions | LabelSets) -> float:
    """Return the mean distance of probability and accuracy over the bins."""
    probabilities, is_right = predictions.decisions
    surplus = np.bincount(_bins(probabilities), probabilities - is_right, NUM_BINS)
    return float(np.abs(surplus).sum() / len(is_right))


def reliability(predictions: Predictions | LabelSets) -> list[dict[str, Any]]:
    """Return the bins of the calibration error: "low", "high" and "images", and if it
    has any their mean "probability", "accuracy" and "accuracy_interval".
    """
    probabilities, is_right = predictions.decisions
    bins, rows = _bins(probabilities), []
    for number in range(NUM_BINS):
        is_in = bins == number
        images, correct = int(is_in.sum()), int(is_right[is_in].sum())
        row = {"low": number / NUM_BINS, "high": (number + 1) / NUM_BINS}
        row["images"] = images
        if images:
            row["probability"] = float(probabilities[is_in].mean())
            row |= ratio("accuracy", correct, images)
        rows.append(row)
    return rows


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature of the lowest cross-entropy (arXiv:1706.04599)."""
    logits = logits.astype(np.float64)
    multi_label = labels.ndim == 2
    to_probabilities = sigmoid if multi_label else softmax
    targets = labels if multi_label else np.eye(logits.shape[1])[labels]

    def slope(log_temperature):
        """Sign of the derivative of the convex cross-entropy over 1 / temperature."""
        probabilities = to_probabilities(logits * math.exp(-log_temperature))
        return np.sum(logits * (probabilities - targets))

    low, high = -math.log(100), math.log(100)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.exp((low + high) / 2)


# Label sets.


def precision_recall(
    labels: np.ndarray, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The precision-recall curve of a class: precision and recall, float64 [m], and the
    score from which on images are predicted, for each of the m different scores, the
    highest first. Without labels the recall is 0. Labels are bool, scores float [n].
    """
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    hits = np.cumsum(labels[order])[last]
    return hits / (last + 1), hits / max(labels.sum(), 1), scores[last]


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """The area under the `precision_recall` curve, as scikit-learn computes it; 0
    without labels.
    """
    precision, recall, _ = precision_recall(labels, scores)
    return float(np.diff(recall, prepend=0) @ precision)


def mean_average_precision(predictions: LabelSets) -> float:
    """The mean over the classes with images; 0 where there are none."""
    labels, scores = predictions.labels, predictions.scores
    each = [
        average_precision(labels[:, c], scores[:, c])
        for c in labels.any(0).nonzero()[0]
    ]
    return float(np.mean(each)) if each else 0.0


def best_thresholds(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """float64 [classes]: per class the threshold with the highest F1, halfway between
    two probabilities; images with at least this probability are predicted to have the
    class. 1/2 for a class without images. Both arguments are [n, classes].
    """
    thresholds = np.full(labels.shape[1], 0.5)
    for number in np.flatnonzero(labels.any(0)):
        precision, recall, scores = precision_recall(
            labels[:, number], probabilities[:, number]
        )
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
        best = int(f1.argmax())
        lower = scores[best + 1] if best + 1 < len(scores) else 0.0
        middle = (scores[best] + lower) / 2
        thresholds[number] = middle if middle > lower else scores[best]
    return thresholds


def thresholds_json(predictions: LabelSets, class_names: Sequence[str]) -> str:
    """The content of `thresholds.json`: `best_thresholds` by the names of classes."""
    values = best_thresholds(predictions.labels, predictions.probabilities).tolist()
    return json.dumps(dict(zip(class_names, values, strict=True)), indent=2) + "\n"


def read_thresholds(
    path: pathlib.Path, class_names: Sequence[str]
) -> np.ndarray | None:
    """float64 [classes]: the thresholds in a file; None where there is no file.
    ConfigError where it has no probability for each class.
    """
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


# Metrics of --best_by.

# In each evaluation during training, see `report.figures_of_counts`.
FIGURES_OF_COUNTS = (
    *("correct", "images", "accuracy", "accuracy_tta", "loss", "map", "macro_f1"),
    "predictions",
)


class Metric(NamedTuple):
    """A metric of the predictions for all images; NaN is worse than any number."""

    name: str  # in records, after the split
    function: Callable[[Predictions | LabelSets], float]
    is_recorded: bool  # whether a run records it next to the usual ones

    def score(self, figures: Figures) -> float:
        """The metric of an evaluation, by `figures_of_counts`. What a run records,
        and the mAP, which takes long, are not computed again.
        """
        if self.is_recorded:
            return figures[self.name]
        if self.name == "map":
            return figures["map"]
        return self.function(figures["predictions"])


def create_metric(name: str) -> Metric:
    """Return the metric of `--best_by`, by name or FILE.py:FUNCTION of labels and
    probabilities [n, classes]. ConfigError if there is no such function, it has the
    name of a figure, or gives no number.
    """
    function = factories.resolve("best_by", name)
    if not choices.find("best_by", name).is_in_a_file:
        usual = "accuracy", "loss", "map"
        return Metric(name, function, name not in usual)
    short = name.rpartition(":")[2]
    if short in FIGURES_OF_COUNTS:
        way = "rename the function"
        raise ConfigError(f"best_by={name}: {short} is another figure; {way}")

    def compute(predictions):
        number = function(predictions.labels, predictions.all_probabilities)
        try:
            return float(number)
        except (TypeError, ValueError):
            reason = f"gave {type(number).__name__}, and not a number"
            raise ConfigError(f"best_by={name}: {reason}") from None

    return Metric(short, compute, True)


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
