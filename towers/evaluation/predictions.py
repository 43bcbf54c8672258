"""The predictions of an evaluation, from the logits and labels of all images."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers.parallel.copies import Weights
from towers.parallel.evaluator import Evaluation

# "Top five": whether the label is among this number of largest logits.
TOP = 5


class Predictions(NamedTuple):
    """The predictions for n images."""

    labels: np.ndarray  # int64 [n]
    classes: np.ndarray  # int64 [n], of the largest logit, of equal ones the first
    probabilities: np.ndarray  # float64 [n], of these classes
    losses: np.ndarray  # float64 [n]
    in_top: np.ndarray  # bool [n], see TOP; [0] where it is not known
    correct_tta: np.ndarray  # bool [n], with test-time augmentation; [0] without it
    logits: np.ndarray = np.zeros((0, 0))  # [n, classes], where they are kept

    @property
    def correct(self) -> np.ndarray:
        """Bool [n]."""
        return self.classes == self.labels

    @property
    def all_probabilities(self) -> np.ndarray:
        """float64 [n, classes], where the logits are kept."""
        return softmax(self.logits)

    @property
    def confidences(self) -> np.ndarray:
        """float64 [n]: the probability of the predicted class."""
        return self.probabilities

    @property
    def decisions(self) -> tuple[np.ndarray, np.ndarray]:
        """Probability, float64 [n], and whether the prediction is correct, bool [n]."""
        return self.probabilities, self.correct

    def texts(self, index: int, class_names: Sequence[str]) -> tuple[str, str]:
        """The label of an image and its predicted class, by name."""
        return class_names[self.labels[index]], class_names[self.classes[index]]


class LabelSets(NamedTuple):
    """The predictions for n images that may have several labels."""

    labels: np.ndarray  # bool [n, classes]
    logits: np.ndarray  # float32 [n, classes]; NaN counts as the lowest
    losses: np.ndarray  # float64 [n]
    correct_tta: np.ndarray  # bool [n], all labels and no other; [0] without it

    @property
    def classes(self) -> np.ndarray:
        """Bool [n, classes]: the classes whose probability is at least 1/2."""
        return self.logits >= 0

    @property
    def correct(self) -> np.ndarray:
        """Bool [n]: whether these are the labels."""
        return (self.classes == self.labels).all(1)

    @property
    def probabilities(self) -> np.ndarray:
        """float64 [n, classes]."""
        return sigmoid(self.logits)

    all_probabilities = probabilities

    @property
    def scores(self) -> np.ndarray:
        """float32 [n, classes]: the logits in an order of all."""
        return np.nan_to_num(self.logits, nan=-np.inf)

    @property
    def confidences(self) -> np.ndarray:
        """float64 [n]: the probability of the least certain decision on a class."""
        return np.abs(self.probabilities - 0.5).min(1) + 0.5

    @property
    def decisions(self) -> tuple[np.ndarray, np.ndarray]:
        """Probability, float64 [n * classes], and whether it is a label, bool."""
        return self.probabilities.ravel(), self.labels.ravel()

    def texts(self, index: int, class_names: Sequence[str]) -> tuple[str, str]:
        """The labels of an image and its predicted classes, by name."""
        return tuple(
            ", ".join(class_names[x] for x in np.flatnonzero(chosen[index])) or "none"
            for chosen in (self.labels, self.classes)
        )


def predictions_of(
    batches: Iterable[Mapping[Weights, Mapping[str, np.ndarray]]],
) -> Evaluation[Predictions | LabelSets]:
    """The predictions in batches of `Evaluator.predictions`."""
    parts = collections.defaultdict(list)
    for batch in batches:
        for weights, outputs in batch.items():
            parts[weights].append(_predict(**outputs))
    return Evaluation(parts).map(
        lambda x: type(x[0])(*map(np.concatenate, zip(*x, strict=True)))
    )


def _predict(logits, labels, loss, logits_tta=None):
    if labels.ndim == 2:
        labels, logits = labels > 0, logits.astype(np.float32)
        is_right = [] if logits_tta is None else ((logits_tta >= 0) == labels).all(1)
        loss = loss.astype(np.float64)
        return LabelSets(labels, logits, loss, np.array(is_right, bool))
    logits, labels = logits.astype(np.float64), labels.astype(np.int64)
    correct_tta = [] if logits_tta is None else np.argmax(logits_tta, 1) == labels
    images, classes = np.arange(len(labels)), np.argmax(logits, 1)
    label_logits = logits[images, labels][:, np.newaxis]
    is_before = np.arange(logits.shape[1]) < labels[:, np.newaxis]
    is_above = (logits > label_logits) | ((logits == label_logits) & is_before)
    num_above = np.sum(is_above, 1)
    return Predictions(
        labels=labels,
        classes=classes,
        probabilities=softmax(logits)[images, classes],
        losses=loss.astype(np.float64),
        in_top=(num_above < TOP) & ~np.isnan(label_logits[:, 0]),
        correct_tta=np.array(correct_tta, bool),
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities, float64 [n, classes], of logits [n, classes]."""
    logits = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinite logits the probabilities are NaN
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities, float64, of logits; 0 of one that is not a number."""
    logits = np.nan_to_num(logits.astype(np.float64), nan=-np.inf)
    return 0.5 * (1 + np.tanh(0.5 * logits))


def to_probabilities(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """Probabilities, float64 [n, classes], by a softmax, or by a sigmoid per class."""
    return sigmoid(logits) if multi_label else softmax(logits)


def predictions_of_counts(counts: Mapping[str, Any]) -> Predictions | LabelSets:
    """The predictions in a result of `Evaluator.counts`."""
    labels, classes, losses = counts["predictions"].T
    unknown = np.zeros(0, bool)
    if "labels" in counts:
        return LabelSets(counts["labels"], counts["logits"], losses, unknown)
    return Predictions(
        labels=labels.astype(np.int64),
        classes=classes.astype(np.int64),
        probabilities=counts["probabilities"],
        losses=losses,
        in_top=unknown,
        correct_tta=unknown,
        logits=counts.get("logits", np.zeros((0, 0))),
    )


def worst_mistakes(predictions: Predictions | LabelSets, most: int) -> np.ndarray:
    """Return the indices of the wrong predictions with the largest losses."""
    wrong = np.flatnonzero(~predictions.correct)
    losses = np.nan_to_num(predictions.losses[wrong], nan=np.inf)
    return wrong[np.argsort(-losses, kind="stable")[:most]]
