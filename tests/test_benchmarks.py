"""The programs of benchmarks/ run, and measure.py measures."""

import importlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import accuracy, fine_tuning, gpu, measure, proofs, step
from benchmarks.graphs import executed
from towers.config.choices import STRATEGIES

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"
PROGRAMS = {"accuracy", "fine_tuning", "gpu", "input", "peers", "scaling", "step"}


def test_benchmarks_can_be_imported_and_the_programs_are_listed():
    page = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("[a-z]*.py"):
        module = importlib.import_module(f"benchmarks.{path.stem}")
        is_program = hasattr(module, "main")
        assert is_program == (path.stem in PROGRAMS)
        assert is_program <= (f"python -m benchmarks.{path.stem} " in page)


def test_the_order_is_reversed_from_round_to_round_and_warm_up_does_not_count(
    monkeypatch,
):
    monkeypatch.setattr(measure, "others_share", lambda: 0.0)
    calls = []
    things = {name: lambda name=name: calls.append(name) for name in "abc"}
    wall, processor = measure.in_turn(things, rounds=2, warm_up=1)
    assert "".join(calls) == "abccbaabc"
    assert {len(secs) for secs in (*wall.values(), *processor.values())} == {2}


def test_ratios_are_taken_round_by_round():
    seconds = {"a": [2.0, 30.0, 8.0], "b": [1.0, 10.0, 2.0]}
    assert measure.ratios(seconds, "a", "b") == (2.0, 3.0, 4.0)


def parsed(*arguments):
    return step.combinations(step.parse_options([*arguments]))


def test_every_strategy_can_be_measured_and_groups_fit_the_towers():
    fields = parsed(
        f"--strategies={','.join(STRATEGIES)}", "--towers=1,4", "--group_sizes=2,4"
    )
    sizes = {
        (f["num_towers"], f["group_size"])
        for f in fields
        if f["strategy"] == "model_parallel"
    }
    assert sizes == {(1, 1), (4, 2), (4, 4)}
    assert {f["strategy"] for f in fields} == set(STRATEGIES)
    assert (
        len({step.cells(f) for f in fields}) == len(fields) == 2 * len(STRATEGIES) + 1
    )


def test_a_wrong_name_ends_in_one_line_before_anything_is_measured():
    with pytest.raises(SystemExit, match="model='resnet2': did you mean 'resnet"):
        measure.run(lambda: parsed("--models=lenet,resnet2"))


def test_every_strategy_is_trained_for_its_accuracy():
    names = {f.get("strategy", "towers") for f in accuracy.STRATEGIES.values()}
    # With one worker multi_worker is replicated.
    assert names == set(STRATEGIES) - {"multi_worker"}


# gpu: sections, and what they must find.


def tiny_setting(lines):
    return proofs.Setting("cpu", lines.append)


@pytest.mark.slow
def test_a_tower_that_computes_on_the_device_of_another_is_found():
    setting = tiny_setting([])
    chosen = setting.devices
    right, wrong = (setting.trainer("lenet", {"num_towers": 2}) for _ in range(2))
    wrong.network._devices = [chosen.towers[0]] * 2
    counts = executed.heavy_operations(executed.executed_step(right, chosen))
    assert counts["CPU:0"] == counts["CPU:1"]
    assert counts["CPU:0"]["BackpropFilter"] == counts["CPU:0"]["Conv2D"] == 2
    counts = executed.heavy_operations(executed.executed_step(wrong, chosen))
    assert set(counts) == {"CPU:0"}


def test_an_operation_that_fell_to_the_host_is_found():
    with tf.Graph().as_default() as traced:
        with tf.device("/GPU:1"):
            tf.constant(1.0, name="tower_1/x")
        with tf.device("/CPU:0"):
            tf.constant(1.0, name="loss")
        tf.constant(1.0, name="open")
    graph = tf.compat.v1.GraphDef()
    for name, device in (
        ("while/body/_1/tower_1/x", "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("while/tower_1/x", "/job:localhost/replica:0/task:0/device:GPU:1"),
        ("while/loss", "/device:CPU:0"),
        ("open", "/device:CPU:0"),
    ):
        graph.node.add(name=name, op="Const", device=device)
    moved = executed.moved_operations(executed.requested_devices([traced]), [graph])
    assert moved == {"Const GPU:1 to CPU:0": 1}


def test_a_difference_is_relative_to_the_change_in_training():
    before = {"params/a": np.array([1.0, 2.0]), "params/b": np.zeros(1), "step": 0}
    after = {"params/a": np.array([1.0, 4.0]), "params/b": np.ones(1), "step": 1}
    other = {"params/a": np.array([1.0, 4.0]), "params/b": np.array([1.5]), "step": 1}
    assert proofs.differences(before, after, other) == {"params": 0.25}
    other["params/b"][0] = np.nan
    assert proofs.differences(before, after, other) == {"params": np.inf}


def test_photos_are_the_first_images_of_each_class(tmp_path):
    (tmp_path / "batches.meta.txt").write_text("cat\ndog\n\n")
    records = np.random.default_rng(0).integers(0, 256, (6, 3073), np.uint8)
    records[:, 0] = 1, 0, 1, 0, 1, 1
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records.tofile(tmp_path / name)
    fine_tuning.write_photos(tmp_path, tmp_path, train_count=2)
    written = sorted(tmp_path.glob("train/*/*.png"))
    assert [f"{x.parent.name} {x.stem}" for x in written] == [
        *("cat 00001", "cat 00003", "dog 00000", "dog 00002"),
    ]
    pixels = tf.io.decode_png(written[3].read_bytes()).numpy()
    assert pixels[5, 7].tolist() == records[2, [168, 1192, 2216]].tolist()
    assert len(list(tmp_path.glob("test/dog/*.png"))) == 4


@pytest.mark.slow
def test_the_report_on_gpus_in_miniature(tmp_path):
    path = tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", "--secs=1200"]
        + [f"--output={path}", f"--sections={','.join(gpu.SECTIONS)}"],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
    )
    assert path.read_text() == done.stdout
    _, summary = done.stdout.split("## Summary")
    for name in gpu.SECTIONS:
        assert f"| {name} | nothing amiss, " in summary, done.stderr
    assert done.returncode == 0


SMALLEST = "--batch_size=8 --steps=1 --rounds=1"
QUICKSTART = (
    "accuracy --config=quickstart --eval_every_epochs=0.1 --warmup_epochs=0 "
    "--num_epochs="
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments,row",
    [
        (f"peers {SMALLEST} --models=cnn", "| cnn | fit, stock layers |"),
        (f"step {SMALLEST} --models=lenet", "| lenet | towers | 1 | float32 |"),
        (
            f"step {SMALLEST} --device=cpu --towers=1,8 --strategies=replicated",
            "| cnn | replicated | 8 | float32 |",
        ),
        (
            f"scaling {SMALLEST} --device=cpu --models=lenet --workers=2 --weak",
            "| lenet | 2 | 16 |",
        ),
        (f"input {SMALLEST} --models=lenet", "| lenet | resident |"),
        (f"{QUICKSTART}0.1 --seeds=2", "- quickstart: plain 0."),
    ],
)
def test_a_program_runs_to_its_table(arguments, row):
    assert row in output_of(arguments)


def output_of(arguments):
    done = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{arguments}".split()],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
