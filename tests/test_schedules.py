"""Learning rates against plain Python, counted in images."""

import fractions
import math

import pytest
import tensorflow as tf

from towers import config
from towers.schedules import SCHEDULES, create_schedule

NUM_EXAMPLES = 50_000

SHAPE = {
    "num_examples": NUM_EXAMPLES,
    "num_epochs": 60.0,
    "warmup_epochs": 0.0,
    "decay_factor": 0.1,
    "epochs_per_decay": 30.0,
}


def rate_at(images_seen, name, learning_rate=0.1, **changes):
    schedule = create_schedule(name, learning_rate, **SHAPE | changes)
    rate = schedule(tf.constant(images_seen, tf.int64))
    assert rate.dtype == tf.float64 and rate.shape == []
    return float(rate)


@pytest.mark.parametrize("images_seen", [0, 1, 10**7, 2**40])
def test_a_constant_rate_is_constant(images_seen):
    assert rate_at(images_seen, "constant", 0.3) == 0.3


# The staircase.


@pytest.mark.parametrize("stair", [1, 2, 3, 7])
def test_the_rate_falls_exactly_with_the_first_image_of_a_stair(stair):
    images = stair * 30 * NUM_EXAMPLES
    before, after = rate_at(images - 1, "exponential"), rate_at(images, "exponential")
    assert before == pytest.approx(0.1 * 0.1 ** (stair - 1), rel=1e-14)
    assert after == pytest.approx(0.1 * 0.1**stair, rel=1e-14)


def test_the_rate_does_not_fall_between_stairs():
    assert rate_at(0, "exponential") == 0.1
    assert rate_at(30 * NUM_EXAMPLES // 2, "exponential") == 0.1


def test_a_stair_may_be_a_fraction_of_an_epoch():
    # 625 examples * 0.1 epochs: stairs of 62.5 images.
    for images in range(0, 400):
        found = rate_at(
            images,
            "exponential",
            num_examples=625,
            epochs_per_decay=0.1,
            decay_factor=0.5,
        )
        stairs = math.floor(fractions.Fraction(images) / fractions.Fraction(125, 2))
        assert found == 0.1 * 0.5**stairs


@pytest.mark.parametrize("images", [2**24, 2**31, 2**33, 2**40])
def test_large_counts_of_images_stay_exact(images):
    """float32 cannot tell 2**24 and 2**24 + 1 images apart, int32 ends at 2**31."""
    shape = {"num_examples": images + 1, "epochs_per_decay": 1.0, "decay_factor": 0.5}
    for seen, expected in ((images - 1, 0.1), (images, 0.1), (images + 1, 0.05)):
        assert rate_at(seen, "exponential", **shape) == expected


def test_the_tutorials_rate_does_not_depend_on_how_images_are_cut_into_steps():
    schedule = create_schedule("exponential", 0.1, **SHAPE | {"epochs_per_decay": 350})
    for batch_size in (128, 512):
        step = 350 * NUM_EXAMPLES // batch_size
        before = schedule(tf.constant(step * batch_size, tf.int64))
        after = schedule(tf.constant((step + 1) * batch_size, tf.int64))
        assert (float(before), float(after)) == (0.1, pytest.approx(0.01))


# Cosine.


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9])
def test_cosine_follows_half_a_wave(share):
    images = round(share * 60 * NUM_EXAMPLES)
    expected = 0.1 * (1 + math.cos(math.pi * share)) / 2
    assert rate_at(images, "cosine") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("images", [60 * NUM_EXAMPLES, 60 * NUM_EXAMPLES + 1, 2**40])
def test_cosine_ends_at_zero_and_stays_there(images):
    assert rate_at(images, "cosine") == 0
    assert rate_at(60 * NUM_EXAMPLES - 1, "cosine") > 0


# Warm-up.


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_rises_from_zero_in_a_line_and_then_leaves_the_schedule_alone(name):
    warmup = 4 * NUM_EXAMPLES
    for images in (0, 1, warmup // 4, warmup // 2, warmup - 1):
        found = rate_at(images, name, warmup_epochs=4.0)
        expected = images / warmup * rate_at(images, name)
        assert found == pytest.approx(expected, rel=1e-14)
    for images in (warmup, warmup + 1, 31 * NUM_EXAMPLES, 60 * NUM_EXAMPLES):
        assert rate_at(images, name, warmup_epochs=4.0) == rate_at(images, name)


# What Config says of schedules.


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_that_depend_on_the_length_are_listed(name):
    rates = {rate_at(10**6, name, num_epochs=epochs) for epochs in (40.0, 60.0)}
    assert (len(rates) > 1) == (name in config.SCHEDULES_BY_LENGTH)


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_the_staircase_asks_for_the_options_that_are_called_ignored(name):
    options = {"decay_factor": 0.5, "epochs_per_decay": 10.0}
    ignored = config.ignored_options(config.Config(schedule=name, **options))
    changes = rate_at(10**6, name) != rate_at(10**6, name, **options)
    assert changes == (not ignored)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_can_be_compiled(name):
    schedule = create_schedule(name, 0.1, **SHAPE | {"warmup_epochs": 2.0})
    compiled = tf.function(schedule)
    for images in (0, 50_000, 10**6, 2**32):
        seen = tf.constant(images, tf.int64)
        assert float(compiled(seen)) == pytest.approx(float(schedule(seen)), rel=1e-14)
