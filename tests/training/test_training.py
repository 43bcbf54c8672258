"""Whole runs in this process."""

import dataclasses
import json
import pathlib
import types

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from boards import read_board
from marks import slow
from small_runs import (
    assert_equal_states,
    records,
    saved,
    saved_steps,
    small_config,
    snapshot,
    uninterrupted,
)
from tensorflow.python.framework import config as tf_config

import towers
from towers.config import FIELDS, Config
from towers.config.options import bind_arguments
from towers.data.batches import TrainBatches
from towers.data.sets import synthetic
from towers.errors import CheckpointError, ConfigError, DataError, NumericError
from towers.evaluation.evaluate import evaluate
from towers.parallel.trainer import SynchronousTrainer
from towers.training.train import train

EVALUATED = {"eval_every_epochs": 1.0}


pytestmark = pytest.mark.usefixtures("small")


# What a run leaves behind.


def test_deterministic_runs_are_the_same(tmp_path):
    """TensorFlow then refuses some operations, such as reading the clock."""
    config = small_config(deterministic=True, max_steps=2)
    try:
        first, second = (train(tmp_path / x, config).state for x in "ab")
    finally:
        tf_config.disable_op_determinism()
    assert_equal_states(first, second)
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    waits = [json.loads(line).get("input_wait_percent") for line in lines]
    assert any(waits) and all(wait is None or 0 <= wait <= 100 for wait in waits)


def test_a_run_leaves_records_a_checkpoint_and_its_config(tmp_path, capfd):
    # 40 of the 50 images are trained on, so the epochs end within steps 4 and 7.
    config = small_config(
        **EVALUATED,
        batch_size=6,
        accumulate_steps=2,
        num_epochs=2.3,
        num_towers=2,
        validation_fraction=0.2,
    )
    origins = {"dataset": "run folder", "width": "run folder", "num_epochs": "flags"}
    state = train(tmp_path, config, origins=origins).state

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
    assert checkpoint.run_state["images_seen"] == 8 * 12
    assert checkpoint.run_state["seed"] == config.seed
    assert checkpoint.run_state["config"] == dataclasses.asdict(config)
    assert checkpoint.run_state["stopwatch"]["train_secs"] > 0
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored == dataclasses.asdict(config)

    out = capfd.readouterr().out
    assert "2 towers with 3 images each" in out and "2 x 6 images a step" in out
    assert f"done: step 8 of 8 is saved in {tmp_path}" in out
    # The options by their layers; those of no layer are of the config.
    assert "\noptions      run folder: dataset=synthetic, width=0.05\n" in out
    assert "\n             flags: num_epochs=2.3\n             config: " in out
    rest = out.partition(" config: ")[2].partition("\ndevices")[0]
    changed = {n for n in FIELDS if getattr(config, n) != getattr(Config(), n)}
    assert {word.partition("=")[0] for word in rest.split()} == changed - set(origins)


@pytest.mark.row(18)
def test_row_18_without_a_gpu_one_line_says_that_the_cpu_is_taken(tmp_path, capfd):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    train(tmp_path, small_config(device="auto", max_steps=1))
    out = capfd.readouterr().out
    assert out.count("TensorFlow sees no GPU, so the towers run on the CPU") == 1
    with pytest.raises(ConfigError, match="device=gpu: TensorFlow sees no GPU"):
        train(tmp_path / "other", small_config(device="gpu"))


def test_tensorboard_shows_curves_histograms_and_pictures(tmp_path, monkeypatch):
    config = small_config(**EVALUATED, num_towers=3, summary_every_steps=4)
    streams, stream = [], TrainBatches.stream
    monkeypatch.setattr(
        TrainBatches, "stream", lambda *x, **y: streams.append(x) or stream(*x, **y)
    )
    state = train(tmp_path, config).state
    assert len(streams) == 1  # no data set for a summary, which is never freed
    board = tmp_path / "tensorboard"
    train_curves, test_curves, ema_curves = (
        {tag: dict(points) for tag, points in read_board(board, writer).items()}
        for writer in ("train", "test", "test_ema")
    )
    logged = {line["step"]: line for line in records(tmp_path)}

    for curves, tag, name, steps in (
        (train_curves, "curves/loss", "loss", [1, 2, 4, 6, 8, 10]),
        (train_curves, "optimizer/learning_rate", "learning_rate", [1, 2, 4, 6, 8, 10]),
        (test_curves, "curves/accuracy", "test_accuracy", [5, 10]),
        (ema_curves, "curves/loss", "test_loss_ema", [5, 10]),
    ):
        assert curves[tag] == {step: np.float32(logged[step][name]) for step in steps}
    assert list(train_curves["speed/images_per_sec"]) == [2, 4, 6, 8, 10]
    for tower, loss in enumerate(logged[8]["tower_losses"]):
        assert train_curves[f"towers/loss_{tower}"][8] == np.float32(loss)
    for name in ("params/logits/kernel", "gradients/logits/bias"):
        histograms = train_curves[f"tensors/{name}"]
        size = state[name.replace("gradients", "params")].size
        assert list(histograms) == [4, 8] and histograms[8][:, 2].sum() == size
    for curves, name in ((train_curves, "training_batch"), (test_curves, "mistakes")):
        for width, height, png in curves[f"pictures/{name}"].values():
            shape = int(height), int(width), 3
            assert tf.io.decode_png(png).shape == shape


def test_the_final_evaluation_is_that_of_the_saved_parameters(tmp_path):
    config = small_config(**EVALUATED, tta="translate")
    train(tmp_path, config)
    last = records(tmp_path)[-1]
    names = {name for name in last if name.startswith("test_")}
    assert {"test_accuracy", "test_accuracy_ema", "test_accuracy_tta_ema"} < names
    result = evaluate(tmp_path, config)
    assert {n: result[n] for n in names} == pytest.approx({n: last[n] for n in names})
    assert saved(tmp_path).run_state["best"] is None  # test images do not decide


def test_a_finished_run_does_nothing_and_keeps_as_many_checkpoints(tmp_path, capfd):
    config = small_config(checkpoint_every_steps=2, keep_checkpoints=2)
    state = train(tmp_path, config).state
    assert saved_steps(tmp_path) == [8, 10]
    before = snapshot(tmp_path)
    assert_equal_states(train(tmp_path, config).state, state)
    assert f"{tmp_path} is finished: step 10 of 10." in capfd.readouterr().out
    assert snapshot(tmp_path) == before
    train(tmp_path, dataclasses.replace(config, max_steps=7))
    out = capfd.readouterr().out
    assert f"{tmp_path} is finished: step 10, beyond 7." in out
    assert "--num_epochs=" in out and "ended at --max_steps" not in out


def test_checkpoints_and_summaries_follow_the_clock_and_train_the_same(
    tmp_path, monkeypatch
):
    """Each of the ten steps takes ten seconds. A period begins when the last one ended,
    and is looked at before each step."""
    taken = []
    train_steps = SynchronousTrainer.train

    def timed(trainer, num_steps):
        taken.append(num_steps)
        return train_steps(trainer, num_steps)

    clock = types.SimpleNamespace(monotonic=lambda: 1e6 + 10.0 * len(taken))
    monkeypatch.setattr(SynchronousTrainer, "train", timed)
    for module in ("run", "summaries"):
        monkeypatch.setattr(f"towers.training.{module}.time", clock)
    config = small_config(
        steps_per_loop=1,
        log_every_steps=100,
        summary_every_secs=25.0,
        checkpoint_every_secs=35.0,
        keep_checkpoints=99,
    )
    state = train(tmp_path, config).state
    assert saved_steps(tmp_path) == [5, 10]
    assert [line["step"] for line in records(tmp_path)] == [1, 4, 8, 10]
    board = read_board(tmp_path / "tensorboard", "train")
    steps = {name: [step for step, _ in points] for name, points in board.items()}
    assert steps["curves/loss"] == [1, 4, 8, 10]
    for name in ("params/logits/kernel", "gradients/logits/kernel"):
        assert steps[f"tensors/{name}"] == [4, 8]
    assert steps["pictures/training_batch"] == [4, 8]
    assert_equal_states(state, uninterrupted(small_config()).state)


# Finished runs, and starting again.


def test_a_step_of_more_images_than_there_are_is_warned_of(tmp_path, capfd):
    options = {"validation_fraction": 0.4, "accumulate_steps": 3, "max_steps": 1}
    for batch_size in (10, 11):
        train(tmp_path, small_config(batch_size=batch_size, **options), overwrite=True)
        banner = " ".join(capfd.readouterr().out.split())
        assert (
            "33 images, some of them more than once, as there are 30" in banner
        ) == (batch_size == 11)


def test_overwrite_starts_again_and_keeps_what_no_run_wrote(half_way, capfd):
    mine = ["notes.txt", "checkpoints/mine/a.txt", "tensorboard/mydata/a.txt"]
    for name in mine:
        (half_way / name).parent.mkdir(exist_ok=True)
        (half_way / name).write_text("mine")
    changed = small_config(seed=5, max_steps=2)
    assert train(half_way, changed, overwrite=True).step == 2
    assert saved_steps(half_way) == [2]
    assert [line["step"] for line in records(half_way)] == [1, 2]
    assert len(list((half_way / "tensorboard" / "train").iterdir())) == 1
    assert all((half_way / name).read_text() == "mine" for name in mine)
    assert f"{half_way / 'checkpoints/mine'} stays" in capfd.readouterr().out


@pytest.mark.parametrize("job", ["TOWERS_JOB", slow("SLURM_JOB_ID")])
@pytest.mark.row(44)
def test_a_restart_of_the_same_job_overwrites_once(half_way, job, monkeypatch, capfd):
    monkeypatch.setenv(job, "17")
    train(half_way, small_config(max_steps=2), overwrite=True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train(half_way, small_config(max_steps=2), overwrite=True)
    assert "is finished: step 2 of 2" in capfd.readouterr().out
    monkeypatch.setenv(job, "18")
    train(half_way, small_config(max_steps=1), overwrite=True)
    assert saved_steps(half_way) == [1]


@pytest.mark.parametrize(
    "name,wrong,right",
    [
        ("overwrite", "no", np.bool_(False)),
        ("profile_steps", (1.5, 2), np.array([2, 3])),
        ("progress", 1, np.str_("off")),
        ("class_names", None, pathlib.PurePath().parts),
        ("allow_change", "seed", ["seed"]),
        ("config", {"seed": 1}, Config(seed=1)),
    ],
)
def test_arguments_have_the_types_of_their_annotations(name, wrong, right):
    given = {"workdir": "runs", "config": Config()}
    with pytest.raises(ConfigError, match=f"^{name}="):
        towers.train(**given | {name: wrong})
    arguments = bind_arguments(train, (), given | {name: right}).arguments
    is_list = isinstance(right, list | tuple | np.ndarray)
    assert arguments[name] == (tuple(right) if is_list else right)
    assert type(arguments[name]).__module__ != "numpy"


def test_overwrite_removes_nothing_where_the_new_run_cannot_start(
    half_way, monkeypatch
):
    before = snapshot(half_way)
    with pytest.raises(ConfigError, match="augment=tutorial"):
        train(half_way, small_config(augment="tutorial"), overwrite=True)

    for source in (half_way / "nothing", half_way / "notes.txt"):
        with pytest.raises(CheckpointError):
            train(half_way, small_config(init_from=str(source)), overwrite=True)
        assert saved_steps(half_way) == [5]

    def missing(data_dir):
        raise DataError("no data")

    monkeypatch.setattr(synthetic, "load", missing)
    with pytest.raises(DataError):
        train(half_way, small_config(), overwrite=True)
    assert snapshot(half_way) == before


# Row 14: not a number.


@pytest.mark.row(14)
def test_row_14_not_a_number_stops_before_the_update(tmp_path, monkeypatch):
    config = small_config(augment="none", num_towers=3, log_every_steps=3)
    small_runs.use(monkeypatch, data_set=small_runs.spoiled(monkeypatch, 4))
    message = (
        r"^step 4: the loss or a gradient of tower 2 \(loss nan\) is not finite; .* "
        "learning rate is 0.1, the norm of the gradient nan.*--on_nonfinite=skip"
    )
    with pytest.raises(NumericError, match=message):
        train(tmp_path, config)
    assert saved_steps(tmp_path) == [3]
    assert [line["step"] for line in records(tmp_path)] == [1, 3]
    for name, tensor in saved(tmp_path).tensors.items():
        assert np.all(np.isfinite(tensor)), name


@pytest.mark.parametrize(
    "on_nonfinite,max_steps", [("stop", 1), ("skip", 0), slow("stop", 0)]
)
@pytest.mark.row(14)
def test_row_14_an_update_that_is_not_finite_is_not_saved(
    tmp_path, capsys, on_nonfinite, max_steps
):
    """Of a loss and gradients that are: their product with the rate is too large."""
    config = small_config(
        on_nonfinite=on_nonfinite,
        max_steps=max_steps,
        learning_rate=1e30,
        param_rates="*:1e30",
    )
    with pytest.raises(NumericError, match="not finite") as caught:
        train(tmp_path, config)
    assert not saved_steps(tmp_path)
    told = f"{capsys.readouterr().out}\n{caught.value}"
    assert told.count("therefore not saved") == 1
