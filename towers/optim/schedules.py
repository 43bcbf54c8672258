"""Learning rates as functions of the images seen.

Counting images, not steps, means that no schedule changes with the number of towers or
workers. (The multi-GPU tutorial counts the steps of one tower: with N towers its rate
decays N times late.)
"""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

# A schedule takes the images seen, an int64 scalar, and gives the rate, float64; of a
# tensor of them it gives the rates.
Schedule = Callable[[tf.Tensor], tf.Tensor]

# Where `one_cycle` begins, as a part of its highest rate; fastai and PyTorch divide by
# 25 as well unless told otherwise.
CYCLE_START = 0.04


def constant(learning_rate: float, **_) -> Schedule:
    return lambda images_seen: tf.fill(
        tf.shape(images_seen), tf.constant(learning_rate, tf.float64)
    )


def exponential(learning_rate: float, **options) -> Schedule:
    """A staircase: `decay_factor` once more every `epochs_per_decay` epochs."""
    return _exponential(learning_rate, tf.floor, **options)


def smooth_exponential(learning_rate: float, **options) -> Schedule:
    """The curve through the left edges of the stairs of `exponential`."""
    return _exponential(learning_rate, tf.identity, **options)


def _exponential(
    learning_rate, stairs_of, *, num_examples, decay_factor, epochs_per_decay, **_
):
    images_per_decay = num_examples * epochs_per_decay

    def rate(images_seen):
        stairs = stairs_of(tf.cast(images_seen, tf.float64) / images_per_decay)
        return learning_rate * tf.constant(decay_factor, tf.float64) ** stairs

    return rate


def piecewise(
    learning_rate: float,
    *,
    num_examples: int,
    epoch_factors: Sequence[tuple[float, float]],
    **_,
) -> Schedule:
    """The rate itself, then from each epoch of `epoch_factors` on its factor times it.

    Args:
        epoch_factors: (epoch, factor), the epochs rising; factors do not accumulate.
    """
    boundaries = [epoch * num_examples for epoch, _ in epoch_factors]
    factors = [1.0, *(factor for _, factor in epoch_factors)]

    def rate(images_seen):
        seen = tf.cast(images_seen, tf.float64)[..., None]
        passed = seen >= tf.constant(boundaries, tf.float64)
        piece = tf.reduce_sum(tf.cast(passed, tf.int32), axis=-1)
        return learning_rate * tf.gather(tf.constant(factors, tf.float64), piece)

    return rate


def cosine(
    learning_rate: float, *, num_examples: int, num_epochs: float, **_
) -> Schedule:
    """Half a cosine from the rate to zero at the end of the run (arXiv:1608.03983)."""

    def rate(images_seen):
        done = _share_done(images_seen, num_examples * num_epochs)
        return learning_rate * 0.5 * (1 + tf.cos(math.pi * done))

    return rate


def linear(
    learning_rate: float, *, num_examples: int, num_epochs: float, **_
) -> Schedule:
    """A line from the rate to zero at the end of the run."""

    def rate(images_seen):
        return learning_rate * (1 - _share_done(images_seen, num_examples * num_epochs))

    return rate


def one_cycle(
    learning_rate: float,
    *,
    num_examples: int,
    num_epochs: float,
    peak_fraction: float,
    **_,
) -> Schedule:
    """A line up to the rate, and a line down to zero at the end of the run.

    After Smith (2018, arXiv:1803.09820), whose cycle ends where it began, with a tail
    far below. It begins at CYCLE_START times the rate.

    Args:
        peak_fraction: part of the run after which the rate is highest, in (0, 1).
    """

    def rate(images_seen):
        done = _share_done(images_seen, num_examples * num_epochs)
        rise = CYCLE_START + (1 - CYCLE_START) * (done / peak_fraction)
        fall = (1 - done) / (1 - peak_fraction)
        return learning_rate * tf.minimum(rise, fall)

    return rate


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """A factor times another schedule."""
    return lambda images_seen: factor * schedule(images_seen)


def _share_done(images_seen, num_images):
    return tf.minimum(tf.cast(images_seen, tf.float64) / num_images, 1.0)


SCHEDULES = {
    "constant": constant,
    "exponential": exponential,
    "smooth_exponential": smooth_exponential,
    "piecewise": piecewise,
    "cosine": cosine,
    "linear": linear,
    "one_cycle": one_cycle,
}


def create_schedule(
    name: str, learning_rate: float, *, num_examples: int, warmup_epochs: float, **shape
) -> Schedule:
    """The named schedule, multiplied by a linear rise from 0 over `warmup_epochs`.

    Args:
        name: a key of SCHEDULES.
        learning_rate: the initial or highest rate.
        num_examples: training images of an epoch.
        warmup_epochs: length of the rise, in epochs; 0 for none.
        **shape: what the schedules take: num_epochs, decay_factor, epochs_per_decay,
            epoch_factors, peak_fraction.
    """
    schedule = SCHEDULES[name](learning_rate, num_examples=num_examples, **shape)
    if warmup_epochs == 0:
        return schedule
    warmup_images = num_examples * warmup_epochs

    def rate(images_seen):
        rise = tf.minimum(tf.cast(images_seen, tf.float64) / warmup_images, 1.0)
        return rise * schedule(images_seen)

    return rate
