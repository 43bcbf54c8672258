"""The programs of benchmarks/ run, and measure.py measures."""

import importlib
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pictures
import pytest
import tensorflow as tf

from benchmarks import (
    accuracy,
    gpu,
    kernels,
    measure,
    proofs,
    setting,
    speeds,
    step,
)
from benchmarks.graphs import placement
from towers.config import Config
from towers.config.choices import STRATEGIES
from towers.training import train

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"
MODULES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
PROGRAMS = {
    "accuracy",
    "convolutions",
    "determinism",
    "files",
    "exports",
    "gpu",
    "input",
    "kernels",
    "overhead",
    "peers",
    "scaling",
    "step",
    "workers",
}


@pytest.mark.parametrize("name", MODULES)
def test_every_import_of_a_benchmark_exists(name):
    module = importlib.import_module(f"benchmarks.{name}")
    assert hasattr(module, "main") == (name in PROGRAMS)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_program_is_listed(name):
    assert f"python -m benchmarks.{name} " in (FOLDER / "README.md").read_text()


def test_the_order_is_reversed_from_round_to_round_and_warm_up_does_not_count():
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
    assert len({step.cells(f) for f in fields}) == len(fields) == 11


def test_a_wrong_name_ends_in_one_line_before_anything_is_measured():
    with pytest.raises(SystemExit, match="model='resnet2': did you mean 'resnet"):
        measure.run(lambda: parsed("--models=lenet,resnet2"))


def test_every_strategy_is_trained_for_its_accuracy():
    names = {f.get("strategy", "towers") for f in accuracy.STRATEGIES.values()}
    # With one worker multi_worker is replicated.
    assert names == set(STRATEGIES) - {"multi_worker"}


def test_the_clock_of_a_run_stands_still_while_the_rate_is_measured(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(accuracy.time, "monotonic", lambda: now[0])

    def measure_rate():
        now[0] += 2.5
        return now[0]

    clock = accuracy.Clock(measure_rate)
    for _ in range(30):
        now[0] += 7
        clock.measure_each_minute()
    clock.measure()
    assert clock.secs == 30 * 7
    # After nine times seven seconds, three times, and at the end.
    assert clock.rates == [2.5, 68.0, 133.5, 199.0, 222.5]


# gpu: sections, and what they must find.


def tiny_setting(lines, ends_at=float("inf")):
    return setting.Setting("cpu", lines.append, ends_at)


def test_sections_share_the_time_and_what_one_leaves_is_for_the_others(monkeypatch):
    now, given = [0.0], {}
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    def run(name, options, secs, write):
        given[name] = secs
        now[0] += {"placement": 10.0, "equality": 522.0}.get(name, secs)
        return "nothing amiss"

    names = "placement,equality,shares,recipe"
    options = gpu.parse_options([f"--sections={names}", "--minutes=9"])
    results = gpu.run_sections(options, gpu.Report(None), run)
    shares = [gpu.SECTIONS[name].share for name in names.split(",")]
    assert given["placement"] == 540 * shares[0] / sum(shares)
    assert given["equality"] == 530 * shares[1] / sum(shares[1:])
    assert list(given) == ["placement", "equality"]  # 8 s are left
    assert results["shares"].startswith("not started: ")
    assert results["recipe"].startswith("not started: 8 s")


def test_a_section_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.parse_options(["--sections=placement,scalling"])
    assert "--sections=scalling" in capsys.readouterr().err


@pytest.mark.slow
def test_a_case_that_fails_has_a_row_and_the_others_are_measured():
    lines = []

    def fails():
        raise tf.errors.ResourceExhaustedError(
            None, None, "Graph execution error:\n\nOOM when\n\t [[{{node a}}]] [Op:b]"
        )

    cases = {("big",): fails, ("small",): lambda: (1, 2)}
    assert tiny_setting(lines).table("size | a | b", cases) == [("big",)]
    assert lines[1:3] == [
        "| big | not measured: ResourceExhaustedError: OOM when |",
        "| small | 1 | 2 |",
    ]
    lines.clear()
    assert tiny_setting(lines, ends_at=0.0).table("size | a | b", cases) == []
    assert lines[-1] == "Not measured, as no time was left: big; small.\n"


@pytest.mark.slow
def test_a_tower_that_computes_on_the_device_of_another_is_found():
    chosen = tiny_setting([]).devices()

    def trainer():
        fields = {"num_towers": 2}
        return proofs.create(tiny_setting([]), chosen, "lenet", fields)

    right, wrong = trainer(), trainer()
    wrong.network._devices = [chosen.towers[0]] * 2
    counts = proofs.heavy_operations(proofs.executed_step(right, chosen))
    assert counts["CPU:0"] == counts["CPU:1"]
    assert counts["CPU:0"]["BackpropFilter"] == counts["CPU:0"]["Conv2D"] == 2
    counts = proofs.heavy_operations(proofs.executed_step(wrong, chosen))
    assert set(counts) == {"CPU:0"}


def test_an_operation_that_fell_to_the_host_is_found():
    with tf.Graph().as_default() as traced:
        with tf.device("/GPU:1"):
            tf.constant(1.0, name="tower_1/x")
        with tf.device("/CPU:0"):
            tf.constant(1.0, name="loss")
        tf.constant(1.0, name="open")
    executed = tf.compat.v1.GraphDef()
    for name, device in (
        ("while/body/_1/tower_1/x", "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("while/tower_1/x", "/job:localhost/replica:0/task:0/device:GPU:1"),
        ("while/loss", "/device:CPU:0"),
        ("open", "/device:CPU:0"),
    ):
        executed.node.add(name=name, op="Const", device=device)
    moved = proofs.moved_operations(proofs.requested_devices([traced]), [executed])
    assert moved == {"Const GPU:1 to CPU:0": 1}


def test_a_difference_is_relative_to_the_change_in_training():
    before = {"params/a": np.array([1.0, 2.0]), "params/b": np.zeros(1), "step": 0}
    after = {"params/a": np.array([1.0, 4.0]), "params/b": np.ones(1), "step": 1}
    other = {"params/a": np.array([1.0, 4.0]), "params/b": np.array([1.5]), "step": 1}
    assert proofs.differences(before, after, other) == {"params": 0.25}
    other["params/b"][0] = np.nan
    assert proofs.differences(before, after, other) == {"params": np.inf}


@pytest.mark.slow
def test_the_report_on_gpus_in_miniature(tmp_path):
    path = tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", "--minutes=40"]
        + [f"--output={path}"],
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
        ("overhead --batch_size=8 --steps=2 --rounds=7 --towers=1,2", "| step 2 |"),
        (
            "convolutions --batch_size=2 --rounds=1 --only=8x8",
            "| 8x8 | 8x8 | 3x3 |",
        ),
        (f"peers {SMALLEST} --models=cnn", "| cnn | fit, stock layers |"),
        (f"step {SMALLEST} --models=lenet", "| lenet | towers | 1 | float32 |"),
        (
            f"step {SMALLEST} --device=cpu --towers=1,8 --strategies=replicated",
            "| cnn | replicated | 8 | float32 |",
        ),
        (
            f"step {SMALLEST} --device=cpu --towers=1,2 --scaling",
            "| weak | 2 | 16 |",
        ),
        (
            f"step {SMALLEST} --device=cpu --models=lenet --against=.",
            "| lenet | towers | 1 | float32 |",
        ),
        (f"input {SMALLEST} --wait_ms=1", "| reading 2, together |"),
        (f"{QUICKSTART}0.1 --seeds=2", "- quickstart: plain 0."),
    ],
)
def test_a_program_runs_to_its_table(arguments, row):
    assert row in output_of(arguments)


@pytest.mark.slow
def test_a_checkout_that_fails_says_why():
    output = output_of(f"step {SMALLEST} --models=lenet --against={FOLDER}")
    assert "No module named 'benchmarks'" in output


@pytest.mark.slow
def test_a_run_that_is_recorded_is_not_repeated(tmp_path):
    records = tmp_path / "records"
    program = f"--seeds=1 --records={records}"
    output_of(f"{QUICKSTART}0.1 {program}")
    [line] = records.read_text().splitlines()
    record = json.loads(line)
    record["result"]["plain"] = 0.12345
    records.write_text(json.dumps(record) + "\n")
    assert "- quickstart: plain 0.1235, " in output_of(f"{QUICKSTART}0.1 {program}")
    assert len(records.read_text().splitlines()) == 1
    assert "- quickstart: plain 0.1235, " not in output_of(f"{QUICKSTART}0.2 {program}")
    assert len(records.read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_folder_of_images_is_compared_with_a_file_of_them(tmp_path):
    records = np.random.default_rng(0).integers(0, 256, (10_000, 3073), np.uint8)
    records[:, 0] %= 10
    numbered = [f"data_batch_{number}.bin" for number in range(1, 6)]
    for name in [*numbered, "test_batch.bin"]:
        (tmp_path / name).write_bytes(records.tobytes())
    for split in ("train", "test"):
        pictures.write_folder(tmp_path, split, {"a": 200, "b": 200})
    output = output_of(
        f"input --data_dir={tmp_path} --folder={tmp_path} --batch_size=128 --steps=2 "
        "--rounds=1"
    )
    assert "| image folder | " in output
    assert "| image folder, 20 MB in memory | " in output


@pytest.mark.slow
def test_many_files_are_listed_and_removed(tmp_path):
    folder = tmp_path / "many"
    output = output_of(f"files --folder={folder} --num_files=2000 --device=cpu")
    assert "| listed | " in output and "| checked | " in output
    assert not folder.exists()


@pytest.mark.slow
def test_loaders_of_photos_are_compared(tmp_path):
    output = output_of(
        f"input --photos=100 --folder={tmp_path} --batch_size=8 --steps=1 --rounds=1 "
        "--device=cpu"
    )
    assert "| towers | " in output and "| tf.data, half | " in output
    assert "2 towers of resnet18 at 64x64" in output


@pytest.mark.slow
def test_exports_are_compared_with_their_run(tmp_path):
    small = {"dataset": "embedded", "model": "lenet", "width": 0.2, "device": "cpu"}
    train(tmp_path / "run", Config(**small, max_steps=2, eval_every_epochs=0.0))
    output = output_of(f"exports --runs={tmp_path / 'run'} --num_images=600")
    for words in ("(the trainer's)", "saved_model", "keras", "tflite int8"):
        assert f"| run | {words} | " in output
    lines = [line for line in output.splitlines() if "| run |" in line]
    rows = [line.split(" | ") for line in lines[1:]]  # after the titles
    assert float(rows[1][2]) < 1e-4 and rows[0][5] == rows[1][5]


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


@pytest.mark.slow
def test_kernels_reports_what_is_amiss(monkeypatch):
    options = "--models=lenet --batch_size=8 --strategies=one,towers".split()
    options, lines = kernels.parse_options(options), []
    monkeypatch.setattr(kernels, "INPUTS", ("stream",))
    assert not kernels.report(options, lines.append)
    rows = [line.split(" | ") for line in lines if line.startswith("| lenet ")]
    assert [int(row[6]) for row in rows] == [0, 8]  # gradients, loss and correct of two
    assert "\nevery operation on a GPU has a kernel there" in lines
    monkeypatch.setattr(
        placement.Placement, "has_kernel", lambda p: p.op.type != "Relu"
    )
    lines.clear()
    assert kernels.report(options, lines.append)
    assert re.search(r"no kernel: \d+ x Relu \(T=float32\)", "".join(lines))


@pytest.mark.slow
def test_an_alternative_that_fails_has_its_reason_and_the_others_are_measured(
    monkeypatch,
):
    wrong = {"wrong": ({"model": "resnet21"}, {}), "TF32 off": ({}, {"tf32": False})}
    as_it_is = speeds.ALTERNATIVES[speeds.AS_IT_IS]
    monkeypatch.setattr(speeds, "ALTERNATIVES", {speeds.AS_IT_IS: as_it_is} | wrong)
    lines = []
    assert speeds.alternatives(tiny_setting(lines))
    [row] = [line for line in lines if line.startswith("| cnn ")]
    assert "resnet21" in row.split(" | ")[4]
    assert re.match(r"\d\.\d{3} .* s\) \|$", row.split(" | ", 5)[5])
