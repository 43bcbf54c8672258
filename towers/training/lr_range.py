"""Learning-rate range tests: the loss while the rate grows, step by step.

Smith 2015, arXiv:1506.01186, section 3.3. The rate grows exponentially until the
smoothed loss is four times its minimum: Gugger 2018, "How Do You Find A Good Learning
Rate". The suggestion is where the loss falls most steeply, as fastai's `steep`.
"""

import io
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.errors import NumericError
from towers.optim.schedules import Schedule

NAME = "lr_range_test"  # the flag and the picture

# Learning rates. Optimizers that divide by the size of the gradients take smaller ones.
LOWEST, LOWEST_SCALE_FREE, HIGHEST = 1e-5, 1e-6, 100.0

# The number of steps: some epochs, within these bounds.
NUM_EPOCHS, MIN_STEPS, MAX_STEPS = 4, 200, 300

# Standard deviation of the Gaussian means of the loss, in powers of ten of the rate.
SMOOTHING = 0.1

DIVERGED = 4.0  # the loss has diverged at this multiple of the lowest one
MIN_FALL = 0.01  # minimum relative fall of the loss for a suggestion


class LrRange(NamedTuple):
    """Learning rate, loss and its Gaussian mean, float64 [steps]; the suggestion."""

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None


def smooth(rates: np.ndarray, losses: np.ndarray, std: float = SMOOTHING) -> np.ndarray:
    """Return Gaussian means of losses [n]; `std` is in powers of ten."""
    distances = np.log10(rates)[:, None] - np.log10(rates)
    weights = np.exp(-((distances / std) ** 2) / 2)
    return weights @ losses / weights.sum(axis=1)


def range_test(steps: Iterable[tuple[float, float]]) -> LrRange:
    """Take steps of a rate and a loss until it diverges, and suggest a rate."""
    taken = []
    for rate, loss in steps:
        if not math.isfinite(loss):
            break
        taken.append((rate, loss))
        smoothed = smooth(*np.array(taken).T)
        if smoothed[-1] > DIVERGED * smoothed.min():
            break
    if not taken:
        why = "is not finite: check the images and the network"
        raise NumericError(f"the first loss, at the learning rate {rate:g}, {why}")
    (rates, losses), suggestion = np.array(taken).T, None
    begin = smoothed[: max(1, len(taken) // 10)].mean()
    if smoothed.min() < (1 - MIN_FALL) * begin:
        # A loss that has diverged may fall steeply as well.
        falling = slice(smoothed.argmin() + 1)
        wide = smooth(rates, losses, 2 * SMOOTHING)  # a slope is noisier than a loss
        slopes = np.gradient(wide, np.log(rates))[falling]
        suggestion = float(f"{rates[slopes.argmin()]:.2g}")
    return LrRange(rates, losses, smoothed, suggestion)


def num_steps(images_per_step: int, num_examples: int) -> int:
    """Return the number of steps of a test."""
    epochs = math.ceil(NUM_EPOCHS * num_examples / images_per_step)
    return min(max(epochs, MIN_STEPS), MAX_STEPS)


def growing_rate(images_per_step: int, scale_free: bool, num_examples: int) -> Schedule:
    """Return a rate that grows to HIGHEST, by the same factor in each step."""
    last = (num_steps(images_per_step, num_examples) - 1) * images_per_step
    lowest = LOWEST_SCALE_FREE if scale_free else LOWEST

    def rate(images_seen):
        done = tf.cast(images_seen, tf.float64) / last
        return lowest * tf.pow(tf.constant(HIGHEST / lowest, tf.float64), done)

    return rate


def draw(result: LrRange) -> bytes:
    """Return a PNG of the loss against the rate; the suggestion is marked."""
    from matplotlib.figure import Figure  # takes a while

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", xlabel="learning rate", ylabel="loss", title="Learning-rate range"
    )
    axes.plot(result.rates, result.losses, color="0.75", label="of each batch")
    axes.plot(result.rates, result.smoothed, color="C0", label="smoothed")
    begin, lowest = result.smoothed[0], result.smoothed.min()
    height = max(begin - lowest, MIN_FALL * begin)
    axes.set_ylim(lowest - 0.1 * height, begin + 0.5 * height)
    if (rate := result.suggestion) is not None:
        axes.axvline(rate, color="C3", linestyle="--", label=f"suggested: {rate:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
