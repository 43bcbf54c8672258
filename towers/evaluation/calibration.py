"""Proportions with their intervals, and the calibration of probabilities."""

import math
import statistics
from typing import Any

import numpy as np

from towers.evaluation.predictions import LabelSets, Predictions

# Of the intervals.
CONFIDENCE = 0.95

# Bins of the calibration error, as in Guo et al. 2017, arXiv:1706.04599.
NUM_BINS = 15


def ratio(name: str, successes: int, trials: int) -> dict[str, Any]:
    """A proportion under a name, and its interval under NAME_interval."""
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
