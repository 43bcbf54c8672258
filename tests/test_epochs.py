"""Epochs in images, compared with decimals and with whole steps."""

import math
from fractions import Fraction

import pytest

from towers.optim.schedules import num_images

NUM_EXAMPLES = (7, 216, 50_000, 1_281_167)


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
def test_epochs_are_the_decimal_that_is_written(num_examples):
    for text in ("0", "0.1", "0.29", "0.55", "1.1", "2.3", "60", "90.125", "300.0001"):
        assert num_images(float(text), num_examples) == Fraction(text) * num_examples


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
def test_epochs_that_were_computed_from_steps_give_these_steps(num_examples):
    for batch_size in (1, 5, 96, 128):
        for steps in (*range(1, 300), 10**4 + 1):
            images = num_images(steps * batch_size / num_examples, num_examples)
            assert math.ceil(images / batch_size) == steps


def test_any_number_above_zero_gives_images_that_a_float_holds():
    for epochs in (5e-324, 1e-300, 1e-8, 1e300, 1.7e308):
        assert 0 < float(num_images(epochs, 50_000)) < math.inf
