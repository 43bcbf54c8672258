"""The figures of an evaluation, from the logits and labels of all test images.

They are computed in NumPy, in float64, from what the devices give for each image, so
that strategy, towers and batch size change nothing but the rounding of the logits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from towers.evaluation.calibration import (
    class_counts,
    class_rows,
    common_figures,
    ratio,
)
from towers.evaluation.label_sets import label_set_figures
from towers.evaluation.predictions import TOP, LabelSets, Predictions


def confusion_entries(
    labels: np.ndarray, classes: np.ndarray, num_classes: int
) -> np.ndarray:
    """The entries of the confusion matrix that are not zero: int64 [m, 3], rows of
    label, predicted class and number of images, in increasing order."""
    pairs, counts = np.unique(labels * num_classes + classes, return_counts=True)
    return np.stack([*np.divmod(pairs, num_classes), counts], 1)


def frequent_mistakes(entries: np.ndarray, most: int) -> np.ndarray:
    """The entries of pairs of different classes with the largest numbers of images."""
    wrong = entries[entries[:, 0] != entries[:, 1]]
    return wrong[np.argsort(-wrong[:, 2], kind="stable")[:most]]


def worst_confusion(
    entries: np.ndarray, num_classes: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The confusion matrix, int64 [k, k], of the k <= `most` classes with the most
    mistakes (images of a class, or predictions of it, that are wrong), after these
    classes in increasing order and before the numbers of their images, int64 [k]."""
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


def figures(
    predictions: Predictions | LabelSets,
    class_names: Sequence[str],
    thresholds: np.ndarray | None = None,
) -> dict[str, Any]:
    """The figures of `result.json`, of Python's types; of label sets see
    `label_set_figures`.

    A ratio of nothing, such as the precision of a class that is never predicted, is 0,
    as in scikit-learn with `zero_division=0`. The mean F1 leaves out classes without
    images and predictions, as scikit-learn does by default.

    Returns:
        "accuracy", "correct", "images", "loss" (the mean); "accuracy_interval";
        "top5_accuracy" and "top5_accuracy_interval" where there are more classes than
        TOP; "accuracy_tta" with test-time augmentation; "calibration_error";
        "macro_f1" and "balanced_accuracy", the mean F1 and recall over the classes
        (with images); "classes", a row of each class;
        "confusion_matrix", the entries that are not zero, see `confusion_entries`.
    """
    if isinstance(predictions, LabelSets):
        return label_set_figures(predictions, class_names, thresholds)
    labels, predicted = predictions.labels, predictions.classes
    classes = class_rows(class_names, labels, predicted)
    result = common_figures(predictions) | {
        "balanced_accuracy": balanced_accuracy(predictions),
        "classes": classes,
        "confusion_matrix": confusion_entries(
            labels, predicted, len(class_names)
        ).tolist(),
    }
    if len(class_names) > TOP and predictions.in_top.size:
        result |= ratio("top5_accuracy", int(predictions.in_top.sum()), len(labels))
    return result


def present(classes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of classes that have images or predictions."""
    return [row for row in classes if row["images"] or row["predictions"]]


def balanced_accuracy(predictions: Predictions) -> float:
    """The mean recall over the classes with images."""
    hits, images, _ = class_counts(predictions.labels, predictions.classes)
    return float(np.mean(hits[images > 0] / images[images > 0]))
