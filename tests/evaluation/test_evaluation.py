"""Evaluation of a run's checkpoints."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from absl import flags
from marks import slow
from small_runs import NUM_TEST, arrays, numpy_logits, small_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers.cli import flags as config_flags
from towers.errors import ConfigError
from towers.evaluation.evaluate import evaluate
from towers.metrics.results import spreadsheet_csv
from towers.training.train import train

CONFIG = small_config(checkpoint_every_steps=4)


pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def workdir(tmp_path):
    """A finished run with checkpoints of steps 4, 8 and 10."""
    return shutil.copytree(small_runs.uninterrupted(CONFIG).path, tmp_path / "run")


@pytest.mark.parametrize(
    "batch_size,num_towers", [(7, 3), *(slow(*x) for x in ((24, 5), (1, 1), (500, 8)))]
)
@pytest.mark.row(24)
def test_row_24_every_test_image_counts_once(workdir, batch_size, num_towers):
    config = dataclasses.replace(CONFIG, batch_size=batch_size, num_towers=num_towers)
    result = evaluate(workdir, config)
    assert result["test_images"] == NUM_TEST
    images, labels = arrays(NUM_TEST, 1)
    for suffix, kind in (("", "params"), ("_ema", "averages")):
        logits = numpy_logits(workdir, images, kind, 10)
        correct = int(np.sum(logits.argmax(1) == labels))
        assert result[f"test_correct{suffix}"] == correct
        assert result[f"test_accuracy{suffix}"] == correct / NUM_TEST


def test_the_last_checkpoint_is_reported_on_a_line_in_a_file_and_to_tensorboard(
    workdir, capfd
):
    result = evaluate(workdir, CONFIG)
    line = capfd.readouterr().out.splitlines()[0]
    assert line.startswith("step 10: ")
    for name in ("test_accuracy", "test_accuracy_ema"):
        assert f"{result[name]:.4f}" in line
    assert json.loads((workdir / "result.json").read_text()) == result
    assert (result["reported"], result["images"]) == ("test_accuracy_ema", 100)
    for suffix in ("", "_ema"):
        events = EventAccumulator(str(workdir / "tensorboard" / f"eval{suffix}"))
        events.Reload()
        (event,) = events.Tensors("curves/accuracy")
        name = f"accuracy{suffix}"
        assert event.step == 10
        assert tf.make_ndarray(event.tensor_proto) == np.float32(result[f"test_{name}"])


def test_a_run_without_averages_has_no_ema_weights(tmp_path):
    train(tmp_path, small_config(ema_decay=0.0, validation_fraction=0.2, max_steps=1))
    result = evaluate(tmp_path, use_ema=False)
    assert result["test_images"] == NUM_TEST
    with pytest.raises(ConfigError, match=r"use_ema.* ema_decay is 0"):
        evaluate(tmp_path, use_ema=True)


def test_following_evaluates_each_new_checkpoint_once_until_the_last(workdir, capfd):
    folder, aside = workdir / "checkpoints", workdir / "aside"
    folder.rename(aside)
    folder.mkdir()
    names, slept = iter(sorted(os.listdir(aside))), []

    def sleep(secs):
        slept.append(secs)
        if len(slept) % 2:  # a checkpoint arrives
            name = next(names)
            shutil.copytree(aside / name, folder / name)

    config = dataclasses.replace(CONFIG, batch_size=500)
    result = evaluate(workdir, config, eval_interval_secs=7.0, sleep=sleep)
    assert result["step"] == 10
    assert slept == [7.0] * 5
    out = capfd.readouterr().out
    steps = re.findall(r"^step (\d+): test accuracy", out, re.MULTILINE)
    assert steps == ["4", "8", "10"]
    assert len(re.findall(r"^waiting for .* 7 s", out, re.MULTILINE)) == 3
    assert "no process trains this run now" in out


@pytest.mark.row(17)
@pytest.mark.parametrize("secs", ["nan", "inf", "-1"])
def test_a_time_that_is_none_is_refused(workdir, secs):
    values = flags.FlagValues()
    flags.DEFINE_float("secs", 0.0, "", 0.0, 1e6, flag_values=values)
    with pytest.raises(ConfigError, match="secs="):
        config_flags.parse(["program", f"--secs={secs}"], values)
    with pytest.raises(ConfigError, match="eval_interval_secs="):
        evaluate(workdir, eval_interval_secs=float(secs))


@pytest.mark.row(35)
def test_mistakes_that_cannot_be_written_are_not_named(workdir, capfd):
    path = workdir / "mistakes.csv"
    path.unlink(missing_ok=True)
    path.mkdir()
    evaluate(workdir, CONFIG)
    said = capfd.readouterr()
    assert "mistakes.csv cannot be written" in said.err + said.out
    assert f"wrongly: {path}" not in said.out
    path.rmdir()
    evaluate(workdir, CONFIG)
    assert f"wrongly: {path}" in capfd.readouterr().out


def test_tables_for_spreadsheets_hold_no_formulas():
    texts = ["=1+1", "+cat", "-dog", "@sum", "a=b", "-1", "+0.5", "don't", ""]
    content = spreadsheet_csv(["label", "number"], [[x, -0.5] for x in texts])
    rows = list(csv.reader(io.StringIO(content)))[1:]
    assert [x for x, _ in rows] == ["'=1+1", "'+cat", "'-dog", "'@sum", *texts[4:]]
    assert {x for _, x in rows} == {"-0.5"}
