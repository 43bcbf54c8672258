"""The figures of an evaluation, from the logits and labels of all test images.

They are computed in NumPy, in float64, from what the devices give for each image, so
that strategy, towers and batch size change nothing but the rounding of the logits.
"""

import collections
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers.parallel.copies import Weights
from towers.parallel.evaluator import Evaluation

# "Top five": whether the label is among so many largest logits.
TOP = 5

# Of the intervals.
CONFIDENCE = 0.95

# Bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599.
NUM_BINS = 15


class Predictions(NamedTuple):
    """The predictions for n images.

    Attributes:
        labels: int64 [n].
        classes: int64 [n], that of the largest logit, of equal ones the first.
        probabilities: float64 [n], of these classes.
        losses: float64 [n].
        in_top: bool [n], see TOP; [0] where it is not known.
        correct_tta: bool [n], whether test-time augmentation predicts the label; [0]
            without it.
    """

    labels: np.ndarray
    classes: np.ndarray
    probabilities: np.ndarray
    losses: np.ndarray
    in_top: np.ndarray
    correct_tta: np.ndarray

    @property
    def correct(self) -> np.ndarray:
        """bool [n]."""
        return self.classes == self.labels


def predictions_of(
    batches: Iterable[Mapping[Weights, Mapping[str, np.ndarray]]],
) -> Evaluation[Predictions]:
    """The predictions in batches of `Evaluator.predictions`."""
    parts = collections.defaultdict(list)
    for batch in batches:
        for weights, outputs in batch.items():
            parts[weights].append(_predict(**outputs))
    return Evaluation(parts).map(
        lambda x: Predictions(*map(np.concatenate, zip(*x, strict=True)))
    )


def _predict(logits, labels, loss, logits_tta=None):
    logits, labels = logits.astype(np.float64), labels.astype(np.int64)
    correct_tta = [] if logits_tta is None else np.argmax(logits_tta, 1) == labels
    images, classes = np.arange(len(labels)), np.argmax(logits, 1)
    of_label = logits[images, labels][:, np.newaxis]
    is_before = np.arange(logits.shape[1]) < labels[:, np.newaxis]
    num_above = np.sum((logits > of_label) | ((logits == of_label) & is_before), 1)
    return Predictions(
        labels=labels,
        classes=classes,
        probabilities=softmax(logits)[images, classes],
        losses=loss.astype(np.float64),
        in_top=(num_above < TOP) & ~np.isnan(of_label[:, 0]),
        correct_tta=np.array(correct_tta, bool),
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities, float64 [n, classes], of logits [n, classes]."""
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinite logits the probabilities are NaN
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)


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
    """The part of the confusion matrix of the classes with the most mistakes: images of
    a class, or predictions of it, that are wrong.

    Returns:
        The classes, int64 [k] in increasing order, k <= most; the counts of their
        predictions as each other, int64 [k, k]; the numbers of their images, int64 [k].
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


def worst_mistakes(
    labels: np.ndarray, classes: np.ndarray, losses: np.ndarray, most: int
) -> np.ndarray:
    """Indices of the images that are predicted wrongly with the largest losses, at
    most so many; a loss that is not a number is the largest."""
    wrong = np.flatnonzero(labels != classes)
    losses = np.nan_to_num(losses[wrong], nan=np.inf)
    return wrong[np.argsort(-losses, kind="stable")[:most]]


def figures(predictions: Predictions, class_names: Sequence[str]) -> dict[str, Any]:
    """The figures of `result.json`, of Python's types.

    A ratio of nothing, such as the precision of a class that is never predicted, is 0,
    as in scikit-learn with `zero_division=0`. The mean F1 leaves out classes without
    images and predictions, as scikit-learn does by default.

    Returns:
        "accuracy", "correct", "images", "loss" (the mean); "accuracy_interval";
        "top5_accuracy" and "top5_accuracy_interval" where there are more classes than
        TOP; "accuracy_tta" with test-time augmentation; "calibration_error";
        "macro_f1", the mean over the classes; "classes", a row of each class;
        "confusion_matrix", the entries that are not zero, see `confusion_entries`.
    """
    images, correct = len(predictions.labels), int(predictions.correct.sum())
    labels, predicted = predictions.labels, predictions.classes
    counts = [
        np.bincount(x, minlength=len(class_names)).tolist()
        for x in (labels[predictions.correct], labels, predicted)
    ]
    classes = [
        {"name": name, "images": labeled, "predictions": taken}
        | {"f1": 2 * hits / max(labeled + taken, 1)}
        | _ratio("precision", hits, taken)
        | _ratio("recall", hits, labeled)
        for name, hits, labeled, taken in zip(class_names, *counts, strict=True)
    ]
    result = _ratio("accuracy", correct, images) | {
        "loss": float(predictions.losses.mean()),
        "correct": correct,
        "images": images,
        "calibration_error": _calibration_error(predictions),
        "macro_f1": float(np.mean([row["f1"] for row in present(classes)])),
        "classes": classes,
        "confusion_matrix": confusion_entries(
            labels, predicted, len(class_names)
        ).tolist(),
    }
    if len(class_names) > TOP and predictions.in_top.size:
        result |= _ratio("top5_accuracy", int(predictions.in_top.sum()), images)
    if predictions.correct_tta.size:
        result["accuracy_tta"] = int(predictions.correct_tta.sum()) / images
    return result


def present(classes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of classes that have images or predictions."""
    return [row for row in classes if row["images"] or row["predictions"]]


def _ratio(name, successes, trials):
    interval = wilson_interval(successes, trials)
    return {name: successes / max(trials, 1), f"{name}_interval": interval}


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


def _bins(predictions):
    """int64 [n], the numbers of the images' bins: NUM_BINS equal ones (low, high]."""
    bins = np.ceil(np.nan_to_num(predictions.probabilities) * NUM_BINS)
    return np.clip(bins, 1, NUM_BINS).astype(np.int64) - 1


def _calibration_error(predictions):
    """The mean distance between probability and accuracy over the bins, weighted by
    their images."""
    surplus = predictions.probabilities - predictions.correct
    surplus = np.bincount(_bins(predictions), surplus, NUM_BINS)
    return float(np.abs(surplus).sum() / len(predictions.labels))


def reliability(predictions: Predictions) -> list[dict[str, Any]]:
    """The reliability diagram: of each bin of the calibration error its bounds "low"
    and "high", "images", and where it has any their mean "probability", their
    "accuracy" and "accuracy_interval"."""
    bins, rows = _bins(predictions), []
    for number in range(NUM_BINS):
        is_in = bins == number
        images, correct = int(is_in.sum()), int(predictions.correct[is_in].sum())
        row = {"low": number / NUM_BINS, "high": (number + 1) / NUM_BINS}
        row["images"] = images
        if images:
            row["probability"] = float(predictions.probabilities[is_in].mean())
            row |= _ratio("accuracy", correct, images)
        rows.append(row)
    return rows
