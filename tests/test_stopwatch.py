"""Time and speed of training steps."""

import dataclasses

from towers.run.progress import Stopwatch


def test_the_first_call_of_a_start_is_not_timed():
    watch = Stopwatch()
    watch.add(1, 30.0)
    assert (watch.timed_steps, watch.timed_secs, watch.train_secs) == (0, 0.0, 30.0)
    assert watch.start_secs == 30.0
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


def test_the_first_call_of_a_phase_is_not_timed_and_its_speed_is_its_own():
    watch = Stopwatch()
    watch.add(1, 30.0)
    watch.add(10, 5.0)
    watch.begin_phase()
    assert watch.steps_in(2.0) == 1
    watch.add(1, 8.0)
    assert (watch.timed_steps, watch.timed_secs, watch.start_secs) == (10, 5.0, 38.0)
    assert watch.steps_in(2.0) == 1
    watch.add(2, 4.0)
    assert (watch.timed_steps, watch.timed_secs) == (12, 9.0)
    assert watch.steps_in(6.0) == 3


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
