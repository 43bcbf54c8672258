"""What `train(..., minutes=3, largest_batch=True)` chooses: a length, and a batch."""

import dataclasses
import gc
import math
import types

import numpy as np
import pytest
import tensorflow as tf
from small_runs import assert_equal_states, small_config

from towers import train
from towers.cluster.spec import Cluster
from towers.errors import ConfigError
from towers.parallel.devices import Devices
from towers.parallel.trainer import Trainer
from towers.training import budget, trial

STEP_SECS, EVALUATION_SECS, START_SECS = 0.5, 2.0, 10.0


@pytest.fixture
def timed(monkeypatch):
    """Fixed times in place of measured ones; to build a run takes none."""

    def time_run(trial, heartbeat):
        secs = STEP_SECS * trial.parts.last_step
        secs_of = {"linear probe": 1.0, "compiling": START_SECS - 1}
        secs_of |= {"input": secs / 5, "steps": 3 * secs / 5, "checkpoints": secs / 5}
        return secs_of, EVALUATION_SECS

    monkeypatch.setattr(budget, "time_run", time_run)
    clock = types.SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(budget, "time", clock)


@pytest.mark.parametrize("every", [0.0, 0.01])
def test_the_length_is_the_longest_that_fits(timed, tmp_path, every):
    config = small_config(eval_every_epochs=every)
    chosen = budget.chosen_by_trial(tmp_path / "run", config, 2.0, False)

    def secs(num_epochs):
        num_steps = math.ceil(num_epochs * 10_000 / config.batch_size)
        evaluations = math.ceil(num_epochs / every) if every else 0
        return START_SECS + STEP_SECS * num_steps + EVALUATION_SECS * evaluations

    left = 120 * 0.97 - budget.REPORT_SECS
    longer = chosen.num_epochs + 0.002  # two steps
    assert secs(chosen.num_epochs) <= left < secs(longer) + STEP_SECS


def test_no_time_for_a_step_is_an_error(timed, tmp_path):
    with pytest.raises(ConfigError, match=r"minutes=0.2 is too short.* take 16 s"):
        train(tmp_path / "run", small_config(), minutes=0.2)
    assert not (tmp_path / "run").exists()


def test_the_run_starts_as_slowly_and_steps_as_fast_as_its_trial(
    timed, tmp_path, monkeypatch
):
    now, begin_trial = [0.0], trial.begin_trial

    def slow_begin(*args, **kwargs):
        now[0] += 20.0
        tried = begin_trial(*args, **kwargs)
        trainer = tried.trainer
        trainer.compilation = dataclasses.replace(trainer.compilation, xla=True)
        return tried

    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(budget, "time", clock)
    monkeypatch.setattr(budget, "begin_trial", slow_begin)
    config = small_config(num_epochs=5.0, max_steps=3)
    chosen = budget.chosen_by_trial(tmp_path / "run", config, 2.0, False)
    steps_secs = 120 * 0.97 - 2 * 20 - START_SECS - budget.REPORT_SECS
    num_steps = math.ceil(chosen.num_epochs * 10_000 / config.batch_size)
    assert num_steps == steps_secs // STEP_SECS
    assert (chosen.max_steps, chosen.compile) == (3, "xla")


def test_the_steps_of_later_phases_are_timed_despite_max_steps(tmp_path, monkeypatch):
    lap = trial.Lap(steps_per_sec=4.0, input_wait_percent=0.0)
    monkeypatch.setattr(trial, "_time_steps", lambda *_: (3.0, lap))
    monkeypatch.setattr(trial, "time_evaluation", lambda *_: (7.0, 2.0))
    seen = []

    def time_run(tried, heartbeat):
        seen.append(trial.time_run(tried, heartbeat))
        return seen[-1]

    monkeypatch.setattr(budget, "time_run", time_run)
    # A quarter of the pixels in the first half of a run, so 2.5 times its first steps.
    options = {"early_sizes": "16:0.5", "max_steps": 2, "eval_every_epochs": 1.0}
    config = small_config(model="resnet20", num_epochs=0.02, **options)
    budget.chosen_by_trial(tmp_path / "run", config, 5.0, False)
    [(secs_of, evaluation_secs)] = seen
    assert secs_of["steps"] == 10_000 / 4.0 * 2.5  # of at least ten epochs
    assert secs_of["compiling"] == 2 * 3.0 + 7.0
    assert evaluation_secs == 2.0


# The largest batch.


@pytest.fixture
def gpus(monkeypatch):
    """Towers that pass for GPUs, with memory for a number of images."""
    memory = types.SimpleNamespace(num_images=40, num_towers=1, tried=[])

    def take_if_they_fit(self, num_steps):
        memory.tried.append(self.config.batch_size)
        if self.config.batch_size > memory.num_images:
            text = "OOM when allocating tensor with shape[9,9] and type float on /job:"
            text += "localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
            raise tf.errors.ResourceExhaustedError(None, None, text)

    def configure_devices(config):
        return Devices("GPU", tuple(f"/GPU:{i}" for i in range(memory.num_towers)))

    monkeypatch.setattr(trial.Trial, "take_steps", take_if_they_fit)
    monkeypatch.setattr(budget, "time_evaluation", lambda *_: None)
    fake = types.SimpleNamespace(configure_devices=configure_devices)
    monkeypatch.setattr(budget, "assembly", fake)
    return memory


@pytest.mark.parametrize(
    "batch_size,num_towers,tried,chosen",
    [
        (10, 1, [8, 16, 32, 64], 32),
        (200, 1, [128, 64, 32], 32),
        (10, 3, [6, 12, 24, 48], 24),
        (2, 3, [3, 6, 12, 24, 48], 24),
    ],
)
def test_the_batch_is_the_largest_that_fits(
    gpus, tmp_path, capsys, batch_size, num_towers, tried, chosen
):
    gpus.num_towers = num_towers
    config = small_config(batch_size=batch_size, learning_rate=0.1)
    result = budget.chosen_by_trial(tmp_path / "run", config, 0.0, True)
    assert result == dataclasses.replace(config, batch_size=chosen)
    assert gpus.tried == tried
    text = capsys.readouterr().out
    assert f"{2 * chosen} is too large: out of memory on GPU:0" in text
    assert f"it would be {0.1 * chosen / batch_size:g}\n" in text
    # The memory of the trials is free for the run.
    assert not [x for x in gc.get_objects() if isinstance(x, Trainer)]


def test_the_batch_has_at_most_the_images_of_an_epoch(tmp_path, monkeypatch):
    fake = types.SimpleNamespace(
        configure_devices=lambda _: Devices("GPU", ("/GPU:0",))
    )
    monkeypatch.setattr(budget, "assembly", fake)
    data = np.zeros((60, 8, 8, 3), np.uint8), np.arange(60) % 3
    config = small_config(accumulate_steps=2, batch_size=20)
    result = train(tmp_path / "run", config, data=data, largest_batch=True)
    assert result.config.batch_size == 16  # of 54 images, without the test images


def test_no_memory_for_an_image_is_an_error(gpus, tmp_path):
    gpus.num_images = 0
    with pytest.raises(ConfigError, match=r"=auto: 1 is too large: out of .*precision"):
        train(tmp_path / "run", small_config(), largest_batch=True)
    assert gpus.tried == [8, 4, 2, 1]
    assert not (tmp_path / "run").exists()


def test_other_errors_of_a_trial_end_it(gpus, tmp_path, monkeypatch):
    def fail(self, num_steps):
        raise tf.errors.InternalError(None, None, "a kernel failed")

    monkeypatch.setattr(trial.Trial, "take_steps", fail)
    with pytest.raises(tf.errors.InternalError, match="a kernel failed"):
        train(tmp_path / "run", small_config(), largest_batch=True)


def test_a_continued_run_keeps_its_batch_and_length(gpus, timed, tmp_path):
    config = small_config(schedule="cosine", eval_every_epochs=5.0, warmup_epochs=0.5)
    both = {"largest_batch": True, "minutes": 0.5}
    whole = train(tmp_path / "whole", config, **both)
    assert whole.config.batch_size == 32
    assert whole.step == 24  # for which the length was chosen
    train(
        tmp_path / "run", dataclasses.replace(whole.config, max_steps=whole.step // 2)
    )
    gpus.num_images, gpus.tried = 0, []
    continued = train(tmp_path / "run", config, **both)
    assert (gpus.tried, continued.step) == ([], whole.step)
    assert_equal_states(continued.state, whole.state)


def test_where_memory_does_not_limit_the_batch_auto_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"=auto: .* on the CPU, .* --batch_size=128"):
        train(tmp_path / "run", small_config(), largest_batch=True)


def test_several_workers_are_refused(gpus, tmp_path):
    cluster = Cluster(("127.0.0.1:1", "127.0.0.1:2"), 0, "cluster")
    config = small_config(strategy="multi_worker")
    options = {"cluster": cluster, "largest_batch": True}
    with pytest.raises(ConfigError, match="2 workers, and --batch_size=auto takes one"):
        train(tmp_path / "run", config, **options)
