"""Figures of images that may have several labels, or none; computed as `figures`."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from towers.config import parse_json
from towers.errors import ConfigError, one_line
from towers.evaluation.calibration import class_rows, common_figures, mean_f1
from towers.evaluation.predictions import LabelSets


def precision_recall(
    labels: np.ndarray, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The precision-recall curve of a class: precision and recall, float64 [m], and the
    score from which on images are predicted, for each of the m different scores, the
    highest first. Without labels the recall is 0. The labels are bool [n]."""
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    hits = np.cumsum(labels[order])[last]
    return hits / (last + 1), hits / max(labels.sum(), 1), scores[last]


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """The area under the precision-recall curve as a sum of rectangles, as scikit-learn
    has it; 0 without labels."""
    precision, recall, _ = precision_recall(labels, scores)
    return float(np.diff(recall, prepend=0) @ precision)


def best_thresholds(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """float64 [classes]: per class the threshold with the highest F1, halfway between
    two probabilities; images with at least this probability are predicted to have the
    class. 1/2 for a class without images. Both arguments are [n, classes]."""
    thresholds = np.full(labels.shape[1], 0.5)
    for number in np.flatnonzero(labels.any(0)):
        precision, recall, scores = precision_recall(
            labels[:, number], probabilities[:, number]
        )
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
        best = int(f1.argmax())
        lower = scores[best + 1] if best + 1 < len(scores) else 0.0
        thresholds[number] = (scores[best] + lower) / 2
    return thresholds


def thresholds_json(predictions: LabelSets, class_names: Sequence[str]) -> str:
    """The content of `thresholds.json`: `best_thresholds` by the names of classes."""
    values = best_thresholds(predictions.labels, predictions.probabilities).tolist()
    return json.dumps(dict(zip(class_names, values, strict=True)), indent=2) + "\n"


def read_thresholds(
    path: pathlib.Path, class_names: Sequence[str]
) -> np.ndarray | None:
    """float64 [classes]: the thresholds in a file; None where there is no file.
    ConfigError where it has no probability for each class."""
    try:
        values = parse_json(path.read_bytes())
        thresholds = np.array([values[name] for name in class_names], np.float64)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path}: has no threshold for each class ({one_line(error)}); remove it, "
            "and the next best evaluation of the training writes it anew"
        ) from None
    return thresholds


def mean_average_precision(predictions: LabelSets) -> float:
    """The mean over the classes with images; 0 where there are none."""
    scores = np.nan_to_num(predictions.logits, nan=-np.inf)
    each = [
        average_precision(predictions.labels[:, number], scores[:, number])
        for number in np.flatnonzero(predictions.labels.any(0))
    ]
    return float(np.mean(each)) if each else 0.0


def _micro_f1(labels, classes):
    """F1 over all pairs of an image and a class."""
    total = labels.sum() + classes.sum()
    return float(2 * (labels & classes).sum() / max(total, 1))


def label_set_figures(
    predictions: LabelSets,
    class_names: Sequence[str],
    thresholds: np.ndarray | None = None,
) -> dict[str, Any]:
    """The figures of label sets in `result.json`, of Python's types; ratios of nothing
    are 0.

    "map" is the mean of the average precisions of classes with images, "map_micro" of
    all pairs of an image and a class; "accuracy" the fraction of images whose labels
    are all predicted, and no others; F1 at 1/2, and at the thresholds where they are
    given.
    """
    labels, classes = predictions.labels, predictions.classes
    scores = np.nan_to_num(predictions.logits, nan=-np.inf)
    rows = class_rows(class_names, labels, classes)
    for row, *columns in zip(rows, labels.T, scores.T, strict=True):
        row["average_precision"] = average_precision(*columns)
    each = [row["average_precision"] for row in rows if row["images"]]
    result = common_figures(predictions) | {
        "map": float(np.mean(each)) if each else 0.0,
        "map_micro": average_precision(labels.ravel(), scores.ravel()),
        "micro_f1": _micro_f1(labels, classes),
        "classes": rows,
    }
    if thresholds is not None:
        chosen = labels, predictions.probabilities >= thresholds
        result["macro_f1_at_thresholds"] = mean_f1(*chosen)
        result["micro_f1_at_thresholds"] = _micro_f1(*chosen)
        for row, threshold in zip(rows, thresholds.tolist(), strict=True):
            row["threshold"] = threshold
    return result
