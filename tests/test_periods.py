"""What is due when, compared with counting whole images one step at a time."""

import dataclasses
import itertools

import pytest

from towers.run.periods import Rhythm, Stopwatch

RHYTHMS = [
    # total_steps, images_per_step, log, summary, checkpoint, images_per_eval
    Rhythm(100, 10, 7, 20, 15, 170),  # evaluations seldom fall on a step's end
    Rhythm(100, 10, 7, 0, 0, 0),
    Rhythm(90, 10, 30, 30, 30, 300),  # all at once
    Rhythm(60, 10, 100, 0, 0, 5),  # two evaluations' worth of images in each step
    Rhythm(50, 10, 1, 0, 0, 10),
    Rhythm(37, 128, 10, 0, 11, 1000.5),
    Rhythm(1, 8, 5, 5, 5, 50),
]


def is_due(rhythm, step):
    found = [rhythm.logs(step), rhythm.summarizes(step), rhythm.saves(step)]
    return any([*found, rhythm.evaluates(step)])


@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_evaluations_follow_the_step_that_completes_their_images(rhythm):
    due, next_images = [], rhythm.images_per_eval or float("inf")
    for step in range(1, rhythm.total_steps + 1):
        images = step * rhythm.images_per_step
        ends = step == rhythm.total_steps and rhythm.images_per_eval
        if images >= next_images or ends:
            due.append(step)
        while images >= next_images:
            next_images += rhythm.images_per_eval
    steps = range(1, rhythm.total_steps + 1)
    assert [step for step in steps if rhythm.evaluates(step)] == due


@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_logs_the_first_and_the_last_step_and_each_period(rhythm):
    every, last = rhythm.log_every_steps, rhythm.total_steps
    expected = {1, last, *range(every, last + 1, every)}
    assert {step for step in range(1, last + 1) if rhythm.logs(step)} == expected


@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_summaries_and_checkpoints_keep_their_periods_and_zero_is_never(rhythm):
    for is_due_fn, every in (
        (rhythm.summarizes, rhythm.summary_every_steps),
        (rhythm.saves, rhythm.checkpoint_every_steps),
    ):
        found = {step for step in range(1, rhythm.total_steps + 1) if is_due_fn(step)}
        last = rhythm.total_steps
        assert found == (set(range(every, last + 1, every)) if every else set())


@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_from_wherever_a_run_begins_it_stops_at_every_step_where_something_is_due(
    rhythm,
):
    steps = range(1, rhythm.total_steps + 1)
    all_due = [step for step in steps if is_due(rhythm, step)]
    for first in range(rhythm.total_steps):
        step, visited = first, []
        while step < rhythm.total_steps:
            step = rhythm.next_due(step)
            visited.append(step)
        assert visited == [step for step in all_due if step > first]


def test_a_fraction_of_an_epoch_evaluates_as_often_as_it_should():
    # 1.1 epochs of 50,000 images are 55,000.00000000001 in floating point.
    for fraction in (0.1, 0.3, 0.7, 1.1, 1 / 3):
        rhythm = Rhythm(1000, 100, 10**9, 0, 0, fraction * 50_000)
        found = [step for step in range(1, 1001) if rhythm.evaluates(step)]
        gaps = [b - a for a, b in itertools.pairwise([0, *found])]
        assert max(gaps) <= fraction * 500 + 1
        assert all(gap >= fraction * 500 - 1 for gap in gaps[:-1])


# The stopwatch.


def test_the_first_call_of_a_start_is_not_timed():
    watch = Stopwatch()
    watch.add(1, 30.0)
    assert (watch.timed_steps, watch.timed_secs, watch.train_secs) == (0, 0.0, 30.0)
    assert watch.start_secs == watch.last_start_secs == 30.0
    assert watch.lap() is None
    assert watch.steps_in(2.0) == 1
    watch.add(10, 5.0)
    assert (watch.timed_steps, watch.timed_secs, watch.train_secs) == (10, 5.0, 35.0)
    assert watch.start_secs == 30.0


def test_a_lap_is_the_speed_and_the_wait_since_the_last_one():
    watch = Stopwatch()
    watch.add(1, 30.0, 30.0)
    watch.add(10, 5.0, 4.0)
    watch.add(10, 15.0, 1.0)
    assert watch.lap() == (1.0, 25.0)
    watch.add(6, 3.0)
    assert watch.lap() == (2.0, 0.0)
    assert watch.lap() == (2.0, 0.0)  # nothing new was timed


@pytest.mark.parametrize("waited,percent", [(-3.0, 0.0), (7.0, 100.0)])
def test_a_clock_that_is_set_meanwhile_makes_no_share_beyond_the_whole(waited, percent):
    watch = Stopwatch()
    watch.add(1, 30.0)
    watch.add(10, 5.0, waited)
    assert watch.lap() == (2.0, percent)


def test_the_first_call_of_a_stage_is_not_timed_and_its_pace_is_its_own():
    watch = Stopwatch()
    watch.add(1, 30.0)
    watch.add(10, 5.0)
    watch.begin_stage()
    assert watch.steps_in(2.0) == 1
    watch.add(1, 8.0)
    assert (watch.timed_steps, watch.timed_secs, watch.start_secs) == (10, 5.0, 38.0)
    assert watch.steps_in(2.0) == 1
    watch.add(2, 4.0)
    assert (watch.timed_steps, watch.timed_secs) == (12, 9.0)
    assert watch.steps_in(6.0) == 3


def test_steps_in_a_time_follow_the_mean_of_those_timed():
    watch = Stopwatch()
    watch.add(1, 30.0)
    watch.add(10, 5.0)
    assert watch.steps_in(2.0) == 4
    watch.add(10, 15.0)
    assert watch.steps_in(2.0) == 2
    assert watch.steps_in(0.01) == 1


def test_a_stopwatch_goes_on_after_a_restart_and_warms_up_again():
    watch = Stopwatch()
    watch.add(1, 30.0)
    watch.add(10, 5.0)
    again = Stopwatch(**dataclasses.asdict(watch))
    assert again.steps_in(2.0) == 1
    again.add(1, 30.0)
    assert (again.timed_steps, again.timed_secs, again.train_secs) == (10, 5.0, 65.0)
    assert again.start_secs == 60.0
    assert again.lap() is None
    assert again.steps_in(2.0) == 1
    again.add(10, 1.0)
    assert again.lap().steps_per_sec == 10.0
    assert again.steps_in(2.0) == 20


def test_a_call_that_was_stopped_before_a_step_is_no_speed():
    watch = Stopwatch()
    watch.add(1, 30.0)
    watch.add(0, 5.0)
    assert watch.lap() is None
    assert (watch.timed_secs, watch.train_secs) == (0.0, 35.0)
