"""What is measured by hand has to run at all."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from benchmarks import strategies
from towers.build import STRATEGIES

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"
MODULES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
PROGRAMS = {"accuracy", "overhead", "pipeline", "recipe", "strategies"}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_benchmark_imports_is_there(name):
    module = importlib.import_module(f"benchmarks.{name}")
    assert hasattr(module, "main") == (name in PROGRAMS)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_program_is_listed(name):
    assert f"python -m benchmarks.{name} " in (FOLDER / "README.md").read_text()


def test_the_table_of_strategies_has_one_tower_first_and_every_strategy():
    found = strategies.variants(8)
    assert next(iter(found.values())) == {"num_towers": 1}
    assert {options.get("strategy", "towers") for options in found.values()} == set(
        STRATEGIES
    )


SMALLEST = "--batch_size=8 --steps=1 --rounds=1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments,row",
    [
        (f"overhead {SMALLEST} --towers=2", "| step 2 |"),
        (f"pipeline {SMALLEST} --wait_ms=1", "| reading 2, together |"),
        (f"strategies {SMALLEST} --device=cpu --only=replicated", "| replicated 8 |"),
        ("recipe --config=quickstart --max_steps=2", "- test accuracy: 0."),
    ],
)
def test_a_program_runs_to_its_table(arguments, row):
    done = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{arguments}".split()],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert row in done.stdout, done.stderr
    assert done.returncode == 0
