"""Whole runs in this process; "row" is a row of the table in FAULTS.md."""

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from small_runs import (
    assert_equal_states,
    dropout_network,
    full_network,
    halt_at,
    linear_network,
    records,
    small_config,
    small_data,
    snapshot,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers import data
from towers.config import Config
from towers.data import streams
from towers.data.augment import AUGMENTS
from towers.data.batches import TrainBatches
from towers.data.sources import ArraySource
from towers.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NumericError,
    Preempted,
    StuckError,
)
from towers.evaluation import evaluate
from towers.parallel.strategy import COMPUTING, IDLE, PHASES, WAITING
from towers.run import checkpoints, run, watchdog
from towers.run.watchdog import Watchdog
from towers.training import train

WAIT_SECS = 30  # for what should come at once
TENSORS = "tensors.data-00000-of-00001"
EVALUATED = {"eval_every_epochs": 1.0}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_runs.use(monkeypatch)


@dataclasses.dataclass(frozen=True)
class Finished:
    """An uninterrupted run."""

    state: dict
    records: list


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The uninterrupted run of a Config; each is run once."""
    runs = {}

    def run(config: Config, network=linear_network) -> Finished:
        if (config, network) not in runs:
            workdir = tmp_path_factory.mktemp("uninterrupted")
            with pytest.MonkeyPatch.context() as patch:
                small_runs.use(patch, network)
                state = train(workdir, config).state
            runs[config, network] = Finished(state, records(workdir))
        return runs[config, network]

    return run


@pytest.fixture(scope="module")
def stopped_at_step_5(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        train(workdir, small_config(max_steps=5))
    return workdir


@pytest.fixture
def half_way(stopped_at_step_5, tmp_path):
    """The folder of a run that has taken five of its ten steps."""
    return shutil.copytree(stopped_at_step_5, tmp_path / "half_way")


def with_changes(config, **changes):
    return dataclasses.replace(config, **changes)


def damage(workdir, step):
    """Flips one bit in the tensors of a checkpoint."""
    path = workdir / "checkpoints" / f"step-{step:08d}" / TENSORS
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def saved_steps(workdir):
    return checkpoints.list_steps(workdir / "checkpoints")


def saved(workdir):
    return checkpoints.restore_latest(workdir / "checkpoints")


# What a run leaves behind.


def test_a_run_leaves_records_a_checkpoint_and_its_config(tmp_path, capfd):
    # 40 of the 50 images are trained on, so the epochs end within steps 4 and 7.
    config = small_config(
        **EVALUATED,
        batch_size=12,
        num_epochs=2.3,
        num_towers=2,
        validation_fraction=0.2,
    )
    state = train(tmp_path, config).state

    assert state["step"] == 8
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 7, 8]
    evaluated = [line["step"] for line in lines if "validation_accuracy" in line]
    assert evaluated == [4, 7, 8]
    for line in lines:
        assert line["epoch"] == pytest.approx(line["step"] * 12 / 40)
        if line["step"] == 7:
            continue
        assert len(line["tower_losses"]) == 2
        assert line["loss"] == pytest.approx(np.mean(line["tower_losses"]))
        assert line["total_loss"] > line["loss"]
        assert line["accuracy"] * 12 == pytest.approx(round(line["accuracy"] * 12))
        assert line["learning_rate"] == 0.1

    checkpoint = saved(tmp_path)
    assert_equal_states(checkpoint.tensors, state)
    assert checkpoint.trainer_state["images_seen"] == 8 * 12
    assert checkpoint.trainer_state["seed"] == config.seed
    assert checkpoint.trainer_state["config"] == dataclasses.asdict(config)
    assert checkpoint.trainer_state["train_secs"] > 0
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored == dataclasses.asdict(config)

    out = capfd.readouterr().out
    for told in (
        f"TensorFlow {tf.__version__}",
        f"run folder   {tmp_path}",
        "/CPU:0, /CPU:1",
        "2 tower(s) with 6 images each",
        "small: 40 training and 23 test images, made for a test",
        "12 images a step",
        "8 steps, 2.3 epochs",
        f"done: step 8 of 8 is saved in {tmp_path}",
    ):
        assert told in out
    log_line = (
        r"^step 6/8 \(75\.0%\)  epoch 1\.80  loss \d\.\d{4}  learning rate 0\.1  "
        r"[\d,]+ images/s  input wait \d+\.\d%  \d+ s left$"
    )
    assert re.search(log_line, out, re.MULTILINE)


def test_row_18_without_a_gpu_one_line_says_that_the_cpu_is_taken(tmp_path, capfd):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    train(tmp_path, small_config(device="auto", max_steps=1))
    out = capfd.readouterr().out
    assert out.count("TensorFlow sees no GPU, so the towers run on the CPU") == 1
    with pytest.raises(ConfigError, match="device=gpu: TensorFlow sees no GPU"):
        train(tmp_path / "other", small_config(device="gpu"))


def test_row_25_a_batch_that_does_not_divide_weighs_its_towers(tmp_path, uninterrupted):
    train(tmp_path, small_config(num_towers=4))
    alone = uninterrupted(small_config())
    for line, other in zip(records(tmp_path), alone.records, strict=True):
        assert line["loss"] == pytest.approx(
            np.dot(line["tower_losses"], [3, 3, 2, 2]) / 10
        )
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_tensorboard_shows_scalars_histograms_and_the_next_batch(tmp_path):
    config = small_config(**EVALUATED, num_towers=3, summary_every_steps=4)
    state = train(tmp_path, config).state
    (folder,) = (tmp_path / "tensorboard").iterdir()
    assert folder.name == "train"
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()

    def steps(tag):
        return [event.step for event in events.Tensors(tag)]

    def value(tag, step):
        (event,) = (e for e in events.Tensors(tag) if e.step == step)
        return tf.make_ndarray(event.tensor_proto)

    logged = {line["step"]: line for line in records(tmp_path)}
    for tag in ("loss", "total_loss", "learning_rate", "accuracy", "gradient_norm"):
        assert steps(tag) == [1, 2, 4, 6, 8, 10]
        assert value(tag, 6) == np.float32(logged[6][tag])
    for tag in ("images_per_sec", "input_wait_percent"):
        assert steps(tag) == [2, 4, 6, 8, 10]
    for tower in range(3):
        of_tower = np.float32(logged[8]["tower_losses"][tower])
        assert value(f"tower_losses/tower_{tower}", 8) == of_tower
    for tag in ("test_accuracy", "test_accuracy_averaged", "test_loss"):
        assert steps(tag) == [5, 10]
        assert value(tag, 10) == np.float32(logged[10][tag])
    for name in ("logits/kernel", "logits/bias"):
        for group in ("params", "gradients"):
            assert steps(f"{group}/{name}") == [4, 8]
            counts = value(f"{group}/{name}", 8)[:, 2]
            assert counts.sum() == state[f"params/{name}"].size
    assert steps("next_batch") == [4, 8]
    width, height, png = value("next_batch", 4)
    assert (int(width), int(height)) == (4 * 8, 3 * 8)  # ten images side by side
    assert tf.io.decode_png(png).shape == (3 * 8, 4 * 8, 3)


@pytest.mark.parametrize(
    "strategy,place,num_steps,least,most",
    [
        ("towers", "computing", 10, 0, 30),
        ("towers", "waiting", 20, 30, 100),
        ("async_towers", "waiting", 20, 30, 100),
    ],
)
def test_a_run_tells_how_long_it_waited_for_batches(
    tmp_path, monkeypatch, capfd, strategy, place, num_steps, least, most
):
    lock = threading.Lock()

    def halt():
        with lock:  # one disk, that serves one at a time
            time.sleep(1.0 / num_steps)

    halt_at(monkeypatch, place, halt)
    # So that not all batches are read ahead while the first step is logged.
    monkeypatch.setattr(streams, "NUM_THREADS", 1)
    config = small_config(
        strategy=strategy, num_epochs=num_steps / 5, log_every_steps=num_steps
    )
    train(tmp_path, config)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, last = map(json.loads, lines)
    assert "input_wait_percent" not in first  # a step that is traced is not timed
    assert least <= last["input_wait_percent"] <= most
    told = f"images/s  input wait {last['input_wait_percent']:.1f}%  0 s left\n"
    assert told in capfd.readouterr().out


def test_the_final_evaluation_is_that_of_the_saved_parameters(tmp_path):
    config = small_config(**EVALUATED)
    train(tmp_path, config)
    last = records(tmp_path)[-1]
    for use_ema, suffix in ((False, ""), (True, "_averaged")):
        result = evaluate(tmp_path, config, use_ema=use_ema)
        assert result["test_accuracy"] == last[f"test_accuracy{suffix}"]
        assert result["test_loss"] == pytest.approx(last[f"test_loss{suffix}"])


def test_test_time_augmentation_is_reported_next_to_the_plain_accuracy(tmp_path, capfd):
    config = small_config(**EVALUATED, views="six")
    train(tmp_path, config)
    last = records(tmp_path)[-1]
    assert re.search(r"test accuracy .* averaged\); 0\.\d+ by views=six\n", told(capfd))
    for use_ema, suffix in ((False, ""), (True, "_averaged")):
        result = evaluate(tmp_path, config, use_ema=use_ema)
        assert result["test_accuracy_tta"] == last[f"test_accuracy_tta{suffix}"]
        assert "; 0." in told(capfd)
    plain = evaluate(tmp_path, with_changes(config, views="plain"))
    assert "test_accuracy_tta" not in plain and "views" not in told(capfd)


def told(capfd):
    return capfd.readouterr().out


def test_as_many_checkpoints_stay_as_were_asked_for(tmp_path):
    train(tmp_path, small_config(checkpoint_every_steps=2, keep_checkpoints=2))
    assert saved_steps(tmp_path) == [8, 10]


def test_checkpoints_follow_the_clock(tmp_path):
    calls = []
    train(
        tmp_path,
        small_config(checkpoint_every_secs=1e-6, keep_checkpoints=99),
        after_call=lambda: calls.append(len(saved_steps(tmp_path))),
    )
    assert saved_steps(tmp_path) == [1, 2, 4, 6, 8, 10]  # looked at after each call
    assert len(calls) == 6


# Row 10: stopping and continuing.


FULL = {"num_towers": 2, "eval_every_epochs": 0.5}


@pytest.mark.parametrize(
    "stops,changes",
    [
        ([3], {}),  # in mid-epoch
        slow([5], {}),  # at an epoch's edge
        ([10], {}),  # at the last step
        slow([12], {}),  # after the end
        slow([1, 2, 9], {"steps_per_loop": 1}),
    ],
)
def test_row_10_a_continued_run_equals_the_uninterrupted_one(
    tmp_path, uninterrupted, monkeypatch, stops, changes
):
    """With batch normalisation, dropout, augmentation, velocities and averages."""
    config = small_config(**FULL)
    expected = uninterrupted(config, full_network)
    kinds = {name.split("/")[0] for name in expected.state}
    assert kinds == {"params", "state", "slots", "averages", "step"}

    small_runs.use(monkeypatch, full_network)
    for stop in stops:
        train(tmp_path, with_changes(config, max_steps=stop, **changes))
        assert saved_steps(tmp_path)[-1] == min(stop, 10)
    state = train(tmp_path, config).state
    assert_equal_states(state, expected.state)
    assert_equal_states(saved(tmp_path).tensors, expected.state)
    assert records(tmp_path) == expected.records


@pytest.mark.slow
def test_row_10_would_notice_other_random_numbers(tmp_path, uninterrupted, monkeypatch):
    """With another seed from step 5 on, order, crops and dropout alone differ."""
    config = small_config(**FULL)
    expected = uninterrupted(config, full_network)
    small_runs.use(monkeypatch, full_network)
    train(tmp_path, with_changes(config, max_steps=5))
    state = train(tmp_path, with_changes(config, seed=1), allow_change=("seed",)).state
    with pytest.raises(AssertionError):
        assert_equal_states(state, expected.state)


@pytest.mark.parametrize("stop", [4, slow(8)])
def test_row_10_also_where_batches_straddle_epochs(tmp_path, uninterrupted, stop):
    config = small_config(
        batch_size=12, num_epochs=2.3, schedule="cosine", warmup_epochs=0.5
    )
    expected = uninterrupted(config)
    train(tmp_path, with_changes(config, max_steps=stop))
    assert_equal_states(train(tmp_path, config).state, expected.state)
    assert records(tmp_path) == expected.records


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["rmsprop", "adamw", "lars"])
def test_row_10_also_with_other_optimizers_and_mixed_images(
    tmp_path, uninterrupted, optimizer
):
    config = small_config(
        optimizer=optimizer,
        learning_rate=0.01,
        schedule="one_cycle",
        color_jitter=0.4,
        random_erasing=0.5,
        cutout_size=3,
        mixup=0.2,
        cutmix=1.0,
        **FULL,
    )
    expected = uninterrupted(config)
    train(tmp_path, with_changes(config, max_steps=3))
    assert_equal_states(train(tmp_path, config).state, expected.state)
    assert records(tmp_path) == expected.records


def test_row_10_other_cuts_into_calls_change_nothing(tmp_path, uninterrupted):
    config = small_config(log_every_steps=1)
    expected = uninterrupted(config)
    other_cuts = with_changes(config, steps_per_loop=3, log_every_steps=4)
    train(tmp_path, with_changes(other_cuts, max_steps=6))
    assert_equal_states(train(tmp_path, other_cuts).state, expected.state)
    kept = [line for line in expected.records if line["step"] in (1, 4, 8, 10)]
    assert records(tmp_path) == kept


# Row 11: other towers.


def test_row_11_two_four_and_one_tower_continue_each_other(
    tmp_path, uninterrupted, monkeypatch
):
    config = small_config(
        batch_size=12, num_epochs=2.3, num_towers=2, log_every_steps=1
    )
    expected = uninterrupted(config, dropout_network)
    small_runs.use(monkeypatch, dropout_network)
    for towers, stop in ((2, 4), (4, 7), (1, 0)):
        train(tmp_path, with_changes(config, num_towers=towers, max_steps=stop))
    lines = records(tmp_path)
    assert [len(line["tower_losses"]) for line in lines] == [2] * 4 + [4] * 3 + [1] * 3
    for line, other in zip(lines, expected.records, strict=True):
        assert line["step"] == other["step"]
        assert line["learning_rate"] == other["learning_rate"]
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)
    # Losses of other examples, or of the same in another order, lie farther apart.
    apart = [abs(a["loss"] - b["loss"]) for a, b in zip(lines[1:], lines, strict=False)]
    assert min(apart) > 1e-4


# Rows 9 and 8: another config, another model.


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


def test_row_9_what_is_allowed_may_change_and_nothing_else(half_way):
    changed = small_config(learning_rate=0.2, seed=3)
    with pytest.raises(ConfigError) as caught:
        train(half_way, changed, allow_change=("learning_rate",))
    assert "learning_rate was" not in str(caught.value)
    state = train(half_way, changed, allow_change=("learning_rate", "seed")).state
    assert state["step"] == 10
    assert records(half_way)[-1]["learning_rate"] == 0.2
    train(half_way, changed)  # the run is now that of the changed config
    with pytest.raises(ConfigError, match="learning_rate was 0.2 and is 0.1"):
        train(half_way, small_config())


def test_row_9_rhythm_towers_and_length_may_change_freely(half_way):
    changed = small_config(
        num_towers=5,
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


def test_row_9_the_length_of_a_cosine_is_part_of_the_run(tmp_path):
    config = small_config(schedule="cosine", max_steps=2)
    train(tmp_path, config)
    longer = with_changes(config, num_epochs=3.0, max_steps=3)
    with pytest.raises(ConfigError, match="num_epochs was 2.0 and is 3.0"):
        train(tmp_path, longer)
    assert train(tmp_path, longer, allow_change=("num_epochs",)).step == 3


def test_row_8_another_model_is_refused_by_its_first_variable(half_way, monkeypatch):
    before = snapshot(half_way)
    small_runs.use(monkeypatch, dropout_network)
    message = "^the checkpoint is of another model: params/conv1/kernel is in the model"
    with pytest.raises(CheckpointError, match=message):
        train(half_way, small_config())
    assert snapshot(half_way) == before


# Rows 3, 6 and 7: what lies in the folder of checkpoints.


def test_row_3_leftovers_of_a_killed_save_are_removed(half_way, capfd):
    leftover = half_way / "checkpoints" / ".tmp-step-00000007-123"
    leftover.mkdir()
    (leftover / TENSORS).write_bytes(b"x" * 1234)
    train(half_way, small_config())
    assert not leftover.exists()
    out = capfd.readouterr().out
    assert f"removed {leftover}, left by an interrupted save: 1,234 bytes" in out


def test_row_6_the_checkpoint_before_a_damaged_one_is_used(
    tmp_path, uninterrupted, capfd
):
    config = small_config()
    expected = uninterrupted(config)
    every_4 = with_changes(config, checkpoint_every_steps=4)
    train(tmp_path, with_changes(every_4, max_steps=8))
    damage(tmp_path, 8)
    capfd.readouterr()
    state = train(tmp_path, every_4).state
    out = capfd.readouterr().out
    path = tmp_path / "checkpoints"
    assert f"rejected checkpoint {path}/step-00000008: {TENSORS}: sha256 is" in out
    assert f"restored step 4 from {path}/step-00000004" in out
    assert_equal_states(state, expected.state)
    assert records(tmp_path) == expected.records
    for step in (4, 8, 10):  # the damaged one was replaced when its step came again
        assert checkpoints.restore_step(path, step).step == step


def test_row_7_with_no_good_checkpoint_nothing_is_trained_or_deleted(tmp_path):
    config = small_config(checkpoint_every_steps=3)
    train(tmp_path, with_changes(config, max_steps=6))
    for step in (3, 6):
        damage(tmp_path, step)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, config)
    message = str(caught.value)
    assert "none of the 2 checkpoints" in message
    assert message.count("sha256") == 2
    assert "step-00000003" in message and "step-00000006" in message
    assert "\n" not in message
    assert snapshot(tmp_path) == before


# Finished runs, and starting anew.


def test_a_finished_run_says_so_and_does_nothing(half_way, capfd):
    before = snapshot(half_way)
    state = train(half_way, small_config(max_steps=5)).state
    assert f"{half_way} is finished: step 5 of 5." in capfd.readouterr().out
    assert_equal_states(state, saved(half_way).tensors)
    assert snapshot(half_way) == before


def test_a_finished_run_goes_on_with_more_steps_or_epochs(half_way, uninterrupted):
    train(half_way, small_config(max_steps=7))
    train(half_way, small_config(num_epochs=1.6))
    state = train(half_way, small_config()).state
    assert_equal_states(state, uninterrupted(small_config()).state)


def test_overwrite_starts_anew_and_spares_what_is_not_of_the_run(half_way):
    (half_way / "notes.txt").write_text("mine")
    changed = small_config(seed=5, max_steps=2)
    assert train(half_way, changed, overwrite=True).step == 2
    assert saved_steps(half_way) == [2]
    assert [line["step"] for line in records(half_way)] == [1, 2]
    assert len(list((half_way / "tensorboard" / "train").iterdir())) == 1
    assert (half_way / "notes.txt").read_text() == "mine"


def test_overwrite_removes_nothing_where_the_new_run_cannot_start(
    half_way, monkeypatch
):
    before = snapshot(half_way)
    with pytest.raises(ConfigError, match="augment=tutorial"):
        train(half_way, small_config(augment="tutorial"), overwrite=True)

    def missing(data_dir):
        raise DataError("no data")

    monkeypatch.setitem(data.DATASETS, "synthetic", missing)
    with pytest.raises(DataError):
        train(half_way, small_config(), overwrite=True)
    assert snapshot(half_way) == before


# Held-out images.

HELD_OUT = {
    "validation_fraction": 0.4,  # 30 images are left, three steps of an epoch
    "eval_every_epochs": 1.0,
    "num_epochs": 5.0,
    "checkpoint_every_steps": 1,
    "keep_checkpoints": 1,
    # The rate rises tenfold with every epoch, so the first epochs are the best.
    "decay_factor": 10.0,
    "epochs_per_decay": 1.0,
}


@pytest.fixture(scope="module")
def held_out_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("held_out")
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        train(workdir, small_config(**HELD_OUT))
    return workdir


def test_the_best_step_on_held_out_images_stays(held_out_run):
    lines = [line for line in records(held_out_run) if "validation_accuracy" in line]
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 15]
    accuracies = {line["step"]: line["validation_accuracy_averaged"] for line in lines}
    best = max(accuracies, key=accuracies.get)  # the first of equals
    assert best < 15, "the last step was the best: the test says nothing"
    assert saved_steps(held_out_run) == [best, 15]
    stored = saved(held_out_run).trainer_state["best"]
    assert stored == {"step": best, "accuracy": accuracies[best]}
    assert not [name for line in lines for name in line if "test" in name]


def test_row_10_a_continued_run_remembers_its_best_step(tmp_path, held_out_run):
    config = small_config(**HELD_OUT)
    train(tmp_path, with_changes(config, max_steps=13))
    train(tmp_path, config)
    assert saved_steps(tmp_path) == saved_steps(held_out_run)
    assert records(tmp_path) == records(held_out_run)


# Row 14: not a number.


def test_row_14_not_a_number_stops_before_the_update(
    tmp_path, uninterrupted, monkeypatch
):
    config = small_config(augment="none", num_towers=3)
    spoiled = spoil(monkeypatch, step=4)  # in its last image, that of the last tower
    small_runs.use(monkeypatch, data_set=spoiled)
    message = r"^step 4: the loss or a gradient of tower 2 \(loss nan\) is not finite"
    for _ in range(2):  # the second time from the checkpoint
        with pytest.raises(NumericError, match=message):
            train(tmp_path, config)
        assert saved_steps(tmp_path) == [3]
    assert [line["step"] for line in records(tmp_path)] == [1, 2]
    until_then = uninterrupted(with_changes(config, max_steps=3))
    assert_equal_states(saved(tmp_path).tensors, until_then.state)

    small_runs.use(monkeypatch)  # the image is mended
    assert_equal_states(train(tmp_path, config).state, uninterrupted(config).state)


def spoil(patch, step):
    """The small data set with one image of which augment=none makes no numbers."""
    found = small_data()
    order = TrainBatches(found.train, None, seed=0, batch_size=10)
    place = int(order.indices(tf.constant(step - 1, tf.int64))[-1])
    images, labels = small_runs.arrays(small_runs.NUM_TRAIN, 0)
    images[place] = 255
    none = AUGMENTS["none"]

    def create(*args):
        augment = none(*args)

        def spoiling(images, draw):
            white = tf.reduce_all(images == 255, [1, 2, 3], keepdims=True)
            return tf.where(white, np.nan, augment.train(images, draw))

        return dataclasses.replace(augment, train=spoiling)

    patch.setitem(AUGMENTS, "none", create)
    return dataclasses.replace(found, train=ArraySource(images, labels))


def test_row_14_a_diverging_run_ends_with_finite_parameters(tmp_path):
    config = small_config(learning_rate=1e30)
    with pytest.raises(NumericError, match="not finite.* --learning_rate or --clip"):
        train(tmp_path, config)
    for name, tensor in saved(tmp_path).tensors.items():
        assert np.all(np.isfinite(tensor)), name


# Row 12: signals.


class Halt:
    """Sends a signal from the midst of a run, at the n-th time, and holds it there.

    Args:
        number: of the signal, which is sent twice: a second one should do no harm.
        nth: at which time.
        hold: whether the run goes no further until it is released.
        ready: is waited for before the signal is sent.
    """

    def __init__(self, number, nth=1, hold=True, ready=lambda: True):
        self._number, self._nth, self._hold, self._ready = number, nth, hold, ready
        self._lock, self._times = threading.Lock(), 0
        self.released, self.held_since = threading.Event(), None

    def __call__(self):
        with self._lock:
            self._times += 1
            time_now = self._times
        if time_now == self._nth:
            patience = time.monotonic() + WAIT_SECS
            while not self._ready():
                assert time.monotonic() < patience
                time.sleep(0.01)
            os.kill(os.getpid(), self._number)
            os.kill(os.getpid(), self._number)
        if self._hold and time_now >= self._nth:
            self.held_since = self.held_since or time.monotonic()
            assert self.released.wait(WAIT_SECS)


def num_records(workdir):
    path = workdir / "metrics.jsonl"
    return len(records(workdir)) if path.exists() else 0


def train_and_halt(config, workdir, place, halt):
    """Trains until the signal of `halt` has stopped it; returns the message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_GRACE_SECS", 0.1)
        halt_at(patch, place, halt)
        with pytest.raises(Preempted) as caught:
            train(workdir, config)
        halt.released.set()
        small_runs.join_abandoned()
    return str(caught.value)


@pytest.mark.parametrize(
    "place,nth,hold,steps,number",
    [
        ("tracing", 1, True, [], signal.SIGTERM),
        ("computing", 4, False, [4, 5], signal.SIGTERM),
        slow("computing", 4, False, [4, 5], signal.SIGINT),
        ("waiting", 6, True, [3, 4, 5], signal.SIGTERM),  # batches are read ahead
        slow("drawing", 1, True, [4], signal.SIGTERM),
        ("evaluating", 2, True, [5], signal.SIGINT),  # that of the averages
        slow("evaluating", 3, True, [10], signal.SIGTERM),  # at the last step
        slow("saving", 1, False, [3], signal.SIGTERM),
    ],
)
def test_row_12_a_signal_saves_and_the_same_command_continues(
    tmp_path, uninterrupted, place, nth, hold, steps, number
):
    config = small_config(**EVALUATED, log_every_steps=1)
    expected = uninterrupted(config)
    if place == "saving":
        config = with_changes(config, checkpoint_every_steps=3)
    if place == "drawing":
        config = with_changes(config, summary_every_steps=4)
    halt = Halt(number, nth, hold)
    if place == "waiting":
        halt = Halt(number, nth, hold, lambda: num_records(tmp_path) >= 3)

    message = train_and_halt(config, tmp_path, place, halt)
    assert message.startswith(f"stopped by {number.name}: ")
    assert message.endswith("; the same command continues")
    if steps:
        first, *others = saved_steps(tmp_path)
        assert first in steps
        # Training goes on while a checkpoint is written.
        assert bool(others) == (place == "saving")
        step = others[-1] if others else first
        assert f"step {step} of 10 is saved in {tmp_path}" in message
    else:
        assert saved_steps(tmp_path) == []
        assert "no step was taken" in message

    assert_equal_states(train(tmp_path, config).state, expected.state)
    assert records(tmp_path) == expected.records


def test_row_12_an_evaluation_cut_off_twice_still_tells_the_best_step(
    tmp_path, held_out_run
):
    config = small_config(**HELD_OUT)
    best, last = saved_steps(held_out_run)
    # There are two evaluations every three steps, of raw parameters and of averages.
    for nth in (best // 3 * 2, 1):
        halt = Halt(signal.SIGTERM, nth)
        message = train_and_halt(config, tmp_path, "evaluating", halt)
        assert f"step {best} of {last} is saved" in message
    # Evaluated at last, but not saved anew: the next start evaluates once more.
    train(tmp_path, with_changes(config, max_steps=best))
    train(tmp_path, config)
    assert saved_steps(tmp_path) == [best, last]
    assert records(tmp_path) == records(held_out_run)
    assert (
        saved(tmp_path).trainer_state["best"]
        == saved(held_out_run).trainer_state["best"]
    )


def test_row_12_a_signal_during_the_last_save_changes_nothing(tmp_path, uninterrupted):
    config = small_config()
    with pytest.MonkeyPatch.context() as patch:
        halt_at(patch, "saving", Halt(signal.SIGTERM, hold=False))
        assert_equal_states(train(tmp_path, config).state, uninterrupted(config).state)


class StepBegun:
    """As a strategy is seen whose waiting call gets its data just after a signal."""

    def __init__(self):
        self._phases = iter([WAITING, COMPUTING, COMPUTING, COMPUTING])
        self._tensors = iter(["before", "torn", "torn", "after"])

    def progress(self):
        return 3, PHASES[next(self._phases, IDLE)]

    def state(self):
        return next(self._tensors)


def test_row_12_a_step_that_begins_after_all_is_finished_before_the_save():
    assert run.settled_state(StepBegun()) == "after"


def test_row_15_a_step_that_does_not_end_is_reported(half_way, monkeypatch, capfd):
    before = saved_steps(half_way)
    halt = Halt(signal.SIGCONT)  # which nobody minds

    def clock():  # every second that the run is held counts for some hours
        now = time.monotonic()
        return now + 1e4 * (now - (halt.held_since or now))

    monkeypatch.setattr(
        "towers.training.Watchdog", functools.partial(Watchdog, clock=clock)
    )
    with pytest.MonkeyPatch.context() as patch:
        halt_at(patch, "computing", halt)
        message = r"^step 6 was not finished within 600 s .*, while computing$"
        with pytest.raises(StuckError, match=message):
            train(half_way, small_config())
        halt.released.set()
        small_runs.join_abandoned()
    assert saved_steps(half_way) == before
    assert "most recent call first" in capfd.readouterr().err


# Rows 5 and 13: the folder.


def test_row_5_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: .* --workdir"):
        train(tmp_path / "file" / "run", small_config())
    with pytest.raises(ConfigError, match="cannot be written"):
        train(tmp_path / "file", small_config())


HOLDER = """
import sys
from towers.run.folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.create()
with folder.lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_row_13_a_folder_has_one_trainer_and_the_lock_of_a_dead_one_is_taken_over(
    tmp_path,
):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on .*--workdir"):
            train(tmp_path, small_config(max_steps=1))
        assert not (tmp_path / "config.json").exists()
        holder.kill()
        holder.wait(WAIT_SECS)
    assert train(tmp_path, small_config(max_steps=1)).step == 1
