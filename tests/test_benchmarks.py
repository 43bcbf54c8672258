"""The programs of benchmarks/ run, and measure.py measures."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from benchmarks import accuracy, gpu
from towers.config.choices import STRATEGIES

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


def test_benchmarks_can_be_imported_and_the_programs_are_listed():
    page = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("[a-z]*.py"):
        module = importlib.import_module(f"benchmarks.{path.stem}")
        is_listed = f"python -m benchmarks.{path.stem} " in page
        assert hasattr(module, "main") == is_listed, path.stem


def test_every_strategy_is_trained_for_its_accuracy():
    names = {f.get("strategy", "towers") for f in accuracy.STRATEGIES.values()}
    # With one worker multi_worker is replicated, on CPUs auto is towers.
    assert names == set(STRATEGIES) - {"multi_worker", "auto"}


@pytest.mark.slow
def test_the_report_on_gpus_in_miniature(tmp_path):
    path = tmp_path / "report.md"
    sections = ",".join(gpu.SECTIONS)
    output = output_of(
        f"gpu --device=cpu --secs=1200 --output={path} --sections={sections}"
    )
    assert path.read_text() == output
    _, summary = output.split("## Summary")
    for name in gpu.SECTIONS:
        assert f"| {name} | nothing amiss, " in summary


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
        timeout=1300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
