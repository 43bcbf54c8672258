"""The periods, compared with counting whole images one step at a time."""

import math
from fractions import Fraction

import pytest

from towers.build.periods import Periods
from towers.optim.schedules import num_images

PERIODS = [
    # total_steps, images_per_step, log, summary, checkpoint, images_per_eval
    Periods(100, 10, 7, 20, 15, 170),  # evaluations seldom fall on a step's end
    Periods(100, 10, 7, 0, 0, 0),
    Periods(90, 10, 30, 30, 30, 300),  # all at once
    Periods(60, 10, 100, 0, 0, 5),  # two evaluations' worth of images in each step
    Periods(50, 10, 1, 0, 0, 10),
    Periods(37, 128, 10, 0, 11, Fraction(2001, 2)),
    Periods(1, 8, 5, 5, 5, 50),
    Periods(20, 10, 7, 0, 0, num_images(1e308, 50_000)),
    Periods(200, 3, 50, 0, 0, num_images(0.1, 216)),
]


def is_due(periods, step):
    return (
        periods.logs(step)
        or periods.summarizes(step)
        or periods.saves(step)
        or periods.evaluates(step)
    )


@pytest.mark.parametrize("periods", PERIODS)
def test_evaluations_follow_the_step_that_completes_their_images(periods):
    due, next_images = [], periods.images_per_eval or float("inf")
    for step in range(1, periods.total_steps + 1):
        images = step * periods.images_per_step
        ends = step == periods.total_steps and periods.images_per_eval
        if images >= next_images or ends:
            due.append(step)
        while images >= next_images:
            next_images += periods.images_per_eval
    steps = range(1, periods.total_steps + 1)
    assert [step for step in steps if periods.evaluates(step)] == due
    for begin in (0, 1, periods.total_steps // 2):
        for end in (begin, begin + 1, periods.total_steps - 1, periods.total_steps):
            num_due = sum(begin < step <= end for step in due)
            assert periods.num_evaluations(begin, end) == num_due, (begin, end)


@pytest.mark.parametrize("periods", PERIODS)
def test_what_is_due_keeps_its_period_and_zero_is_never(periods):
    last = periods.total_steps
    for is_due_fn, every, always in (
        (periods.summarizes, periods.summary_every_steps, set()),
        (periods.saves, periods.checkpoint_every_steps, set()),
        (periods.logs, periods.log_every_steps, {1, last}),
    ):
        due_steps = {step for step in range(1, last + 1) if is_due_fn(step)}
        assert due_steps == always | set(range(every, last + 1, every) if every else ())


@pytest.mark.parametrize("periods", PERIODS)
def test_every_run_stops_at_each_step_where_something_is_due(periods):
    steps = range(1, periods.total_steps + 1)
    all_due = [step for step in steps if is_due(periods, step)]
    for first in range(periods.total_steps):
        step, visited = first, []
        while step < periods.total_steps:
            step = periods.next_due(step)
            visited.append(step)
        assert visited == [step for step in all_due if step > first]


@pytest.mark.parametrize("tenths", [1, 3, 7, 11])
def test_a_fraction_of_an_epoch_is_evaluated_when_it_ends(tenths):
    # In floats 1.1 epochs of 50,000 images are 55,000.00000000001.
    for num_examples, batch_size in ((50_000, 100), (216, 3)):
        images = num_images(tenths / 10, num_examples)
        periods = Periods(1000, batch_size, 10**9, 0, 0, images)
        due_steps = {step for step in range(1, 1000) if periods.evaluates(step)}
        ends = (-(-k * tenths * num_examples // (10 * batch_size)) for k in range(1, 9))
        expected = {step for step in ends if step < 1000}
        assert expected == {step for step in due_steps if step <= max(expected)}


def test_with_the_smallest_fraction_of_an_epoch_every_step_is_evaluated():
    for fraction in (5e-324, 1e-312, 1e-300):
        periods = Periods(5, 10, 10**9, 0, 0, num_images(fraction, 50_000))
        assert all(periods.evaluates(step) for step in range(1, 6))
        assert [periods.next_due(step) for step in range(5)] == [*range(1, 6)]


# Epochs in images.


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
