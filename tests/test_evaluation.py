"""Evaluation of a run's checkpoints; "row" is one of reliability.md."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from small_runs import NUM_TEST, NUM_TRAIN, arrays, small_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers.errors import CheckpointError, ConfigError
from towers.evaluation import evaluate, report
from towers.run import checkpoints
from towers.run.folder import RunFolder
from towers.training import train

STEPS = (4, 8, 10)
CONFIG = small_config(checkpoint_every_steps=4)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_runs.use(monkeypatch)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        train(workdir, CONFIG)
    return workdir


@pytest.fixture
def workdir(finished_run, tmp_path):
    """A finished run with checkpoints of steps 4, 8 and 10."""
    return shutil.copytree(finished_run, tmp_path / "run")


def count_correct(workdir, step, use_ema):
    """In NumPy: how many test images the linear network gets right."""
    tensors = checkpoints.restore_step(workdir / "checkpoints", step).tensors
    kind = "averages" if use_ema else "params"
    train_images = arrays(NUM_TRAIN, 0)[0] / 1.0
    images, labels = arrays(NUM_TEST, 1)
    axes = (0, 1, 2)
    images = (images - train_images.mean(axes)) / train_images.std(axes)
    logits = images.reshape(NUM_TEST, -1) @ tensors[f"{kind}/logits/kernel"]
    logits += tensors[f"{kind}/logits/bias"]
    return int(np.sum(logits.argmax(1) == labels))


@pytest.mark.parametrize(
    "batch_size,num_towers", [(1, 1), (7, 1), (7, 3), (23, 2), (24, 5), (500, 8)]
)
def test_row_24_every_test_image_counts_once(workdir, batch_size, num_towers):
    config = dataclasses.replace(CONFIG, batch_size=batch_size, num_towers=num_towers)
    result = evaluate(workdir, config)
    assert result["test_images"] == NUM_TEST
    for suffix, use_ema in (("", False), ("_ema", True)):
        correct = count_correct(workdir, 10, use_ema)
        assert result[f"test_correct{suffix}"] == correct
        assert result[f"test_accuracy{suffix}"] == correct / NUM_TEST


@pytest.mark.parametrize(
    "changes,group_size",
    [
        ({}, 2),
        slow({"num_towers": 4}, 2),
        ({"strategy": "towers"}, 1),
        ({"strategy": "replicated", "num_towers": 3}, 1),
        slow({"group_size": 1, "num_towers": 3}, 1),
    ],
)
def test_a_run_that_was_split_is_evaluated_on_other_devices(
    tmp_path, changes, group_size
):
    split = small_config(strategy="model_parallel", num_towers=2, group_size=2)
    path = shutil.copytree(small_runs.uninterrupted(split).path, tmp_path / "run")
    config = RunFolder(path).evaluation_config(**changes)
    num_towers = 2 if group_size == 2 else 0
    assert config.group_size == group_size
    assert config.num_towers == changes.get("num_towers", num_towers)
    result = evaluate(path, config)
    assert result["test_correct"] == count_correct(path, 10, use_ema=False)
    assert result["test_correct_ema"] == count_correct(path, 10, use_ema=True)
    with pytest.raises(ConfigError, match="multiple of 2, or another --group_size"):
        RunFolder(path).evaluation_config(num_towers=3)


@pytest.mark.parametrize("use_ema", [True, False])
@pytest.mark.parametrize("step", [4, 10])
def test_the_step_and_the_kind_of_parameters_may_be_chosen(workdir, step, use_ema):
    result = evaluate(workdir, CONFIG, step=step, use_ema=use_ema)
    assert result["step"] == step
    suffix = "_ema" if use_ema else ""
    assert result["reported"] == f"test_accuracy{suffix}"
    assert result[f"test_correct{suffix}"] == count_correct(workdir, step, use_ema)


def test_the_choices_differ(workdir):
    """Else the test above says nothing."""
    counts = {
        (s, e): count_correct(workdir, s, e) for s in STEPS for e in (True, False)
    }
    assert len(set(counts.values())) > 1


def test_the_last_checkpoint_is_reported_on_a_line_in_a_file_and_to_tensorboard(
    workdir, capfd
):
    result = evaluate(workdir, CONFIG)
    assert result["step"] == 10
    assert capfd.readouterr().out.splitlines()[0] == (
        f"step 10: test accuracy {result['test_accuracy']:.4f} "
        f"({result['test_correct']} of {NUM_TEST}); with moving averages of the "
        f"parameters {result['test_accuracy_ema']:.4f} "
        f"({result['test_correct_ema']} of {NUM_TEST})"
    )
    assert json.loads((workdir / "result.json").read_text()) == result
    assert result["reported"] == "test_accuracy_ema"
    assert result["images"] == 100
    assert result["train_secs"] > 0
    assert result["images_per_sec"] > 0
    assert {"step", "images", "test_accuracy", "test_correct", "test_images"} <= set(
        result
    )
    events = EventAccumulator(str(workdir / "tensorboard" / "eval"))
    events.Reload()
    for name in ("test_accuracy", "test_accuracy_ema"):
        (event,) = events.Tensors(name)
        assert event.step == 10
        assert tf.make_ndarray(event.tensor_proto) == np.float32(result[name])


def test_figures_that_are_not_finite_are_null_in_the_file():
    text = report.to_json({"test_loss": np.inf, "test_accuracy": 0.5})
    assert json.loads(text) == {"test_loss": None, "test_accuracy": 0.5}


def test_training_speed_leaves_out_the_first_call(workdir):
    """The first call of the run is its first step; nine steps of ten images remain."""
    stored = checkpoints.restore_latest(workdir / "checkpoints").trainer_state
    assert stored["timed_steps"] == 9
    expected = 9 * 10 / stored["timed_secs"]
    assert evaluate(workdir, CONFIG)["images_per_sec"] == pytest.approx(expected)
    assert stored["train_secs"] > stored["timed_secs"]


def test_a_run_without_averages_is_evaluated_raw(tmp_path):
    config = small_config(ema_decay=0.0, max_steps=1)
    train(tmp_path, config)
    assert evaluate(tmp_path, config)["test_images"] == NUM_TEST
    with pytest.raises(ConfigError, match="use_ema.* ema_decay is 0"):
        evaluate(tmp_path, config, use_ema=True)


def test_the_test_set_is_reported_even_where_others_were_held_out(tmp_path):
    config = small_config(validation_fraction=0.2, max_steps=1)
    train(tmp_path, config)
    assert evaluate(tmp_path, config)["test_images"] == NUM_TEST


def test_without_a_checkpoint_it_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint yet; train first"):
        evaluate(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        evaluate(tmp_path, CONFIG, step=3)


def test_a_missing_step_lists_those_there_are(workdir):
    with pytest.raises(CheckpointError, match="step 5 in .* has: 4, 8, 10$"):
        evaluate(workdir, CONFIG, step=5)


def test_a_damaged_last_checkpoint_is_reported_and_the_one_before_evaluated(
    workdir, capfd
):
    damaged = workdir / "checkpoints" / "step-00000010"
    (damaged / "tensors.index").unlink()
    assert evaluate(workdir, CONFIG)["step"] == 8
    assert f"rejected checkpoint {damaged}: " in capfd.readouterr().out


def test_another_model_is_refused(workdir, monkeypatch):
    small_runs.use(monkeypatch, small_runs.dropout_network)
    with pytest.raises(CheckpointError, match="another model: params/conv1/kernel"):
        evaluate(workdir, CONFIG)


class Arriving:
    """A folder in which a checkpoint appears with each sleep."""

    def __init__(self, workdir, steps):
        self._folder = workdir / "checkpoints"
        self._aside = workdir / "aside"
        self._folder.rename(self._aside)
        self._steps = list(steps)
        self.slept = []

    def __call__(self, secs):
        self.slept.append(secs)
        self._folder.mkdir(exist_ok=True)
        name = f"step-{self._steps.pop(0):08d}"
        shutil.copytree(self._aside / name, self._folder / name)


@pytest.mark.parametrize("batch_size", [3, 500])
def test_following_evaluates_each_new_checkpoint_until_the_last(
    workdir, capfd, batch_size
):
    sleep = Arriving(workdir, STEPS)
    config = dataclasses.replace(CONFIG, batch_size=batch_size)
    result = evaluate(workdir, config, eval_interval_secs=7.0, sleep=sleep)
    assert result["step"] == 10
    assert sleep.slept == [7.0] * 3
    out = capfd.readouterr().out
    steps = re.findall(r"^step (\d+): test accuracy", out, re.MULTILINE)
    assert steps == ["4", "8", "10"]
    waits = re.findall(r"^waiting for (.*) in .*every 7 s", out, re.MULTILINE)
    after = "a checkpoint after step"
    assert waits == ["a checkpoint", f"{after} 4", f"{after} 8"]
    assert "no process trains this run now" in out


def test_following_ends_where_max_steps_ends_the_run(workdir):
    sleep = Arriving(workdir, [4, 8])
    config = dataclasses.replace(CONFIG, max_steps=8)
    result = evaluate(workdir, config, eval_interval_secs=1.0, sleep=sleep)
    assert result["step"] == 8
    assert len(sleep.slept) == 2


def test_following_ends_with_a_fraction_of_an_epoch(tmp_path):
    config = small_config(batch_size=5, num_epochs=1.1)
    train(tmp_path, config)
    result = evaluate(tmp_path, config, eval_interval_secs=1.0, sleep=pytest.fail)
    assert (result["step"], result["images"]) == (11, 55)


def test_following_does_not_evaluate_a_checkpoint_twice(workdir, capfd):
    sleep = Arriving(workdir, STEPS)
    arrive = sleep.__call__
    naps = []

    def sometimes(secs):
        naps.append(secs)
        if len(naps) % 2:
            arrive(secs)

    evaluate(workdir, CONFIG, eval_interval_secs=1.0, sleep=sometimes)
    assert len(naps) == 5
    assert capfd.readouterr().out.count(": test accuracy") == 3


def test_following_rejects_a_damaged_checkpoint_once_until_it_is_whole(workdir, capfd):
    data = workdir / "checkpoints" / "step-00000010" / "tensors.data-00000-of-00001"
    whole, naps = data.read_bytes(), []
    data.write_bytes(b"")

    def repair_at_last(secs):
        naps.append(secs)
        if len(naps) == 3:
            data.write_bytes(whole)

    result = evaluate(workdir, CONFIG, eval_interval_secs=1.0, sleep=repair_at_last)
    assert result["step"] == 10 and len(naps) == 3
    out = capfd.readouterr().out
    assert out.count("rejected checkpoint") == 1
    assert re.findall(r"^step (\d+): test", out, re.MULTILINE) == ["8", "10"]


def test_following_one_step_is_a_contradiction(workdir):
    with pytest.raises(ConfigError, match="step=4 with eval_interval_secs=60"):
        evaluate(workdir, CONFIG, step=4, eval_interval_secs=60.0)


@pytest.mark.parametrize("secs", [-1.0, 1e300, float("inf"), float("nan")])
def test_looking_at_intervals_without_an_end_is_refused(workdir, secs):
    with pytest.raises(ConfigError, match=r"^eval_interval_secs=.*: must be at least"):
        evaluate(workdir, CONFIG, eval_interval_secs=secs, sleep=pytest.fail)


HOLDER = """
import sys
from towers.run.folder import RunFolder
with RunFolder(sys.argv[1]).lock() as lock:
    lock.describe(device=sys.argv[2])
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("device", ["GPU", "CPU"])
def test_next_to_a_training_run_on_the_gpus_it_takes_the_cpu(workdir, capfd, device):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(workdir), device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    config = dataclasses.replace(CONFIG, device="auto")
    with holder:
        assert holder.stdout.readline() == b"held\n"
        assert RunFolder(workdir).holder()["device"] == device
        assert evaluate(workdir, config)["step"] == 10
        holder.kill()
    line = (
        f"process {holder.pid} trains this run on the GPUs, so the evaluation runs on "
        "the CPU"
    )
    assert (line in capfd.readouterr().out) == (device == "GPU")
    assert RunFolder(workdir).holder() is None
