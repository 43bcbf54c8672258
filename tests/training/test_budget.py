"""A time budget, `train(..., minutes=3)`: the length of the run that it chooses."""

import dataclasses
import math

import numpy as np
import pytest
from small_runs import small_config

from towers import train
from towers.errors import ConfigError
from towers.training import budget

STEP_SECS, EVALUATION_SECS, START_SECS = 0.5, 2.0, 10.0


@pytest.fixture
def timed(monkeypatch):
    """Fixed times in place of measured ones."""

    def time_run(trial, heartbeat):
        secs = STEP_SECS * trial.parts.last_step
        secs_of = {"linear probe": 1.0, "compiling": START_SECS - 1}
        secs_of |= {"input": secs / 5, "steps": 3 * secs / 5, "checkpoints": secs / 5}
        return secs_of, EVALUATION_SECS

    monkeypatch.setattr(budget, "time_run", time_run)


@pytest.mark.parametrize("every", [0.0, 0.01])
def test_the_length_is_the_longest_that_fits(timed, tmp_path, every):
    config = small_config(eval_every_epochs=every)
    chosen = budget.with_budget(tmp_path / "run", config, minutes=2.0)

    def secs(num_epochs):
        num_steps = math.ceil(num_epochs * 10_000 / config.batch_size)
        evaluations = math.ceil(num_epochs / every) if every else 0
        return START_SECS + STEP_SECS * num_steps + EVALUATION_SECS * evaluations

    least = 120 * 0.97 - budget.REPORT_SECS - 4  # to build the run takes some, too
    assert secs(chosen.num_epochs) <= 120 - budget.REPORT_SECS
    assert secs(chosen.num_epochs + 0.01) >= least - EVALUATION_SECS


def test_no_time_for_a_step_is_an_error(timed, tmp_path):
    with pytest.raises(ConfigError, match=r"minutes=0.2 is too short.* take 1\d s"):
        train(tmp_path / "run", small_config(), minutes=0.2)
    assert not (tmp_path / "run").exists()


def test_a_continued_run_keeps_its_length(timed, tmp_path, monkeypatch):
    config = small_config(schedule="cosine", eval_every_epochs=5.0, warmup_epochs=0.5)
    whole = train(tmp_path / "whole", config, minutes=0.5)
    assert whole.config.num_epochs != config.num_epochs
    stopped = dataclasses.replace(whole.config, max_steps=whole.step // 2)
    train(tmp_path / "run", stopped)
    monkeypatch.setattr(budget, "time_run", None)  # nothing is timed again
    continued = train(tmp_path / "run", config, minutes=0.5)
    assert continued.step == whole.step
    for name, values in whole.state.items():
        np.testing.assert_array_equal(continued.state[name], values, err_msg=name)
