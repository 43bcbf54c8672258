"""Learning rates as functions of the images seen.

Counting images, not steps, means that no schedule changes with the number of towers or
workers. (The multi-GPU tutorial counts the steps of one tower: with N towers its rate
decays N times late.)
"""

import math
from collections.abc import Callable

import tensorflow as tf

# A schedule takes the images seen, an int64 scalar, and gives the rate, float64.
Schedule = Callable[[tf.Tensor], tf.Tensor]


def constant(learning_rate: float, **_) -> Schedule:
    return lambda images_seen: tf.constant(learning_rate, tf.float64)


def exponential(
    learning_rate: float,
    *,
    num_examples: int,
    decay_factor: float,
    epochs_per_decay: float,
    **_,
) -> Schedule:
    """A staircase: `decay_factor` once more every `epochs_per_decay` epochs."""
    images_per_decay = num_examples * epochs_per_decay

    def rate(images_seen):
        stairs = tf.floor(tf.cast(images_seen, tf.float64) / images_per_decay)
        return learning_rate * tf.constant(decay_factor, tf.float64) ** stairs

    return rate


def cosine(
    learning_rate: float, *, num_examples: int, num_epochs: float, **_
) -> Schedule:
    """Half a cosine from the rate to zero at the end of the run (arXiv:1608.03983)."""
    num_images = num_examples * num_epochs

    def rate(images_seen):
        done = tf.minimum(tf.cast(images_seen, tf.float64) / num_images, 1.0)
        return learning_rate * 0.5 * (1 + tf.cos(math.pi * done))

    return rate


SCHEDULES = {"constant": constant, "exponential": exponential, "cosine": cosine}


def create_schedule(
    name: str, learning_rate: float, *, num_examples: int, warmup_epochs: float, **shape
) -> Schedule:
    """The named schedule, multiplied by a linear rise from 0 over `warmup_epochs`.

    Args:
        name: a key of SCHEDULES.
        learning_rate: the initial or highest rate.
        num_examples: training images of an epoch.
        warmup_epochs: length of the rise, in epochs; 0 for none.
        **shape: what the schedules take: num_epochs, decay_factor, epochs_per_decay.
    """
    schedule = SCHEDULES[name](learning_rate, num_examples=num_examples, **shape)
    if warmup_epochs == 0:
        return schedule
    warmup_images = num_examples * warmup_epochs

    def rate(images_seen):
        rise = tf.minimum(tf.cast(images_seen, tf.float64) / warmup_images, 1.0)
        return rise * schedule(images_seen)

    return rate
