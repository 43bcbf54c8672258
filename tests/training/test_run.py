"""A run under way: how it is saved, and begun with another one's parameters."""

import dataclasses
import time

import numpy as np
import pytest
import small_runs
from small_runs import has_logged, small_config

from towers.errors import ConfigError
from towers.run.checkpointer import Checkpointer
from towers.training.train import train

# So small a rate leaves every float32 parameter where it was.
STILL = {"learning_rate": 1e-30, "weight_decay": 0.0, "max_steps": 1}


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """Convolution with a bias, dense layer; three steps."""
    workdir = tmp_path_factory.mktemp("other")
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch, small_runs.dropout_network)
        state = train(workdir, small_config(max_steps=3)).state
    return workdir, state


def test_a_new_run_starts_once_from_another_ones_parameters(
    tmp_path, other_run, monkeypatch, capfd
):
    workdir, theirs = other_run
    small_runs.use(monkeypatch, small_runs.dropout_network)
    config = small_config(**STILL, seed=5, init_from=str(workdir))
    state = train(tmp_path, config).state
    assert state["step"] == 1
    for name, value in theirs.items():
        kind, _, variable = name.partition("/")
        if kind == "params":
            np.testing.assert_array_equal(state[name], value, err_msg=name)
            average = state[f"averages/{variable}"]
            np.testing.assert_allclose(average, value, rtol=1e-6, err_msg=name)
        if kind == "slots":
            assert not np.array_equal(state[name], value), name

    capfd.readouterr()
    train(tmp_path, dataclasses.replace(config, max_steps=2))
    out = capfd.readouterr().out
    assert "restored step 1" in out and "starting from" not in out
    with pytest.raises(ConfigError, match=r"init_from was .* and is ''"):
        train(tmp_path, dataclasses.replace(config, init_from=""))


# Checkpoints are written while training goes on.


def test_steps_are_taken_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """What is written is the snapshot of its step, and not what came later."""
    small_runs.use(monkeypatch)
    save = Checkpointer.save

    def save_after_step_9(checkpointer, snapshot):
        patience = time.monotonic() + 60
        while snapshot.step == 5 and not has_logged(tmp_path, 9):
            assert time.monotonic() < patience, "training waits for the writing"
            time.sleep(0.01)
        return save(checkpointer, snapshot)

    monkeypatch.setattr(Checkpointer, "save", save_after_step_9)
    train(tmp_path, small_config(checkpoint_every_steps=5, log_every_steps=1))
    written = Checkpointer(tmp_path / "checkpoints").read(5)
    until_then = small_runs.uninterrupted(small_config(max_steps=5))
    small_runs.assert_equal_states(written.tensors, until_then.state)
