"""`python -m towers.doctor`: the bottlenecks of a run, from times and in real runs."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from small_runs import small_config

from towers import build, build_trainer
from towers.config import Config
from towers.doctor import measure
from towers.doctor.diagnosis import diagnose, judge
from towers.doctor.measure import Measured

# A run that is as fast as it can be: half a second for a step of 100 images.
GOOD = Measured(
    kind="GPU",
    num_towers=4,
    images=100,
    step_secs=0.51,
    ready_secs=0.50,
    gradients_secs=0.48,
    double_secs=0.94,
    eval_secs=10.0,
    checkpoint_secs=0.5,
    num_steps=10_000,
    num_evaluations=10,
)
FILES = {"in_memory": False, "data_mb": 7_000.0}
PHOTOS, OWN = {"dataset": "image_folder"}, {"dataset": "mine.py:load"}
SLOW, MEETING = {"step_secs": 1.0}, {"ready_secs": 0.96, "step_secs": 0.96}
# 0.48 s are 0.46 + 0.02 for the images: 15/16 of 0.46 in 0.51.
SMALL, FIXED = {"double_secs": 0.5}, 0.46 * 15 / 16 / 0.51
OFTEN = {"checkpoint_every_steps": 1, "checkpoint_every_secs": 0.0}

# What differs from GOOD, options, subject and share by hand, the way out.
CASES = [
    ({}, {}, None, 0, ""),
    (SLOW | FILES, PHOTOS, "input", 0.5, "--image_cache_mb=10000 "),
    (SLOW | FILES, OWN, "input", 0.5, "`read`"),
    (SLOW | {"kind": "CPU"}, {}, "input", 0.5, "cheaper --augment; on a CPU"),
    (SLOW, {}, "input", 0.5, "--input=resident"),
    # Decoded in the first of ten epochs: a tenth of the half second, and the step.
    (
        {"step_secs": 5.5, "is_cached": True} | FILES,
        PHOTOS | {"num_epochs": 10.0},
        *("input", 0.5, "--image_cache_mb"),
    ),
    (SMALL, {}, "fixed", FIXED, "2048, fewer --num_towers or --compile=xla."),
    (SMALL | {"num_towers": 1}, {"compile": "xla"}, "fixed", FIXED, "size=2048."),
    (SMALL | {"kind": "CPU"}, {}, "fixed", FIXED, "2048 or fewer --num_towers."),
    (MEETING, {"strategy": "towers"}, "synchronization", 0.5, "=replicated"),
    (MEETING, {"strategy": "replicated"}, "synchronization", 0.5, "_steps=16"),
    # 0.51 s for 10,000 steps are 5,100 s, and so are the evaluations.
    ({"num_evaluations": 510}, {}, "evaluations", 0.5, "--eval_every_epochs=20."),
    ({"checkpoint_secs": 0.51}, OFTEN, "checkpoints", 0.5, "_every_steps=20,"),
    (
        {"checkpoint_secs": 5.0},
        {"checkpoint_every_secs": 5.0},
        *("checkpoints", 0.5, "--checkpoint_every_secs=100."),
    ),
]


@pytest.mark.parametrize("changes,options,subject,share,way_out", CASES)
def test_each_cause_has_its_share_and_a_way_out(
    changes, options, subject, share, way_out
):
    measured = dataclasses.replace(GOOD, **changes)
    verdict = judge(measured, Config(**options))
    assert verdict.images_per_sec == pytest.approx(100 / sum(verdict.secs.values()))
    if subject is None:
        assert verdict.findings == []
        assert verdict.without_findings == verdict.images_per_sec
        return
    [finding] = verdict.findings
    assert finding.subject == subject
    assert finding.share == pytest.approx(share, rel=0.03)
    assert way_out in finding.text
    faster = verdict.images_per_sec / (1 - finding.share)
    assert verdict.without_findings == pytest.approx(faster)


def test_the_largest_share_is_first_and_small_ones_are_left_out():
    measured = dataclasses.replace(GOOD, step_secs=0.8, num_evaluations=510)
    verdict = judge(measured, Config())
    assert [x.subject for x in verdict.findings] == ["evaluations", "input"]
    assert verdict.secs["synchronization"] > 0


def test_what_is_less_than_the_error_is_not_judged():
    measured = dataclasses.replace(GOOD, step_secs=0.8)
    secs = judge(measured, Config()).secs["input"]
    for error_secs, count in ((secs - 0.01, 1), (secs + 0.01, 0)):
        varied = dataclasses.replace(measured, error_secs=error_secs)
        assert len(judge(varied, Config()).findings) == count
    # Half of this run are evaluations, longer than the error of a step.
    often = dataclasses.replace(GOOD, num_evaluations=510, error_secs=0.3)
    assert [x.subject for x in judge(often, Config()).findings] == ["evaluations"]


def test_asynchronous_towers_have_no_synchronization():
    measured = dataclasses.replace(GOOD, gradients_secs=0.2, double_secs=0.4)
    verdict = judge(measured, Config(strategy="async_towers"))
    assert verdict.secs["synchronization"] == 0
    assert verdict.secs["gradients"] == 0.5


# What is timed.


@pytest.mark.parametrize(
    "options",
    [{"accumulate_steps": 2}, slow({}), slow({"strategy": "async_towers"})],
    ids=str,
)
def test_steps_are_taken_and_neither_gradients_nor_parameters_move(options):
    config = small_config(num_towers=2, batch_size=6, ema_decay=0.0, **options)
    config = measure.without_learning(config)
    devices, parts = build_trainer.configure_devices(config), build.build(config)
    trainer = build_trainer.create_trainer(config, parts, devices)
    batch = parts.train_batches(tf.constant(0, tf.int64))
    runs = measure.create_runs(config, parts, devices, trainer, batch)
    before = trainer.state()
    for name in (measure.GRADIENTS, measure.DOUBLE):
        runs[name](2)
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, before[name], name)
    runs[measure.INPUT](2)
    assert trainer.step == 2
    for name, array in trainer.state().items():
        if name.startswith("params/"):
            np.testing.assert_allclose(array, before[name], atol=1e-9)


# Real runs.

SLOW_DATA = """
import dataclasses, time
import tensorflow as tf
from towers.data.sets import synthetic


class Slow:
    def __init__(self, source):
        self.num_examples, self.image_shape = source.num_examples, source.image_shape
        self._source = source

    def read(self, indices):
        def wait(indices):
            time.sleep(0.1)
            return indices

        waited = tf.numpy_function(wait, [indices], tf.int64)
        return self._source.read(tf.ensure_shape(waited, indices.shape))


def load():
    data = synthetic.load(image_size=8, num_examples=(400, 40))
    return dataclasses.replace(data, train=Slow(data.train))
"""
PLAIN = {"augment": "none", "ema_decay": 0.0, "weight_decay": 0.0}
RUNS = {
    "input": {"dataset": "slow.py:load", "batch_size": 8},
    None: PLAIN | {"width": 0.25, "batch_size": 256, "num_towers": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("subject", RUNS)
def test_the_doctor_finds_the_bottleneck_of_a_real_run(
    subject, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("slow.py").write_text(SLOW_DATA)
    config = small_config(**{"augment": "none"} | RUNS[subject])
    for secs in (2.0, 10.0):  # next to other work on the machine it takes longer
        verdict = diagnose(tmp_path / "runs" / "mine", config, measure_secs=secs)
        lines = capfd.readouterr().out.splitlines()
        subjects = [finding.subject for finding in verdict.findings]
        if subjects[:1] == [subject] * bool(subject):
            break
    else:
        pytest.fail("\n".join(lines))
    assert lines[-1].startswith("run: ") and "images/s" in lines[-1]
    # Nothing is left.
    assert {path.name for path in tmp_path.iterdir()} <= {"slow.py", "__pycache__"}
