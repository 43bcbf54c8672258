"""Proportions with their intervals, and the calibration of probabilities."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from towers.evaluation.predictions import LabelSets, Predictions, sigmoid, softmax

# Of the intervals.
CONFIDENCE = 0.95

# Bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599.
NUM_BINS = 15


def ratio(name: str, successes: int, trials: int) -> dict[str, Any]:
    """A proportion under a name, and its interval under NAME_interval."""
    interval = wilson_interval(successes, trials)
    return {name: successes / max(trials, 1), f"{name}_interval": interval}


def class_counts(
    labels: np.ndarray, classes: np.ndarray, num_classes: int = 0
) -> np.ndarray:
    """int64 [3, classes]: correct predictions of each class, its images, and its
    predictions. Labels and classes are integers [n], or of several labels bool [n,
    classes]."""
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


def class_rows(
    class_names: Sequence[str], labels: np.ndarray, classes: np.ndarray
) -> list[dict[str, Any]]:
    """The rows of "classes" in `figures`."""
    counts = class_counts(labels, classes, len(class_names)).tolist()
    return [
        {"name": name, "images": labeled, "predictions": taken}
        | {"f1": 2 * hits / max(labeled + taken, 1)}
        | ratio("precision", hits, taken)
        | ratio("recall", hits, labeled)
        for name, hits, labeled, taken in zip(class_names, *counts, strict=True)
    ]


def common_figures(predictions: Predictions | LabelSets) -> dict[str, Any]:
    """The figures of images with one label and with several."""
    images, correct = len(predictions.labels), int(predictions.correct.sum())
    result = ratio("accuracy", correct, images) | {
        "loss": float(predictions.losses.mean()),
        "correct": correct,
        "images": images,
        "calibration_error": calibration_error(predictions),
        "macro_f1": mean_f1(predictions.labels, predictions.classes),
    }
    if predictions.correct_tta.size:
        result["accuracy_tta"] = int(predictions.correct_tta.sum()) / images
    return result


def wilson_interval(successes: int, trials: int) -> list[float]:
    """The score interval of a binomial proportion (Wilson 1927), [low, high]; of no
    trials [0, 1]."""
    if not trials:
        return [0.0, 1.0]
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, weight = successes / trials, z * z / trials
    center = (share + weight / 2) / (1 + weight)
    reach = math.sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    # At the ends rounding would miss 0 and 1.
    low = center - reach if successes else 0.0
    return [low, center + reach if successes < trials else 1.0]


def _bins(probabilities):
    """int64 [n], the numbers of the bins: NUM_BINS equal ones (low, high]."""
    bins = np.ceil(np.nan_to_num(probabilities) * NUM_BINS)
    return np.clip(bins, 1, NUM_BINS).astype(np.int64) - 1


def calibration_error(predictions: Predictions | LabelSets) -> float:
    """The mean distance between probability and accuracy over the bins, weighted by
    their images; of label sets by their pairs of an image and a class."""
    probabilities, is_right = predictions.decisions
    surplus = np.bincount(_bins(probabilities), probabilities - is_right, NUM_BINS)
    return float(np.abs(surplus).sum() / len(is_right))


def reliability(predictions: Predictions | LabelSets) -> list[dict[str, Any]]:
    """The reliability diagram: of each bin of the calibration error its bounds "low"
    and "high", "images" (of label sets pairs of an image and a class), and where it has
    any their mean "probability", their "accuracy" and "accuracy_interval"."""
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
    """The temperature, from 1/100 to 100, that minimizes the cross-entropy of logits /
    temperature (Guo et al. 2017, arXiv:1706.04599); labels as of `class_counts`."""
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
