"""The time left of a run, and the means over an epoch."""

import dataclasses
import json

import numpy as np
import pytest
import small_runs
from marks import slow
from small_runs import records, small_config

from towers.run.progress import Progress, RunningMean, Stopwatch
from towers.training.train import train


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_runs.use(monkeypatch)


def test_the_time_left_counts_evaluations_and_what_is_written():
    watch = Stopwatch()
    watch.add(1, 30.0)
    assert watch.secs_left(10, 2) is None
    watch.add(10, 5.0)
    watch.add_evaluation(3.0)
    watch.add_evaluation(5.0)
    watch.add_pause(11, 8.0 + 1.1)
    assert watch.secs_left(10, 2) == pytest.approx(10 * 0.5 + 10 * 0.1 + 2 * 4.0)


def test_a_mean_begins_anew_with_an_epoch():
    mean = RunningMean()
    assert mean.means(8) is None
    mean.add(0, (5.0, 8, 2))
    mean.add(0, (1.0, 4, 1))
    assert mean.means(8) == (2.0, 0.5)
    mean.add(1, (3.0, 2, 1))
    assert mean.means(8) == (3.0, 0.25)


def test_the_progress_of_a_loss_that_grows_is_the_same_after_json():
    losses = np.float32([1e30, 2])  # beyond any integer
    record = {"step": 3, "tower_losses": losses}
    progress = Progress(step=3, num_worse=1, num_plateaus=2, open_record=record)
    progress.means = RunningMean(0, 3.0, 1e30, 5.0)
    same = Progress.from_json(json.loads(json.dumps(progress.to_json())))
    np.testing.assert_array_equal(same.open_record.pop("tower_losses"), losses)
    assert same == dataclasses.replace(progress, open_record={"step": 3})


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "replicated", "accumulate_steps": 2, "batch_size": 5},
        slow({"strategy": "async_towers", "max_staleness": 1}),
    ],
)
def test_the_epoch_means_are_those_of_all_batches(tmp_path, options):
    """Also of a run that is stopped within an epoch and continued."""
    options = {
        "num_towers": 2,
        "log_every_steps": 1,
        "eval_every_epochs": 1.0,
    } | options
    train(tmp_path, small_config(**options, max_steps=7))
    train(tmp_path, small_config(**options))
    lines = {line["step"]: line for line in records(tmp_path)}
    for step in (5, 10):
        of_epoch = [lines[s] for s in range(step - 4, step + 1)]
        for name in ("loss", "accuracy"):
            mean = np.mean([line[name] for line in of_epoch])
            assert lines[step][f"epoch_{name}"] == pytest.approx(mean, rel=1e-5)


# Time and speed of steps.


def test_calls_that_compile_are_not_timed_and_laps_are():
    watch = Stopwatch()
    watch.add(1, 30.0, 30.0)
    assert (watch.timed_steps, watch.train_secs, watch.start_secs) == (0, 30.0, 30.0)
    assert watch.lap() is None and watch.steps_in(2.0) == 1
    watch.add(10, 5.0, 4.0)
    watch.add(10, 15.0, 1.0)
    assert watch.lap() == (1.0, 25.0)
    watch.add(6, 3.0)
    assert watch.lap() == watch.lap() == (2.0, 0.0)  # nothing new was timed
    assert (watch.timed_steps, watch.timed_secs, watch.train_secs) == (26, 23.0, 53.0)
    assert watch.start_secs == 30.0


@pytest.mark.parametrize("restarts", [False, True])
def test_a_phase_and_a_restart_warm_up_again(restarts):
    watch = Stopwatch()
    watch.add(1, 30.0)
    watch.add(10, 5.0)
    if restarts:
        watch = Stopwatch(**dataclasses.asdict(watch))
    else:
        watch.begin_phase()
    assert watch.steps_in(2.0) == 1
    watch.add(1, 8.0)
    assert (watch.timed_steps, watch.timed_secs, watch.start_secs) == (10, 5.0, 38.0)
    assert watch.steps_in(2.0) == 1
    watch.add(2, 4.0)
    assert (watch.timed_steps, watch.timed_secs) == (12, 9.0)
    assert watch.steps_in(6.0) == 3
