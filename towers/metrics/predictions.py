"""Predictions for all images of an evaluation, from their logits and labels."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from towers.parallel.copies import Weights
from towers.parallel.evaluator import Evaluation

# A label counts for the top-5 accuracy among this number of largest logits.
TOP = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for n images of one label each."""

    labels: np.ndarray  # int64 [n]
    classes: np.ndarray  # int64 [n], see `top_class`
    confidences: np.ndarray  # float64 [n], the probabilities of these classes
    losses: np.ndarray  # float64 [n]
    in_top: np.ndarray | None = None  # bool [n], see TOP
    correct_tta: np.ndarray | None = None  # bool [n], with test-time augmentation
    logits: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))

    multi_label = False

    @property
    def correct(self) -> np.ndarray:
        """Return whether each prediction is correct, bool [n]."""
        return self.classes == self.labels

    @property
    def decisions(self) -> tuple[np.ndarray, np.ndarray]:
        """The probabilities, and whether each is of the label, [n]."""
        return self.confidences, self.correct

    def texts(self, index: int, class_names: Sequence[str]) -> tuple[str, str]:
        """Return the label of an image and its predicted class, by name."""
        label, number = class_names[self.labels[index]], self.classes[index]
        return label, "none" if number < 0 else class_names[number]


@dataclasses.dataclass(frozen=True, eq=False)
class LabelSets:
    """Predictions for n images with several labels."""

    labels: np.ndarray  # bool [n, classes]
    logits: np.ndarray  # float32 [n, classes]; NaN counts as the lowest
    losses: np.ndarray  # float64 [n]
    correct_tta: np.ndarray | None = None  # bool [n], exactly the labels with TTA
    thresholds: np.ndarray | None = None  # float64 [classes], of held-out images

    multi_label = True

    @property
    def classes(self) -> np.ndarray:
        """The classes of a probability of at least 1/2, bool [n, classes]."""
        return self.logits >= 0

    @property
    def correct(self) -> np.ndarray:
        """Return whether the predicted classes are exactly the labels, bool [n]."""
        return _is_exact(self.logits, self.labels)

    @property
    def probabilities(self) -> np.ndarray:
        """The probabilities, float64 [n, classes]."""
        return sigmoid(self.logits)

    @property
    def at_thresholds(self) -> "LabelSets | None":
        """The predictions whose `classes` are decided by the thresholds."""
        if self.thresholds is None:
            return None
        decisions = np.int8(2) * (self.probabilities >= self.thresholds) - np.int8(1)
        return LabelSets(self.labels, decisions, self.losses)

    @property
    def scores(self) -> np.ndarray:
        """The logits with -inf for NaN, float32 [n, classes]."""
        return np.nan_to_num(self.logits, nan=-np.inf)

    @functools.cached_property
    def average_precisions(self) -> np.ndarray:
        """The average precision of each class, float64 [classes]."""
        columns = zip(self.labels.T, self.scores.T, strict=True)
        return np.array([average_precision(*column) for column in columns])

    @property
    def confidences(self) -> np.ndarray:
        """The probability of the least certain decision on a class, float64 [n]."""
        return np.abs(self.probabilities - 0.5).min(1) + 0.5

    @property
    def decisions(self) -> tuple[np.ndarray, np.ndarray]:
        """The probabilities, and whether each is of a label, [n * classes]."""
        return self.probabilities.ravel(), self.labels.ravel()

    def texts(self, index: int, class_names: Sequence[str]) -> tuple[str, str]:
        """Return the labels of an image and its predicted classes, by name."""

        def listed(chosen):
            return ", ".join(class_names[x] for x in chosen.nonzero()[0]) or "none"

        return listed(self.labels[index]), listed(self.classes[index])


def predictions_of(
    batches: Iterable[Mapping[Weights, Mapping[str, np.ndarray]]],
) -> Evaluation[Predictions | LabelSets]:
    """Join the batches of `Evaluator.predictions`."""
    parts = collections.defaultdict(list)
    for batch in batches:
        for weights, outputs in batch.items():
            parts[weights].append(_predict(**outputs))
    return Evaluation(parts).map(_joined)


def _joined(parts):
    cls = type(parts[0])
    columns = {
        field.name: [getattr(part, field.name) for part in parts]
        for field in dataclasses.fields(cls)
    }
    return cls(**{k: np.concatenate(x) for k, x in columns.items() if x[0] is not None})


def _predict(logits, labels, loss, logits_tta=None):
    loss, correct_tta = loss.astype(np.float64), None
    if labels.ndim == 2:
        labels = labels > 0
        if logits_tta is not None:
            correct_tta = _is_exact(logits_tta, labels)
        return LabelSets(labels, logits.astype(np.float32), loss, correct_tta)
    logits, labels = logits.astype(np.float64), labels.astype(np.int64)
    if logits_tta is not None:
        correct_tta = top_class(logits_tta) == labels
    images, classes = np.arange(len(labels)), top_class(logits)
    label_logits = logits[images, labels][:, np.newaxis]
    is_before = np.arange(logits.shape[1]) < labels[:, np.newaxis]
    is_above = (logits > label_logits) | ((logits == label_logits) & is_before)
    num_above = np.sum(is_above, 1)
    in_top = (num_above < TOP) & (classes >= 0)
    confidences = softmax(logits)[images, classes]
    in_top = in_top if logits.shape[1] > TOP else None
    return Predictions(labels, classes, confidences, loss, in_top, correct_tta)


def top_class(logits: np.ndarray) -> np.ndarray:
    """Return the class of the largest logit, int64 [n], of equal ones the first.

    It is -1 if a logit is NaN: no label is right.
    """
    return np.where(np.isnan(logits).any(1), -1, np.argmax(logits, 1))


def _is_exact(logits, labels):
    return (((logits >= 0) == labels) & ~np.isnan(logits)).all(1)


def predictions_of_counts(counts: Mapping[str, Any]) -> Predictions | LabelSets:
    """Return the predictions in a result of `Evaluator.counts`."""
    labels, classes, losses = counts["predictions"].T
    correct_tta = None
    if "correct_tta" in counts:  # known is only how many are correct
        correct_tta = np.arange(len(losses)) < counts["correct_tta"]
    if "labels" in counts:
        return LabelSets(counts["labels"], counts["logits"], losses, correct_tta)
    return Predictions(
        labels=labels.astype(np.int64),
        classes=classes.astype(np.int64),
        confidences=counts["probabilities"],
        losses=losses,
        correct_tta=correct_tta,
        logits=counts.get("logits", np.zeros((0, 0))),
    )


def predictions_of_logits(
    logits: np.ndarray, labels: np.ndarray
) -> Predictions | LabelSets:
    """Return predictions whose losses are the cross-entropy."""
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # logits that are not finite
        if labels.ndim == 2:
            losses = (np.logaddexp(0, logits) - labels * logits).mean(1)
        else:
            label_logits = logits[np.arange(len(labels)), labels]
            losses = np.logaddexp.reduce(logits, 1) - label_logits
    return _predict(logits, labels, losses)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities, float64 [n, classes], of logits [n, classes]."""
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite logits have the probability NaN
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return probabilities, float64, of logits; 0 for NaN."""
    logits = np.nan_to_num(logits.astype(np.float64), nan=-np.inf)
    return 0.5 * (1 + np.tanh(0.5 * logits))


def to_probabilities(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """Return probabilities, float64 [n, classes], by softmax or sigmoid."""
    return sigmoid(logits) if multi_label else softmax(logits)


def precision_recall(
    labels: np.ndarray, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return precision, recall and threshold of a class at each different score.

    The highest score is the first. Without labels, bool [n], the recall is 0.
    """
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    hits = np.cumsum(labels[order])[last]
    return hits / (last + 1), hits / max(labels.sum(), 1), scores[last]


def below(scores: np.ndarray, index: int) -> float:
    """Return a threshold halfway between a score, in falling order, and the next."""
    score, lower = scores[index], scores[index + 1] if index + 1 < len(scores) else 0.0
    middle = (score + lower) / 2
    return float(middle if middle > lower else score)


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under `precision_recall`, as scikit-learn; 0 without labels."""
    precision, recall, _ = precision_recall(labels, scores)
    return float(np.diff(recall, prepend=0) @ precision)


def worst_mistakes(predictions: Predictions | LabelSets, most: int) -> np.ndarray:
    """Return the indices of the wrong predictions with the largest losses."""
    wrong = np.flatnonzero(~predictions.correct)
    losses = np.nan_to_num(predictions.losses[wrong], nan=np.inf)
    return wrong[np.argsort(-losses, kind="stable")[:most]]
