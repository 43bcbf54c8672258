"""Runs that are continued."""

import dataclasses

import numpy as np
import pytest
import small_runs
from marks import slow
from small_runs import (
    assert_equal_states,
    dropout_network,
    full_network,
    records,
    saved,
    saved_steps,
    small_config,
    snapshot,
    uninterrupted,
)

from towers.errors import CheckpointError, ConfigError
from towers.run.checkpointer import Checkpointer
from towers.run.restore import validate_architecture
from towers.training.train import train

TENSORS = "tensors.data-00000-of-00001"


pytestmark = pytest.mark.usefixtures("small")


def damage(workdir, step):
    """Flips one bit in the tensors of a checkpoint."""
    path = workdir / "checkpoints" / f"step-{step:08d}" / TENSORS
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Row 10: stopping and continuing.


FULL = {"num_towers": 2, "eval_every_epochs": 0.5, "augment": "pad_crop_flip"}


@pytest.mark.parametrize(
    "stops,changes",
    [
        ([3], {}),  # in mid-epoch
        slow([5], {}),  # at an epoch's edge
        slow([10], {}),  # at the last step
        slow([12], {}),  # after the end
        slow([1, 2, 9], {"steps_per_loop": 1}),
    ],
)
@pytest.mark.row(10)
def test_row_10_a_continued_run_equals_the_uninterrupted_one(
    tmp_path, monkeypatch, stops, changes
):
    """With batch normalization, dropout, augmentation, velocities and averages."""
    config = small_config(**FULL)
    expected = uninterrupted(config, full_network)
    kinds = {name.split("/")[0] for name in expected.state}
    assert kinds == {"params", "state", "slots", "averages", "step"}

    small_runs.use(monkeypatch, full_network)
    for stop in stops:
        train(tmp_path, dataclasses.replace(config, max_steps=stop, **changes))
        assert saved_steps(tmp_path)[-1] == min(stop, 10)
    state = train(tmp_path, config).state
    assert_equal_states(state, expected.state)
    assert_equal_states(saved(tmp_path).tensors, expected.state)
    assert records(tmp_path) == expected.records


# Row 11: other towers.


@pytest.mark.row(11)
def test_row_11_four_towers_and_one_continue_each_other(tmp_path, monkeypatch):
    config = small_config(
        batch_size=12, num_epochs=2.3, num_towers=2, log_every_steps=1
    )
    expected = uninterrupted(config, dropout_network)
    small_runs.use(monkeypatch, dropout_network)
    for towers, stop in ((4, 5), (1, 0)):
        train(tmp_path, dataclasses.replace(config, num_towers=towers, max_steps=stop))
    lines = records(tmp_path)
    assert [len(line["tower_losses"]) for line in lines] == [4] * 5 + [1] * 5
    for line, other in zip(lines, expected.records, strict=True):
        assert line["step"] == other["step"]
        assert line["learning_rate"] == other["learning_rate"]
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)
    # Losses of other examples, or of the same in another order, lie farther apart.
    apart = [abs(a["loss"] - b["loss"]) for a, b in zip(lines[1:], lines, strict=False)]
    assert min(apart) > 1e-4


# Rows 9 and 8: another config, another model.


@pytest.mark.row(9)
def test_row_9_a_changed_config_is_refused_and_nothing_touched(half_way):
    before = snapshot(half_way)
    changed = small_config(learning_rate=0.2, seed=3, batch_size=20, num_towers=2)
    with pytest.raises(ConfigError) as caught:
        train(half_way, changed)
    message = str(caught.value)
    assert message.startswith(f"{half_way} holds another run: ")
    assert "seed was 0 and is 3" in message
    assert "learning_rate was 0.1 and is 0.2" in message
    assert "batch_size was 10 and is 20" in message
    assert "num_towers" not in message
    assert "--allow_change=seed,learning_rate,batch_size" in message
    assert "\n" not in message
    assert snapshot(half_way) == before


@pytest.mark.row(9)
def test_row_9_what_is_allowed_may_change_and_nothing_else(half_way):
    changed = small_config(learning_rate=0.2, seed=3)
    with pytest.raises(ConfigError) as caught:
        train(half_way, changed, allow_change=("learning_rate",))
    assert "learning_rate was" not in str(caught.value)
    state = train(half_way, changed, allow_change=("learning_rate", "seed")).state
    assert state["step"] == 10
    assert records(half_way)[-1]["learning_rate"] == 0.2
    train(half_way, changed)  # the run is now that of the changed config
    with pytest.raises(ConfigError, match=r"learning_rate was 0.2 and is 0.1"):
        train(half_way, small_config())


@pytest.mark.row(9)
def test_row_9_periods_strategy_towers_and_length_may_change_freely(half_way):
    changed = small_config(
        strategy="model_parallel",
        num_towers=2,
        group_size=2,
        device="auto",
        data_dir="elsewhere",
        num_epochs=2.4,
        log_every_steps=1,
        eval_every_epochs=2.0,
        steps_per_loop=2,
        summary_every_steps=6,
        checkpoint_every_steps=7,
        checkpoint_every_secs=50.0,
        keep_checkpoints=9,
        stuck_after_secs=60.0,
    )
    assert train(half_way, changed).step == 12


@pytest.mark.row(8)
def test_row_8_another_model_is_refused_by_its_first_variable(half_way, monkeypatch):
    before = snapshot(half_way)
    small_runs.use(monkeypatch, dropout_network)
    message = "^the checkpoint is of another model: params/conv1/kernel is in the model"
    with pytest.raises(CheckpointError, match=message):
        train(half_way, small_config())
    assert snapshot(half_way) == before


@pytest.mark.row(8)
@pytest.mark.parametrize(
    "kind,option", [("slots", "optimizer"), ("averages", "ema_decay")]
)
def test_row_8_a_tensor_of_another_option_names_it(kind, option):
    weights = {"params/kernel": np.zeros(2)}
    other = {f"{kind}/kernel": np.zeros(2)}
    for pair in ((weights | other, weights), (weights, weights | other)):
        with pytest.raises(CheckpointError, match=f"of another {option}: {kind}/"):
            validate_architecture(*pair)


# Rows 3, 6 and 7: the folder of checkpoints.


@pytest.mark.row(3, 6)
def test_rows_3_6_after_damage_the_checkpoint_before_is_used(tmp_path, capfd):
    config = small_config()
    expected = uninterrupted(config)
    every_4 = dataclasses.replace(config, checkpoint_every_steps=4)
    train(tmp_path, dataclasses.replace(every_4, max_steps=8))
    damage(tmp_path, 8)
    leftover = tmp_path / "checkpoints" / ".tmp-step-00000009-123"
    leftover.mkdir()
    capfd.readouterr()
    state = train(tmp_path, every_4).state
    out = capfd.readouterr().out
    path = tmp_path / "checkpoints"
    assert f"rejected checkpoint {path}/step-00000008: {TENSORS}: sha256 is" in out
    assert f"restored step 4 from {path}/step-00000004" in out
    assert_equal_states(state, expected.state)
    assert records(tmp_path) == expected.records
    assert not leftover.exists() and f"removed {leftover}" in out
    for step in (4, 8, 10):  # the damaged one was replaced when its step came again
        assert Checkpointer(path).read(step).step == step


@pytest.mark.row(7)
def test_row_7_with_no_good_checkpoint_nothing_is_trained_or_deleted(half_way):
    damage(half_way, 5)
    before = snapshot(half_way)
    with pytest.raises(CheckpointError) as caught:
        train(half_way, small_config())
    message = str(caught.value)
    assert "none of the 1 checkpoints" in message and "sha256" in message
    assert "step-00000005" in message and "\n" not in message
    assert snapshot(half_way) == before
