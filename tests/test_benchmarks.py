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
import test_cifar10

from benchmarks import accuracy, kernels, measure, step
from towers.config.choices import STRATEGIES
from towers.parallel import placement

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"
MODULES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
PROGRAMS = {
    "accuracy",
    "convolutions",
    "input",
    "kernels",
    "overhead",
    "peers",
    "step",
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
    assert len({step.cells(f) for f in fields}) == len(fields) == 9


def test_a_wrong_name_ends_in_one_line_before_anything_is_measured():
    with pytest.raises(SystemExit, match="model='resnet2': did you mean 'resnet"):
        measure.run(lambda: parsed("--models=lenet,resnet2"))


def test_every_strategy_is_trained_for_its_accuracy():
    names = {f.get("strategy", "towers") for f in accuracy.STRATEGIES.values()}
    assert names == set(STRATEGIES)


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
    assert "| lenet | towers | 1 | float32 | ModuleNotFoundError" in output


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
    for name in test_cifar10.FILES:
        (tmp_path / name).write_bytes(records.tobytes())
    for split in ("train", "test"):
        pictures.write_folder(tmp_path, split, {"a": 200, "b": 200})
    output = output_of(
        f"input --data_dir={tmp_path} --folder={tmp_path} --batch_size=128 --steps=2 "
        "--rounds=1"
    )
    assert "| image folder | " in output
    assert "| image folder, 20 MB in memory | " in output


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


def test_kernels_reports_what_is_amiss(monkeypatch):
    options = kernels.parse_options(["--models=lenet", "--batch_size=8"])
    monkeypatch.setattr(kernels, "INPUTS", ("stream",))
    monkeypatch.setattr(kernels, "STRATEGIES", {"towers": {}})
    text, code = kernels.report(options)
    assert code == 0 and "| lenet float32 towers | stream |" in text
    assert "every operation on a GPU has a kernel there" in text
    monkeypatch.setattr(
        placement.Placement, "has_kernel", lambda p: p.op.type != "Relu"
    )
    text, code = kernels.report(options)
    assert code == 1 and re.search(r"no kernel: \d+ x Relu \(T=float32\)", text)
