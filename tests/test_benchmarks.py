"""What is measured by hand has to run at all."""

import argparse
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

from benchmarks import measure, scaling, strategies, time_to_accuracy
from towers.build import STRATEGIES

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"
MODULES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
PROGRAMS = {
    "accuracy",
    "convolutions",
    "image_folder",
    "overhead",
    "peers",
    "pipeline",
    "recipe",
    "scaling",
    "step",
    "strategies",
    "time_to_accuracy",
}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_benchmark_imports_is_there(name):
    module = importlib.import_module(f"benchmarks.{name}")
    assert hasattr(module, "main") == (name in PROGRAMS)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_program_is_listed(name):
    assert f"python -m benchmarks.{name} " in (FOLDER / "README.md").read_text()


def test_an_unknown_name_in_a_list_is_refused_with_the_nearest():
    names_in = measure.some_of(("lenet", "resnet20"))
    assert names_in("resnet20,lenet") == ["resnet20", "lenet"]
    with pytest.raises(argparse.ArgumentTypeError, match="'resnet2'.*'resnet20'"):
        names_in("lenet,resnet2")


def test_the_table_of_strategies_has_one_tower_first_and_every_strategy():
    found = strategies.variants(8)
    assert next(iter(found.values())) == {"num_towers": 1}
    assert {options.get("strategy", "towers") for options in found.values()} == set(
        STRATEGIES
    )


@pytest.mark.parametrize(
    "efficiency,lost,words",
    [
        (0.97, {"input": 0.02, "meeting": 0.01}, "nothing"),
        (0.6, {"input": 0.35, "meeting": 0.05}, "the input"),
        (0.6, {"input": 0.05, "meeting": 0.35}, "the transfer"),
        (0.6, {"input": 0.05, "meeting": 0.05}, "too small"),
    ],
)
def test_the_sentence_names_what_takes_the_most(efficiency, lost, words):
    assert words in scaling.verdict(efficiency, lost, "GPU")


SMALLEST = "--batch_size=8 --steps=1 --rounds=1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments,row",
    [
        (f"overhead {SMALLEST} --towers=2", "| step 2 |"),
        (
            "convolutions --batch_size=2 --rounds=1 --only=8x8",
            "| 8x8 | 8x8 | 3x3 |",
        ),
        (f"peers {SMALLEST} --models=cnn", "| cnn | fit, stock layers |"),
        (f"step {SMALLEST} --models=lenet", "| lenet | towers | float32 |"),
        (f"scaling {SMALLEST} --towers=2", "| weak | 2 | 16 |"),
        (f"pipeline {SMALLEST} --wait_ms=1", "| reading 2, together |"),
        (f"strategies {SMALLEST} --device=cpu --only=replicated", "| replicated 8 |"),
        ("recipe --config=quickstart --max_steps=2", "- test accuracy: 0."),
        (
            "time_to_accuracy --config=quickstart --seeds=2 --num_epochs=0.1 "
            "--eval_every_epochs=0.1 --warmup_epochs=0",
            "- quickstart: plain 0.",
        ),
    ],
)
def test_a_program_runs_to_its_table(arguments, row):
    assert row in output_of(arguments)


def test_the_clock_of_a_run_stands_still_while_the_rate_is_measured(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time_to_accuracy.time, "monotonic", lambda: now[0])

    def rate_now():
        now[0] += 2.5
        return now[0]

    clock = time_to_accuracy.Clock(rate_now)
    for _ in range(30):
        now[0] += 7
        clock.measure_each_minute()
    clock.measure()
    assert clock.secs == 30 * 7
    # After nine times seven seconds, three times, and at the end.
    assert clock.rates == [2.5, 68.0, 133.5, 199.0, 222.5]


@pytest.mark.slow
def test_a_run_that_is_recorded_is_not_repeated(tmp_path):
    records = tmp_path / "records"
    program = (
        f"time_to_accuracy --config=quickstart --seeds=1 --records={records} "
        "--eval_every_epochs=0.1 --warmup_epochs=0 --num_epochs="
    )
    output_of(program + "0.1")
    [line] = records.read_text().splitlines()
    record = json.loads(line)
    record["found"]["plain"] = 0.12345
    records.write_text(json.dumps(record) + "\n")
    assert "- quickstart: plain 0.1235, " in output_of(program + "0.1")
    assert len(records.read_text().splitlines()) == 1
    assert "- quickstart: plain 0.1235, " not in output_of(program + "0.2")
    assert len(records.read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_folder_of_images_is_compared_with_a_file_of_them(tmp_path):
    records = np.random.default_rng(0).integers(0, 256, (10_000, 3073), np.uint8)
    records[:, 0] %= 10
    for name in test_cifar10.FILES:
        (tmp_path / name).write_bytes(records.tobytes())
    for split in ("train", "test"):
        pictures.write_folder(tmp_path, split, {"a": 200, "b": 200})
    found = output_of(
        f"image_folder --data_dir={tmp_path} --folder={tmp_path} --epochs=10 --steps=4 "
        "--log_every=2 --rounds=1"
    )
    assert re.search(r"\| image folder \| [\d,]+ \| [\d,]+ \([\d,]+\) \| \d", found)
    assert "- image folder over binary file, after the first epoch" in found


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
