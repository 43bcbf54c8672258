"""The figures of an evaluation, from the logits and labels of all test images.

They are computed in NumPy, in float64, from what the devices give for each image, so
that strategy, towers and batch size change nothing but the rounding of the logits.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# "Top five": whether the label is among so many largest logits.
TOP = 5

# Of the intervals.
CONFIDENCE = 0.95

# Bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599.
NUM_BINS = 15


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """The predictions for n images.

    Attributes:
        labels: int64 [n].
        predictions: int64 [n], the class of the largest logit, of equal ones the first.
        probabilities: float64 [n], of the predicted class.
        losses: float64 [n].
        in_top: bool [n], see TOP.
        correct_tta: bool [n], whether test-time augmentation predicts the label; None
            without it.
    """

    labels: np.ndarray
    predictions: np.ndarray
    probabilities: np.ndarray
    losses: np.ndarray
    in_top: np.ndarray
    correct_tta: np.ndarray | None = None

    @classmethod
    def of_kinds(
        cls, batches: Iterable[Mapping[bool, Mapping[str, np.ndarray]]]
    ) -> "dict[bool, Outcomes]":
        """Per kind of parameters those of batches as `Evaluator.predictions` gives
        them."""
        parts = collections.defaultdict(list)
        for batch in batches:
            for kind, outputs in batch.items():
                parts[kind].append(_outcomes(**outputs))
        return {
            kind: cls(**{k: np.concatenate([x[k] for x in some]) for k in some[0]})
            for kind, some in parts.items()
        }

    @property
    def correct(self) -> np.ndarray:
        """bool [n]."""
        return self.predictions == self.labels

    @property
    def mistakes(self) -> np.ndarray:
        """int64: the images that are predicted wrongly, in their order."""
        return np.flatnonzero(~self.correct)


def _outcomes(logits, labels, loss, logits_tta=None):
    """The attributes of `Outcomes` for one batch."""
    logits, labels = logits.astype(np.float64), labels.astype(np.int64)
    rows = np.arange(len(labels))
    predictions = np.argmax(logits, 1)
    of_label = logits[rows, labels][:, np.newaxis]
    before = np.arange(logits.shape[1]) < labels[:, np.newaxis]
    num_above = np.sum((logits > of_label) | ((logits == of_label) & before), 1)
    outcomes = {
        "labels": labels,
        "predictions": predictions,
        "probabilities": softmax(logits)[rows, predictions],
        "losses": loss.astype(np.float64),
        "in_top": (num_above < TOP) & ~np.isnan(of_label[:, 0]),
    }
    if logits_tta is not None:
        outcomes["correct_tta"] = np.argmax(logits_tta, 1) == labels
    return outcomes


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities, float64 [n, classes], of logits [n, classes]."""
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinite logits the probabilities are NaN
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)


def figures(outcomes: Outcomes, class_names: Sequence[str]) -> dict[str, Any]:
    """The figures of `result.json`, of Python's types.

    A ratio of nothing, such as the precision of a class that is never predicted, is 0,
    as in scikit-learn with `zero_division=0`.

    Returns:
        "accuracy", "correct", "images", "loss" (the mean); "accuracy_interval";
        "top5_accuracy" and "top5_accuracy_interval" where there are more classes than
        TOP; "accuracy_tta" with test-time augmentation; "calibration_error";
        "macro_f1", the mean over the classes; "classes", a row of each class;
        "confusion_matrix", a row of each label with the counts of its predictions.
    """
    images, correct = len(outcomes.labels), int(outcomes.correct.sum())
    matrix = confusion_matrix(
        outcomes.labels, outcomes.predictions, num_classes=len(class_names)
    )
    rows = per_class(matrix)
    result = {
        "accuracy": correct / images,
        "accuracy_interval": wilson_interval(correct, images),
        "loss": float(outcomes.losses.sum() / images),
        "correct": correct,
        "images": images,
        "calibration_error": calibration_error(
            outcomes.probabilities, outcomes.correct
        ),
        "macro_f1": float(np.mean([row["f1"] for row in rows])),
        "classes": [
            {"name": name} | row for name, row in zip(class_names, rows, strict=True)
        ],
        "confusion_matrix": matrix.tolist(),
    }
    if len(class_names) > TOP:
        in_top = int(outcomes.in_top.sum())
        result["top5_accuracy"] = in_top / images
        result["top5_accuracy_interval"] = wilson_interval(in_top, images)
    if outcomes.correct_tta is not None:
        result["accuracy_tta"] = int(outcomes.correct_tta.sum()) / images
    return result


def confusion_matrix(
    labels: np.ndarray, predictions: np.ndarray, num_classes: int
) -> np.ndarray:
    """int64 [num_classes, num_classes]: images by label (row) and prediction."""
    pairs = labels * num_classes + predictions
    counts = np.bincount(pairs, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def per_class(matrix: np.ndarray) -> list[dict[str, Any]]:
    """Per class of a confusion matrix its images, the precision, recall and F1 of its
    predictions, and intervals of the first two."""
    correct = np.diag(matrix).tolist()
    labeled, predicted = matrix.sum(1).tolist(), matrix.sum(0).tolist()
    return [
        {
            "images": images,
            "precision": _ratio(hits, guesses),
            "recall": _ratio(hits, images),
            "f1": _ratio(2 * hits, images + guesses),
            "precision_interval": wilson_interval(hits, guesses),
            "recall_interval": wilson_interval(hits, images),
        }
        for hits, images, guesses in zip(correct, labeled, predicted, strict=True)
    ]


def _ratio(part, whole):
    return part / whole if whole else 0.0


def wilson_interval(
    successes: int, trials: int, confidence: float = CONFIDENCE
) -> list[float]:
    """The score interval of a binomial proportion (Wilson 1927), [low, high].

    Of no trials it is [0, 1].
    """
    if not trials:
        return [0.0, 1.0]
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = successes / trials, z * z / trials
    center = (share + weight / 2) / (1 + weight)
    reach = math.sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    # At the ends rounding would miss 0 and 1.
    low = center - reach if successes else 0.0
    return [low, center + reach if successes < trials else 1.0]


def calibration_error(probabilities: np.ndarray, correct: np.ndarray) -> float:
    """The expected calibration error: the mean distance between probability and
    accuracy over NUM_BINS equal bins (low, high], weighted by their images.

    Args:
        probabilities: float64 [n], of the predicted classes.
        correct: bool [n].
    """
    bins = np.ceil(np.nan_to_num(probabilities) * NUM_BINS)
    bins = np.clip(bins, 1, NUM_BINS).astype(np.int64) - 1
    surplus = np.bincount(bins, probabilities - correct, NUM_BINS)
    return float(np.abs(surplus).sum() / len(probabilities))
