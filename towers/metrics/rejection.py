"""Rejection of images whose largest probability is below a threshold.

Selective classification (Geifman and El-Yaniv 2017, arXiv:1705.08500): coverage is the
share of images of the classes that are answered, risk the share of wrong answers. Every
answer for an image of no class is wrong.
"""

from typing import Any, NamedTuple

import numpy as np

from towers.errors import ConfigError
from towers.metrics.metrics import ratio
from towers.metrics.predictions import below, precision_recall, softmax, top_class


class Answers(NamedTuple):
    """The most probable classes of n images; those of no class are the last ones."""

    confidences: np.ndarray  # float64 [n], their probabilities; NaN is not answered
    correct: np.ndarray  # bool [n]
    num_known: int  # number of images of a class

    @classmethod
    def of(
        cls, logits: np.ndarray, labels: np.ndarray, temperature: float
    ) -> "Answers":
        """Answer images by logits [n, classes], of which the first have labels."""
        logits, num_known = logits.astype(np.float64) / temperature, len(labels)
        correct = np.zeros(len(logits), bool)
        correct[:num_known] = top_class(logits[:num_known]) == labels
        return cls(softmax(logits).max(1), correct, num_known)

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return precision, coverage and threshold at each different probability."""
        confidences = np.nan_to_num(self.confidences, nan=-1.0)
        is_known = np.arange(len(confidences)) < self.num_known
        precision, _, thresholds = precision_recall(self.correct, confidences)
        _, coverage, _ = precision_recall(is_known, confidences)
        count = np.count_nonzero(thresholds >= 0)
        return precision[:count], coverage[:count], thresholds[:count]

    def figures(self, threshold: float) -> dict[str, Any]:
        """Return "precision", "coverage" and "unknown_rejected", with intervals."""
        answered, known = self.confidences >= threshold, self.num_known
        num_right, count = int(self.correct[answered].sum()), int(answered.sum())
        num_unknown = len(answered) - known
        num_rejected = num_unknown - int(answered[known:].sum())
        return {
            **ratio("precision", num_right, count),
            **ratio("coverage", int(answered[:known].sum()), known),
            **ratio("unknown_rejected", num_rejected, num_unknown),
            "images": known,
            "unknown_images": num_unknown,
        }


def wish_of(precision_at: float | None, coverage_at: float | None) -> tuple[str, float]:
    """Return the name and the value of the one that is given, or raise ConfigError."""
    wishes = {"precision_at": precision_at, "coverage_at": coverage_at}
    given = [(name, value) for name, value in wishes.items() if value is not None]
    if len(given) != 1 or not 0 < given[0][1] <= 1:
        listed = ", ".join(f"{name}={value}" for name, value in wishes.items())
        raise ConfigError(f"{listed}: give one of them, above 0 and at most 1")
    return given[0]


def choose_threshold(answers: Answers, name: str, wish: float) -> float:
    """Return the threshold that grants a wish, or raise ConfigError.

    With "precision_at" it is the lowest one whose answers are at least so precise; with
    "coverage_at" the highest one that answers at least this share of images of the
    classes. It is halfway between two probabilities.
    """
    precision, coverage, thresholds = answers.curve()
    values = precision if name == "precision_at" else coverage
    granting = np.flatnonzero(values >= wish)
    if not granting.size:
        most, count = values.max(initial=0.0), len(answers.correct)
        at = coverage[values == most].max(initial=0.0)
        why = f"at most {most:.4f} can be reached on {count} held-out images"
        raise ConfigError(f"{name}={wish:g}: {why}, at the coverage {at:.4f}")
    return below(thresholds, granting[-1 if name == "precision_at" else 0])


def rejection_line(split: str, figures: dict[str, Any]) -> str:
    """Return the line about a threshold on the images of a split."""
    line = "{}: precision {precision:.4f} ({:.4f} to {:.4f}), coverage {coverage:.4f}"
    if figures["unknown_images"]:
        line += ", {unknown_rejected:.4f} of images of no class are unknown"
    return line.format(split, *figures["precision_interval"], **figures)
