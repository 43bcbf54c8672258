"""Learning-rate schedules: functions of the number of images trained on.

Counting images, not steps, means that no schedule changes with the number of towers or
workers. (The multi-GPU tutorial counts the steps of one tower: with N towers its rate
decays N times late.)
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from towers.config import factories

# A schedule takes the images trained on, an int64 scalar, and gives the rate, float64;
# of a tensor of them it gives the rates.
Schedule = Callable[[tf.Tensor], tf.Tensor]

# Where `one_cycle` begins, as a part of its highest rate; fastai and PyTorch divide by
# 25 as well by default.
CYCLE_START = 0.04

# No run needs a finer part of an epoch, or more images.
_FINEST = Fraction(1, 10**7)
_MOST_IMAGES = 2**100


def exact(number: float) -> Fraction:
    """The fraction that a float approximates: 11/10 for 1.1, and 5/6 for the result of
    5 / 6. A number above 0 stays above 0."""
    if 0 < number < _FINEST:
        return _FINEST
    return Fraction(number).limit_denominator(_FINEST.denominator)


def num_images(epochs: float, num_examples: int) -> Fraction:
    """Number of images in `epochs` of `num_examples` each.

    In floats 1.1 epochs of 50,000 are 55,000.00000000001 images, and a step too many.
    """
    return min(exact(epochs) * num_examples, Fraction(_MOST_IMAGES))


def constant(learning_rate: float) -> Schedule:
    """The same rate throughout."""
    return lambda images_seen: tf.fill(
        tf.shape(images_seen), tf.constant(learning_rate, tf.float64)
    )


def exponential(
    learning_rate: float,
    *,
    num_examples: int,
    decay_factor: float,
    epochs_per_decay: float,
    is_smooth: bool = False,
) -> Schedule:
    """A staircase: `decay_factor` once more every `epochs_per_decay` epochs; or the
    smooth curve through the left edges of the stairs."""
    images_per_decay = num_images(epochs_per_decay, num_examples)
    # Of a fraction both parts, as the quotient is exact where it is a whole number.
    images, decays = map(float, images_per_decay.as_integer_ratio())

    def rate(images_seen):
        stairs = tf.cast(images_seen, tf.float64) * decays / images
        stairs = stairs if is_smooth else tf.floor(stairs)
        return learning_rate * tf.constant(decay_factor, tf.float64) ** stairs

    return rate


def piecewise(
    learning_rate: float,
    *,
    num_examples: int,
    epoch_factors: Sequence[tuple[float, float]],
) -> Schedule:
    """The rate itself, then from each epoch of `epoch_factors`, (epoch, factor) with
    rising epochs, on its factor times it; factors do not accumulate."""
    boundaries = [float(num_images(epoch, num_examples)) for epoch, _ in epoch_factors]
    factors = [1.0, *(factor for _, factor in epoch_factors)]

    def rate(images_seen):
        images = tf.cast(images_seen, tf.float64)[..., None]
        is_past = images >= tf.constant(boundaries, tf.float64)
        piece = tf.reduce_sum(tf.cast(is_past, tf.int32), axis=-1)
        return learning_rate * tf.gather(tf.constant(factors, tf.float64), piece)

    return rate


def cosine(
    learning_rate: float,
    *,
    num_examples: int,
    num_epochs: float,
    min_rate_factor: float = 0.0,
) -> Schedule:
    """Half a cosine from the rate to `min_rate_factor` times the rate at the end of the
    run (arXiv:1608.03983)."""

    def rate(images_seen):
        done = _share_done(images_seen, num_examples, num_epochs)
        fall = 0.5 * (1 + tf.cos(math.pi * done))
        return learning_rate * (min_rate_factor + (1 - min_rate_factor) * fall)

    return rate


def linear(learning_rate: float, *, num_examples: int, num_epochs: float) -> Schedule:
    """A line from the rate to zero at the end of the run."""

    def rate(images_seen):
        return learning_rate * (1 - _share_done(images_seen, num_examples, num_epochs))

    return rate


def one_cycle(
    learning_rate: float, *, num_examples: int, num_epochs: float, peak_fraction: float
) -> Schedule:
    """A line up to the rate, and a line down to zero at the end of the run.

    After Smith (2018, arXiv:1803.09820), whose cycle ends where it began, with a tail
    far below. It begins at CYCLE_START times the rate. `peak_fraction` is the part of
    the run after which the rate is highest, in (0, 1).
    """

    def rate(images_seen):
        done = _share_done(images_seen, num_examples, num_epochs)
        rise = CYCLE_START + (1 - CYCLE_START) * (done / peak_fraction)
        fall = (1 - done) / (1 - peak_fraction)
        return learning_rate * tf.minimum(rise, fall)

    return rate


def plateau(
    learning_rate: float, *, decay_factor: float, plateau_patience: int
) -> Schedule:
    """The same rate throughout: what evaluations make of it is a factor, which
    `restore.scale_rate` gives the trainer."""
    return constant(learning_rate)


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """A factor times another schedule."""
    return lambda images_seen: factor * schedule(images_seen)


def _share_done(images_seen, num_examples, num_epochs):
    all_images = float(num_images(num_epochs, num_examples))
    return tf.minimum(tf.cast(images_seen, tf.float64) / all_images, 1.0)


def create_schedule(
    name: str,
    learning_rate: float,
    *,
    num_examples: int,
    warmup_epochs: float,
    warmup_start_factor: float = 0.0,
    **shape: Any,
) -> Schedule:
    """The named schedule, multiplied by a linear rise to 1 over `warmup_epochs`.

    Args:
        name: in `towers.config.choices.SCHEDULES`, or FILE.py:FUNCTION.
        learning_rate: the initial or highest rate.
        num_examples: training images of an epoch.
        warmup_epochs: length of the rise, in epochs; 0 for none.
        warmup_start_factor: where it begins.
        **shape: num_epochs, decay_factor, epochs_per_decay, epoch_factors,
            min_rate_factor, peak_fraction, plateau_patience; a schedule gets those that
            its signature names.
    """
    schedule = factories.create(
        "schedule",
        name,
        learning_rate=learning_rate,
        num_examples=num_examples,
        **shape,
    )
    if warmup_epochs == 0:
        return schedule

    def rate(images_seen):
        done = _share_done(images_seen, num_examples, warmup_epochs)
        rise = warmup_start_factor + (1 - warmup_start_factor) * done
        return rise * schedule(images_seen)

    return rate
