"""Learning rates against plain Python and NumPy, counted in images."""

import fractions
import math

import numpy as np
import pytest
import tensorflow as tf

from docs import draw_schedules
from towers.config import checks, config, list_options
from towers.config.choices import SCHEDULES
from towers.optim import schedules
from towers.optim.schedules import create_schedule

NUM_EXAMPLES = 50_000

SHAPE = {
    "num_examples": NUM_EXAMPLES,
    "num_epochs": 60.0,
    "warmup_epochs": 0.0,
    "decay_factor": 0.1,
    "epochs_per_decay": 30.0,
    "epoch_factors": ((10.0, 0.5), (30.5, 0.25), (45.0, 0.0)),
    "peak_fraction": 0.25,
    "plateau_patience": 2,
}


def rate_at(images_seen, name, learning_rate=0.1, **changes):
    schedule = create_schedule(name, learning_rate, **SHAPE | changes)
    rate = schedule(tf.constant(images_seen, tf.int64))
    assert rate.dtype == tf.float64 and rate.shape == []
    return float(rate)


# Where a rate changes: exactly with the first image of a stair or piece. float32 cannot
# tell 2**24 and 2**24 + 1 images apart, int32 ends at 2**31.


@pytest.mark.parametrize("images", [2**24, 2**31, 2**33, 2**40])
def test_large_counts_of_images_stay_exact(images):
    shape = {"num_examples": images + 1, "epochs_per_decay": 1.0, "decay_factor": 0.5}
    for seen, expected in ((images - 1, 0.1), (images, 0.1), (images + 1, 0.05)):
        assert rate_at(seen, "exponential", **shape) == expected
    assert rate_at(images, "constant", 0.3) == 0.3
    for name in ("linear", "cosine", "one_cycle"):
        assert rate_at(images, name, num_examples=images, num_epochs=1.0) == 0


# Against a formula in NumPy, over all epochs and beyond the last.


FORMULAS = {
    "constant": lambda epochs: np.full_like(epochs, 0.1),
    # Evaluations lower it, see test_best_step.py.
    "plateau": lambda epochs: np.full_like(epochs, 0.1),
    "exponential": lambda epochs: 0.1 * 0.1 ** np.floor(epochs / 30),
    "smooth_exponential": lambda epochs: 0.1 * np.exp(np.log(0.1) * epochs / 30),
    "piecewise": lambda epochs: (
        0.1
        * np.array([1, 0.5, 0.25, 0])[np.searchsorted([10, 30.5, 45], epochs, "right")]
    ),
    "cosine": lambda epochs: 0.05 + 0.05 * np.cos(np.pi * np.minimum(epochs / 60, 1)),
    "linear": lambda epochs: 0.1 * np.interp(epochs, [0, 60], [1, 0]),
    "one_cycle": lambda epochs: 0.1 * np.interp(epochs, [0, 15, 60], [0.04, 1, 0]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_equals_its_formula(name):
    schedule = create_schedule(name, 0.1, **SHAPE)
    images = np.arange(0, 70 * NUM_EXAMPLES, 12_500)
    found = schedule(tf.constant(images, tf.int64))
    expected = FORMULAS[name](images / NUM_EXAMPLES)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-17)
    one_by_one = [float(schedule(tf.constant(seen, tf.int64))) for seen in images[::50]]
    np.testing.assert_array_equal(one_by_one, found[::50])
    compiled = tf.function(schedule)(tf.constant(images, tf.int64))
    np.testing.assert_allclose(compiled, found, rtol=1e-14, atol=1e-17)
    rates = {rate_at(10**6, name, num_epochs=epochs) for epochs in (40.0, 60.0)}
    assert (len(rates) > 1) == SCHEDULES[name].by_length


def test_a_cosine_ends_at_a_part_of_the_rate():
    schedule = create_schedule("cosine", 0.1, **SHAPE, min_rate_factor=0.2)
    epochs = np.arange(0, 70.0)
    found = schedule(tf.constant(epochs * NUM_EXAMPLES, tf.int64))
    half = 0.5 * (1 + np.cos(np.pi * np.minimum(epochs / 60, 1)))
    np.testing.assert_allclose(found, 0.02 + (0.1 - 0.02) * half, rtol=1e-12)


# Fractions of an epoch.

FRACTIONS = ("0.1", "0.3", "0.7", "1.1", "2.3", "30")


@pytest.mark.parametrize("epochs", FRACTIONS)
@pytest.mark.parametrize("num_examples", [216, 1000, NUM_EXAMPLES])
def test_every_stair_begins_with_the_first_image_of_its_fraction(epochs, num_examples):
    stairs = np.arange(1, 300)
    images_per_stair = fractions.Fraction(epochs) * num_examples
    first_images = np.array([math.ceil(k * images_per_stair) for k in stairs.tolist()])
    options = SHAPE | {
        "num_examples": num_examples,
        "epochs_per_decay": float(epochs),
        "decay_factor": 0.5,
    }
    schedule = create_schedule("exponential", 1.0, **options)
    np.testing.assert_array_equal(schedule(first_images), 0.5**stairs)
    np.testing.assert_array_equal(schedule(first_images - 1), 0.5 ** (stairs - 1))


@pytest.mark.parametrize("epochs", FRACTIONS)
def test_pieces_warmups_and_runs_end_with_a_fraction_of_an_epoch(epochs):
    end = int(fractions.Fraction(epochs) * NUM_EXAMPLES)
    piece = {"name": "piecewise", "epoch_factors": ((float(epochs), 0.5),)}
    assert [rate_at(end + k, learning_rate=1.0, **piece) for k in (-1, 0)] == [1, 0.5]
    warmup = {"name": "constant", "warmup_epochs": float(epochs)}
    assert rate_at(end - 1, **warmup) < rate_at(end, **warmup) == 0.1
    for name in ("linear", "cosine", "one_cycle"):
        rates = [rate_at(end + k, name, num_epochs=float(epochs)) for k in (-1, 0, 1)]
        assert rates[0] > rates[1] == rates[2] == 0


@pytest.mark.parametrize("epochs", FRACTIONS)
def test_a_parameter_is_frozen_with_the_step_at_which_its_rate_is_zero(epochs):
    matched = {"kernel": list_options.ParamRate("kernel", 1.0, float(epochs))}
    [step] = schedules.freezing_steps(matched, NUM_EXAMPLES, 100).values()
    assert step == fractions.Fraction(epochs) * NUM_EXAMPLES / 100
    schedule = create_schedule("constant", 0.1, **SHAPE)
    _, (rate_fn,) = schedules.create_rate_fns(matched, schedule, 0.1, NUM_EXAMPLES, 100)
    before, after = (rate_fn(tf.constant(step + k, tf.int64)) for k in (-1, 0))
    assert before > after == 0


# Warm-up.


@pytest.mark.parametrize("start", [0.0, 0.3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_rises_in_a_line_and_then_leaves_the_schedule_alone(name, start):
    warmup = 4 * NUM_EXAMPLES
    rise = {"warmup_epochs": 4.0, "warmup_start_factor": start}
    for images in (0, 1, warmup // 4, warmup // 2, warmup - 1):
        found = rate_at(images, name, **rise)
        expected = np.interp(images, [0, warmup], [start, 1]) * rate_at(images, name)
        assert found == pytest.approx(expected, rel=1e-14)
    for images in (warmup, warmup + 1, 31 * NUM_EXAMPLES, 60 * NUM_EXAMPLES):
        assert rate_at(images, name, **rise) == rate_at(images, name)


# What Config says of schedules.


@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - {"plateau"}))
@pytest.mark.parametrize(
    "option,value",
    [
        ("decay_factor", 0.5),
        ("epochs_per_decay", 10.0),
        ("epoch_factors", "1:0.3"),
        ("peak_fraction", 0.9),
        ("min_rate_factor", 0.3),
    ],
)
def test_options_are_called_ignored_where_they_change_no_rate(name, option, value):
    settings = {"schedule": name, "epoch_factors": "1:0.1", option: value}
    lines = checks.ignored_options(config.Config(**settings))
    is_ignored = any(line.startswith(f"{option}=") for line in lines)
    if option == "epoch_factors":
        value = list_options.parse("epoch_factors", value)
    # Where every stair, piece and slope tells.
    images = 38 * NUM_EXAMPLES
    changes = rate_at(images, name) != rate_at(images, name, **{option: value})
    assert changes == (not is_ignored)


def test_the_picture_in_the_docs_shows_every_schedule():
    assert {name for name, _ in draw_schedules.PANELS} == SCHEDULES.keys() - {"plateau"}
