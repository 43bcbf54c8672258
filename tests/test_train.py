"""Whole runs in this process; the numbers are rows of FAULTS.md."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from small_runs import (
    assert_equal_states,
    halt_at,
    records,
    small_config,
    small_data,
    snapshot,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers import checkpoints, data, watchdog
from towers.config import Config
from towers.data.augment import AUGMENTS
from towers.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NumericError,
    Preempted,
    StuckError,
)
from towers.evaluate import evaluate
from towers.train import train

WAIT_SECS = 30  # for what should come at once
DAMAGE = "tensors.data-00000-of-00001"

# Ten steps, of which the epoch's end falls within the fifth and the ninth.
STRADDLING = {"batch_size": 12, "num_epochs": 2.3}


@pytest.fixture(autouse=True)
def batch_norm_network(monkeypatch):
    small_runs.use(monkeypatch, small_data(), batch_norm=True)


@pytest.fixture
def plain_network(monkeypatch):
    small_runs.use(monkeypatch, small_data(), batch_norm=False)


@dataclasses.dataclass(frozen=True)
class Finished:
    """An uninterrupted run."""

    state: dict
    records: list


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The uninterrupted run of a Config; each is run once."""
    runs = {}

    def run(config: Config, batch_norm: bool = True) -> Finished:
        if (config, batch_norm) not in runs:
            workdir = tmp_path_factory.mktemp("uninterrupted")
            with pytest.MonkeyPatch.context() as patch:
                small_runs.use(patch, small_data(), batch_norm=batch_norm)
                state = train(config, workdir)
            runs[config, batch_norm] = Finished(state, records(workdir))
        return runs[config, batch_norm]

    return run


def stop_and_go_on(config, workdir, *stops, **changes):
    """Trains to each of the steps in turn, and then to the end."""
    for stop in stops:
        train(dataclasses.replace(config, max_steps=stop), workdir)
    return train(dataclasses.replace(config, **changes), workdir)


def damage(workdir, step):
    """Flips one bit of the tensors of a checkpoint."""
    path = workdir / "checkpoints" / f"step-{step:08d}" / DAMAGE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def saved_steps(workdir):
    return checkpoints.list_steps(workdir / "checkpoints")


# What a run leaves behind.


def test_a_run_leaves_records_checkpoint_and_config(tmp_path, capfd):
    config = small_config(**STRADDLING, num_towers=2, validation_fraction=0.2)
    state = train(config, tmp_path)

    assert state["step"] == 8  # 2.3 epochs of the 40 images that are not held out
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 7, 8]
    evaluated = [line["step"] for line in lines if "validation_accuracy" in line]
    assert evaluated == [4, 7, 8]  # the first steps at or after 40 and 80, and the last
    for line in lines:
        assert line["epoch"] == pytest.approx(line["step"] * 12 / 40)
        if line["step"] != 7:
            assert len(line["tower_losses"]) == 2
            assert line["loss"] == pytest.approx(np.mean(line["tower_losses"]))
            assert line["total_loss"] > line["loss"]
            assert line["accuracy"] * 12 == pytest.approx(round(line["accuracy"] * 12))
            assert line["learning_rate"] == 0.1

    saved = checkpoints.restore_latest(tmp_path / "checkpoints")
    assert_equal_states(saved.tensors, state)
    assert saved.trainer_state["images_seen"] == 8 * 12
    assert saved.trainer_state["seed"] == config.seed
    assert saved.trainer_state["config"] == dataclasses.asdict(config)
    assert json.loads((tmp_path / "config.json").read_text()) == dataclasses.asdict(
        config
    )

    out = capfd.readouterr().out
    for told in (
        f"TensorFlow {tf.__version__}",
        f"run folder   {tmp_path}",
        "2 tower(s) on /CPU:0, /CPU:1",
        "strategy     towers, parameters on cpu",
        "small: 40 training and 23 test images, made for a test",
        "12 images a step, 6 per tower",
        "length       8 steps, 2.3 epochs, 92 images",
        f"done: step 8 of 8 is saved in {tmp_path}",
    ):
        assert told in out
    assert re.search(
        r"^step 6/8 \(75\.0%\)  epoch 1\.80  loss \d\.\d{4}  learning rate 0\.1  "
        r"[\d,]+ images/s  \d+ s left$",
        out,
        re.MULTILINE,
    )


def test_tensorboard_shows_scalars_histograms_and_the_next_batch(tmp_path):
    config = small_config(num_towers=3, summary_every_steps=4)
    state = train(config, tmp_path)
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
    assert steps("images_per_sec") == [2, 4, 6, 8, 10]
    for tower in range(3):
        of_tower = np.float32(logged[8]["tower_losses"][tower])
        assert value(f"tower_losses/tower_{tower}", 8) == of_tower
    for tag in ("test_accuracy", "test_accuracy_averaged", "test_loss"):
        assert steps(tag) == [5, 10]
        assert value(tag, 10) == np.float32(logged[10][tag])
    names = [k.removeprefix("params/") for k in state if k.startswith("params/")]
    assert len(names) == 7
    for tag in [
        f"{group}/{name}" for group in ("params", "gradients") for name in names
    ]:
        assert steps(tag) == [4, 8]
        assert value(tag, 8)[:, 2].sum() == state[f"params/{tag.split('/', 1)[1]}"].size
    assert steps("next_batch") == [4, 8]
    width, height, png = value("next_batch", 4)
    assert (int(width), int(height)) == (4 * 8, 3 * 8)  # ten images side by side
    assert tf.io.decode_png(png).shape == (3 * 8, 4 * 8, 3)


def test_the_final_evaluation_is_that_of_the_saved_parameters(tmp_path):
    config = small_config()
    train(config, tmp_path)
    last = records(tmp_path)[-1]
    for use_ema, suffix in ((False, ""), (True, "_averaged")):
        result = evaluate(config, tmp_path, use_ema=use_ema)
        assert result["test_accuracy"] == last[f"test_accuracy{suffix}"]
        assert result["test_loss"] == pytest.approx(last[f"test_loss{suffix}"])


def test_without_evaluations_and_averages_none_are_recorded(tmp_path):
    train(small_config(eval_every_epochs=0.0, ema_decay=0.0), tmp_path)
    assert not [k for line in records(tmp_path) for k in line if "test" in k]
    assert not [k for k in saved(tmp_path).tensors if k.startswith("averages/")]


def saved(workdir):
    return checkpoints.restore_latest(workdir / "checkpoints")


def test_as_many_checkpoints_stay_as_were_asked_for(tmp_path):
    train(small_config(checkpoint_every_steps=2, keep_checkpoints=2), tmp_path)
    assert saved_steps(tmp_path) == [8, 10]


def test_a_checkpoint_follows_the_clock(tmp_path):
    train(small_config(checkpoint_every_secs=1e-6, keep_checkpoints=99), tmp_path)
    assert saved_steps(tmp_path)[-1] == 10
    assert len(saved_steps(tmp_path)) > 3


def test_the_best_step_on_held_out_images_stays(tmp_path):
    config = small_config(
        validation_fraction=0.4,
        num_epochs=8.0,
        eval_every_epochs=1.0,
        checkpoint_every_steps=1,
        keep_checkpoints=1,
        learning_rate=0.3,
    )
    train(config, tmp_path)
    accuracies = {
        line["step"]: line["validation_accuracy_averaged"]
        for line in records(tmp_path)
        if "validation_accuracy_averaged" in line
    }
    best = max(accuracies, key=accuracies.get)  # the first of equals
    assert best < 24, "no earlier step was better: the test says nothing"
    assert saved_steps(tmp_path) == [best, 24]
    assert saved(tmp_path).trainer_state["best"] == {
        "step": best,
        "accuracy": accuracies[best],
    }
    assert not [k for line in records(tmp_path) for k in line if "test" in k]


# Row 10: stopping and continuing.


@pytest.mark.parametrize(
    "stops,changes",
    [
        ([3], {}),  # in mid-epoch
        ([5], {}),  # at an epoch's edge
        ([10], {}),  # at the last step
        ([12, 11], {}),  # after the end
        ([1, 2, 9], {"steps_per_loop": 1}),
    ],
)
def test_row_10_a_continued_run_equals_the_uninterrupted_one(
    tmp_path, uninterrupted, stops, changes
):
    config = small_config(num_towers=2)
    expected = uninterrupted(config)
    state = stop_and_go_on(config, tmp_path, *stops, **changes)
    assert_equal_states(state, expected.state)
    assert_equal_states(saved(tmp_path).tensors, expected.state)
    assert records(tmp_path) == expected.records
    assert {k.split("/")[0] for k in state} == {
        "params",
        "state",
        "slots",
        "averages",
        "step",
    }


@pytest.mark.parametrize("stop", [4, 8])
def test_row_10_also_where_batches_straddle_epochs(tmp_path, uninterrupted, stop):
    config = small_config(**STRADDLING, schedule="cosine", warmup_epochs=0.5)
    expected = uninterrupted(config)
    state = stop_and_go_on(config, tmp_path, stop)
    assert_equal_states(state, expected.state)
    assert records(tmp_path) == expected.records


def test_row_10_other_cuts_into_calls_change_nothing(tmp_path, uninterrupted):
    config = small_config(num_towers=2)
    expected = uninterrupted(config)
    cuts = {"steps_per_loop": 2, "log_every_steps": 3, "eval_every_epochs": 0.9}
    state = stop_and_go_on(dataclasses.replace(config, **cuts), tmp_path, 4)
    assert_equal_states(state, expected.state)
    logged = {line["step"]: line for line in expected.records}
    common = [line for line in records(tmp_path) if "loss" in line]
    assert [line["step"] for line in common] == [1, 3, 6, 9, 10]
    for line in (line for line in common if line["step"] in logged):
        shared = line.keys() & logged[line["step"]].keys()
        assert {"step", "epoch", "loss", "learning_rate", "accuracy"} <= shared
        assert {k: line[k] for k in shared} == {
            k: logged[line["step"]][k] for k in shared
        }


def test_row_10_would_notice_dropout_augmentation_or_order(tmp_path, uninterrupted):
    """With another seed, which these alone depend on from step 5 on, the end differs."""
    config = small_config(num_towers=2)
    expected = uninterrupted(config)
    train(dataclasses.replace(config, max_steps=5), tmp_path)
    state = train(dataclasses.replace(config, seed=1), tmp_path, allow_change=("seed",))
    with pytest.raises(AssertionError):
        assert_equal_states(state, expected.state)


# Row 11: other towers.


def test_row_11_two_four_and_one_tower_continue_each_other(
    tmp_path, uninterrupted, plain_network
):
    config = small_config(**STRADDLING, num_towers=2, log_every_steps=1)
    expected = uninterrupted(config, batch_norm=False)
    for towers, stop in ((2, 4), (4, 7), (1, 0)):
        train(dataclasses.replace(config, num_towers=towers, max_steps=stop), tmp_path)
    lines = records(tmp_path)
    assert [len(line["tower_losses"]) for line in lines] == [2] * 4 + [4] * 3 + [1] * 3
    for line, other in zip(lines, expected.records, strict=True):
        assert line["step"] == other["step"]
        assert line["learning_rate"] == other["learning_rate"]
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)
    # Other examples, or the same in another order, would show: they do here.
    other_order = uninterrupted(dataclasses.replace(config, seed=1), batch_norm=False)
    assert abs(other_order.records[-1]["loss"] - expected.records[-1]["loss"]) > 1e-3


# Rows 9 and 8: another config, another model.


@pytest.fixture
def half_way(tmp_path):
    """A folder whose run has taken five of its ten steps."""
    train(small_config(max_steps=5), tmp_path)
    return tmp_path


def test_row_9_a_changed_config_is_refused_and_nothing_touched(half_way):
    before = snapshot(half_way)
    changed = small_config(learning_rate=0.2, seed=3, batch_size=20, num_towers=2)
    with pytest.raises(ConfigError) as caught:
        train(changed, half_way)
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
        train(changed, half_way, allow_change=("learning_rate",))
    assert "learning_rate" not in str(caught.value)
    state = train(changed, half_way, allow_change=("learning_rate", "seed"))
    assert state["step"] == 10
    assert records(half_way)[-1]["learning_rate"] == 0.2
    train(changed, half_way)  # the run is now that of the changed config
    with pytest.raises(ConfigError, match="learning_rate was 0.2 and is 0.1"):
        train(small_config(), half_way)


def test_row_9_rhythm_towers_and_length_may_change_freely(half_way):
    changed = small_config(
        num_towers=5,
        device="auto",
        data_dir="elsewhere",
        num_epochs=2.4,
        log_every_steps=1,
        eval_every_epochs=0.0,
        steps_per_loop=2,
        summary_every_steps=6,
        checkpoint_every_steps=7,
        checkpoint_every_secs=50.0,
        keep_checkpoints=9,
        stuck_after_secs=60.0,
        deterministic=False,
    )
    assert train(changed, half_way)["step"] == 12


def test_row_9_the_length_of_a_cosine_is_part_of_the_run(tmp_path):
    config = small_config(schedule="cosine", max_steps=2)
    train(config, tmp_path)
    longer = dataclasses.replace(config, num_epochs=3.0, max_steps=3)
    with pytest.raises(ConfigError, match="num_epochs was 2.0 and is 3.0"):
        train(longer, tmp_path)
    assert train(longer, tmp_path, allow_change=("num_epochs",))["step"] == 3


def test_row_8_another_model_is_refused_by_its_first_variable(half_way, monkeypatch):
    before = snapshot(half_way)
    small_runs.use(monkeypatch, small_data(), batch_norm=False)
    with pytest.raises(CheckpointError) as caught:
        train(small_config(), half_way)
    assert "conv1/bias" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot(half_way) == before


# Rows 3, 6 and 7: what lies in the folder of checkpoints.


def test_row_3_leftovers_of_a_killed_save_are_removed(half_way, capfd):
    leftover = half_way / "checkpoints" / ".tmp-step-00000007-123"
    leftover.mkdir()
    (leftover / DAMAGE).write_bytes(b"x" * 1234)
    train(small_config(), half_way)
    assert not leftover.exists()
    out = capfd.readouterr().out
    assert f"removed {leftover}, left by an interrupted save: 1,234 bytes" in out


def test_row_6_the_checkpoint_before_a_damaged_one_is_used(
    tmp_path, uninterrupted, capfd
):
    config = small_config(num_towers=2)
    train(dataclasses.replace(config, max_steps=8, checkpoint_every_steps=4), tmp_path)
    damage(tmp_path, 8)
    capfd.readouterr()
    state = train(config, tmp_path)
    out = capfd.readouterr().out
    path = tmp_path / "checkpoints"
    assert f"rejected checkpoint {path}/step-00000008: {DAMAGE}: sha256 is" in out
    assert f"restored step 4 from {path}/step-00000004" in out
    expected = uninterrupted(config)
    assert_equal_states(state, expected.state)
    assert records(tmp_path) == expected.records


def test_row_6_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    config = small_config(checkpoint_every_steps=4)
    train(dataclasses.replace(config, max_steps=8), tmp_path)
    damage(tmp_path, 8)
    train(config, tmp_path)
    for step in (4, 8, 10):
        assert checkpoints.restore_step(tmp_path / "checkpoints", step).step == step


def test_row_7_with_no_good_checkpoint_nothing_is_trained_or_deleted(tmp_path):
    config = small_config(checkpoint_every_steps=3)
    train(dataclasses.replace(config, max_steps=6), tmp_path)
    for step in (3, 6):
        damage(tmp_path, step)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train(config, tmp_path)
    message = str(caught.value)
    assert "none of the 2 checkpoints" in message
    assert message.count("sha256") == 2
    assert "step-00000003" in message and "step-00000006" in message
    assert "\n" not in message
    assert snapshot(tmp_path) == before


# Finished runs, and starting anew.


def test_a_finished_run_says_so_and_does_nothing(tmp_path, capfd):
    config = small_config(max_steps=4)
    state = train(config, tmp_path)
    before = snapshot(tmp_path)
    capfd.readouterr()
    assert_equal_states(train(config, tmp_path), state)
    assert f"{tmp_path} is finished: step 4 of 4." in capfd.readouterr().out
    assert snapshot(tmp_path) == before


def test_a_finished_run_goes_on_with_more_steps_or_epochs(tmp_path, uninterrupted):
    train(small_config(max_steps=2), tmp_path)
    train(small_config(max_steps=4), tmp_path)
    train(small_config(num_epochs=1.0), tmp_path)
    state = train(small_config(), tmp_path)
    assert_equal_states(state, uninterrupted(small_config()).state)


def test_overwrite_starts_anew_and_spares_what_is_not_the_run_s(half_way):
    (half_way / "notes.txt").write_text("mine")
    changed = small_config(seed=5, max_steps=2)
    assert train(changed, half_way, overwrite=True)["step"] == 2
    assert saved_steps(half_way) == [2]
    assert [line["step"] for line in records(half_way)] == [1, 2]
    assert len(list((half_way / "tensorboard" / "train").iterdir())) == 1
    assert (half_way / "notes.txt").read_text() == "mine"


def test_overwrite_removes_nothing_where_the_new_run_cannot_start(
    half_way, monkeypatch
):
    before = snapshot(half_way)

    def missing(data_dir):
        raise DataError("no data")

    monkeypatch.setitem(data.DATASETS, "synthetic", missing)
    with pytest.raises(DataError):
        train(small_config(), half_way, overwrite=True)
    with pytest.raises(ConfigError, match="augment=tutorial"):
        monkeypatch.setitem(data.DATASETS, "synthetic", lambda _: small_data())
        train(small_config(augment="tutorial"), half_way, overwrite=True)
    assert snapshot(half_way) == before


# Row 14: not a number.


@pytest.mark.parametrize("num_towers", [1, 3])
def test_row_14_not_a_number_stops_before_the_update(
    tmp_path, uninterrupted, monkeypatch, num_towers
):
    config = small_config(num_towers=num_towers, log_every_steps=4)
    bad_step, bad_tower = 7, num_towers - 1
    monkeypatch.setitem(AUGMENTS, "pad_crop_flip", spoiling(bad_step))
    for _ in range(2):  # the second time from the checkpoint
        message = rf"^step {bad_step}: the loss or a gradient of tower {bad_tower} \("
        with pytest.raises(NumericError, match=message):
            train(config, tmp_path)
        assert saved_steps(tmp_path) == [bad_step - 1]
    before = dataclasses.replace(config, max_steps=bad_step - 1)
    assert_equal_states(saved(tmp_path).tensors, uninterrupted(before).state)
    assert [line["step"] for line in records(tmp_path)] == [1, 4, 5]

    monkeypatch.undo()  # the data are mended
    small_runs.use(monkeypatch, small_data(), batch_norm=True)
    assert_equal_states(train(config, tmp_path), uninterrupted(config).state)


def spoiling(bad_step):
    """pad_crop_flip whose last image of a step is not a number."""

    def create(*args):
        augment = pad_crop_flip(*args)

        def augment_train(images, draw):
            steps = []

            def noted(purpose, shape):
                steps.append(draw(purpose, shape))
                return steps[-1]

            images = augment.train(images, noted)
            # The step is known here by its random numbers alone.
            crops = steps[0]
            is_bad = tf.reduce_all(crops == crops_of(bad_step, crops.shape))
            mask = tf.one_hot(len(images) - 1, len(images))[:, None, None, None]
            spoiled = tf.where(mask > 0, np.nan, images)
            return tf.where(is_bad, spoiled, images)

        return dataclasses.replace(augment, train=augment_train)

    return create


pad_crop_flip = AUGMENTS["pad_crop_flip"]


def crops_of(step, shape):
    from towers.data import randomness

    return randomness.uniform(0, "crop", tf.constant(step - 1, tf.int64), shape)


def test_row_14_a_diverging_run_ends_with_the_last_finite_parameters(tmp_path):
    config = small_config(learning_rate=1e30, clip_norm=0.0)
    with pytest.raises(NumericError, match="tower 0.* --learning_rate or --clip_norm"):
        train(config, tmp_path)
    for name, tensor in saved(tmp_path).tensors.items():
        assert np.all(np.isfinite(tensor)), name


# Row 12: signals.


class Halt:
    """Sends a signal from the midst of a run, once, and holds the run up there."""

    def __init__(self, number, *, nth=1, hold):
        self._number, self._nth, self._hold = number, nth, hold
        self._lock = threading.Lock()
        self._times = 0
        self.released = threading.Event()

    def __call__(self):
        with self._lock:
            self._times += 1
            first = self._times == self._nth
        if first:
            os.kill(os.getpid(), self._number)
            os.kill(os.getpid(), self._number)  # a second one does no harm
        if self._hold and self._times >= self._nth:
            assert self.released.wait(WAIT_SECS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "place,nth,hold,steps",
    [
        ("tracing", 1, True, []),  # no step was taken: there is nothing to save
        ("computing", 8, False, [8]),  # 2 towers: within the fourth step
        ("waiting", 6, True, [3, 4, 5]),  # batches are read ahead
        ("drawing", 1, True, [4]),
        ("evaluating", 1, True, [5]),
        ("evaluating", 7, True, [10]),  # that of the last step
        ("saving", 1, False, [3]),
    ],
)
def test_row_12_a_signal_saves_and_the_same_command_continues(
    tmp_path, uninterrupted, monkeypatch, number, place, nth, hold, steps
):
    monkeypatch.setattr(watchdog, "_GRACE_SECS", 0.1)
    config = small_config(num_towers=2, summary_every_steps=4)
    if place == "saving":
        config = dataclasses.replace(config, checkpoint_every_steps=3)
    if place == "computing":
        steps = [4]
    halt = Halt(number, nth=nth, hold=hold)
    with pytest.MonkeyPatch.context() as patch:
        halt_at(patch, place, halt)
        with pytest.raises(Preempted) as caught:
            train(config, tmp_path)
        halt.released.set()
        small_runs.join_left_behind()
    message = str(caught.value)
    assert message.startswith(f"stopped by {number.name}: ")
    assert message.endswith("; the same command continues")
    if steps:
        (step,) = saved_steps(tmp_path)
        assert step in steps
        assert f"step {step} of 10 is saved in {tmp_path}" in message
    else:
        assert saved_steps(tmp_path) == []
        assert "no step was taken" in message

    expected = uninterrupted(config)
    assert_equal_states(train(config, tmp_path), expected.state)
    assert records(tmp_path) == expected.records


def test_row_12_an_evaluation_that_was_cut_off_still_says_which_step_is_best(
    tmp_path, uninterrupted, monkeypatch
):
    monkeypatch.setattr(watchdog, "_GRACE_SECS", 0.1)
    config = small_config(
        validation_fraction=0.4, num_epochs=8.0, keep_checkpoints=1, learning_rate=0.3
    )
    whole = tmp_path / "whole"
    train(config, whole)
    (best, last) = saved_steps(whole)

    halves = tmp_path / "halves"
    cut_off = best // 3 * 2 - 1  # raw and averaged accuracies alternate
    for nth in (cut_off, 1):
        halt = Halt(signal.SIGTERM, nth=nth, hold=True)
        with pytest.MonkeyPatch.context() as patch:
            halting = small_data(before_train_read=None)
            patch.setattr(
                "towers.train.accuracy", halted(patch, halt, "towers.train.accuracy")
            )
            patch.setitem(data.DATASETS, "synthetic", lambda _, found=halting: found)
            with pytest.raises(Preempted):
                train(config, halves)
            halt.released.set()
            small_runs.join_left_behind()
    train(config, halves)
    assert saved_steps(halves) == [best, last]
    assert records(halves) == records(whole)
    assert saved(halves).trainer_state["best"] == saved(whole).trainer_state["best"]


def halted(patch, halt, name):
    """The function of a name, which halts first."""
    module, _, function = name.rpartition(".")
    call = getattr(sys.modules[module], function)

    def wrapped(*args):
        halt()
        return call(*args)

    return wrapped


def test_row_12_a_signal_after_the_last_step_changes_nothing(tmp_path, uninterrupted):
    with pytest.MonkeyPatch.context() as patch:
        halt_at(patch, "saving", Halt(signal.SIGTERM, hold=False))
        state = train(small_config(), tmp_path)
    assert_equal_states(state, uninterrupted(small_config()).state)


def test_a_step_that_does_not_end_is_reported_and_the_checkpoints_stay(half_way, capfd):
    before = [step for step in saved_steps(half_way)]
    halt = Halt(signal.SIGCONT, hold=True)  # a signal that nobody minds
    with pytest.MonkeyPatch.context() as patch:
        halt_at(patch, "computing", halt)
        message = r"^step 6 was not finished within 1.5 s .*, while computing$"
        with pytest.raises(StuckError, match=message):
            train(small_config(stuck_after_secs=1.5), half_way)
        halt.released.set()
        small_runs.join_left_behind()
    assert saved_steps(half_way) == before
    assert "Thread" in capfd.readouterr().err


# Rows 5 and 13: the folder.


def test_row_5_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: .* --workdir"):
        train(small_config(), tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        train(small_config(), tmp_path / "file")


HOLDER = """
import sys
from towers.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.create()
with folder.lock() as describe:
    describe(device="GPU")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_row_13_a_folder_has_one_trainer_and_a_dead_one_s_lock_is_taken_over(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on .*--workdir"):
            train(small_config(max_steps=1), tmp_path)
        assert not (tmp_path / "config.json").exists()
        holder.kill()
        holder.wait(WAIT_SECS)
    assert train(small_config(max_steps=1), tmp_path)["step"] == 1
