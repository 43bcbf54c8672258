"""Dry runs and learning-rate range tests: what they say, and that no run changes."""

import math
import os
import re
import signal

import numpy as np
import pytest
from marks import slow
from PIL import Image
from small_runs import (
    assert_equal_states,
    halt_at,
    small_config,
    snapshot,
    uninterrupted,
)

from towers import dry_run, lr_range_test
from towers.errors import ConfigError, Preempted
from towers.training import lr_range
from towers.training.train import train


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Everything is in the working folder."""
    monkeypatch.chdir(tmp_path)


# Dry runs.


@pytest.mark.usefixtures("half_way")
@pytest.mark.parametrize(
    "workdir,options,words",
    [
        ("half_way", {}, "continues +from step 5\n"),
        ("half_way", {"overwrite": True}, "overwrites +a run at step 5\n"),
        slow("new", {}, ""),
    ],
)
def test_a_dry_run_takes_the_steps_that_are_left_and_writes_nothing(
    tmp_path, capsys, workdir, options, words
):
    before = snapshot(tmp_path)
    dry_run(workdir, small_config(), **options)
    text = capsys.readouterr().out
    assert snapshot(tmp_path) == before
    assert re.search(words, text)
    num_steps = 5 if "continues" in words else 10
    assert re.search(rf"\nwhole run .*: {num_steps} steps, \d+ evaluations", text)
    assert text.endswith("dry run: all is in order, and nothing was written\n")
    # The run itself takes the same steps afterwards, and no others.
    state = train(workdir, small_config(), **options).state
    assert_equal_states(state, uninterrupted(small_config()).state)


@pytest.mark.usefixtures("half_way")
def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path):
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"learning_rate was 0.1 and is 0.2"):
        dry_run("half_way", small_config(learning_rate=0.2))
    assert snapshot(tmp_path) == before


# Learning-rate range tests.

RATES = 10.0 ** (np.arange(281) / 40 - 5)  # 1e-5 to 100
BEST = 180  # 10 ** -0.5


def valley():
    """Losses that fall like a logistic function, most steeply at 10 ** -1.5, and rise
    from 10 ** -0.5, under noise that is steeper at every step."""
    exponents = np.arange(281) / 40 - 5
    falling = 2.0 - 1.0 / (1.0 + np.exp(-6.0 * (exponents + 1.5)))
    rising = np.maximum(exponents + 0.5, 0.0) ** 2
    return falling + np.minimum(rising, 1.5) + 0.1 * (-1.0) ** np.arange(281)


def test_the_suggestion_is_the_rate_at_which_the_smoothed_loss_falls_most_steeply():
    losses = valley()
    result = lr_range.range_test(zip(RATES, losses, strict=True))
    assert result.suggestion == 0.032
    np.testing.assert_array_equal(result.rates, RATES)
    np.testing.assert_array_equal(result.losses, losses)
    for i in (0, 7, BEST, 280):
        weights = [math.exp(-(((i - j) / 40 / 0.1) ** 2) / 2) for j in range(281)]
        mean = math.fsum(w * x for w, x in zip(weights, losses, strict=True))
        np.testing.assert_allclose(result.smoothed[i], mean / math.fsum(weights))


@pytest.mark.parametrize("value,num_steps", [(1000.0, 201), (math.nan, 200)])
def test_a_loss_that_diverges_ends_the_test(value, num_steps):
    losses = valley()
    losses[200:] = value
    steps = iter(list(zip(RATES, losses, strict=True)))
    result = lr_range.range_test(steps)
    assert len(result.rates) == num_steps and len(list(steps)) == 80
    assert result.suggestion == 0.032


@pytest.mark.usefixtures("half_way")
def test_a_range_test_adds_a_picture_to_the_folder_of_a_run(tmp_path):
    before = snapshot(tmp_path)
    result = lr_range_test("half_way", small_config())
    picture, after = tmp_path / "half_way/lr_range_test.png", snapshot(tmp_path)
    assert after.pop(str(picture)) and after == before

    np.testing.assert_allclose(result.rates[0], 1e-5)
    np.testing.assert_allclose(result.rates[1:] / result.rates[:-1], 1e7 ** (1 / 199))
    assert 1e-5 < result.suggestion <= result.rates[result.smoothed.argmin()]
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (540, 960, 3)
    # The line of the suggestion is upright.
    _, columns = np.nonzero((pixels == (214, 39, 40)).all(2))
    assert np.bincount(columns).max() > 200


# Both.


@pytest.mark.usefixtures("half_way")
@pytest.mark.parametrize("try_run", [dry_run, slow(lr_range_test)])
def test_a_signal_ends_them_in_a_line_and_nothing_is_written(
    tmp_path, monkeypatch, try_run
):
    before = snapshot(tmp_path)
    halt_at(monkeypatch, "computing", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Preempted, match=r"^stopped by SIGINT; nothing was written$"):
        try_run("half_way", small_config())
    assert snapshot(tmp_path) == before
