"""The counts at the end of the tests are the sums over all workers."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(1, 5))
def test_passes(count, number):
    count("kills survived", number)
    count("crash states replayed", 500)
    count("crash states replayed", 500)

def test_fails(count):
    count("kills survived", 100)
    count("steps soaked", 1)
    assert False

def test_misspells(count):
    count("kils survived")
"""


@pytest.mark.slow
def test_counts_are_summed_over_passed_tests_and_workers(tmp_path):
    (tmp_path / "test_counted.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tally", "-q", "-n", "2"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    here = str(pathlib.Path(__file__).parent)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=inherited | {"PYTHONPATH": here},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert "kills survived: 10" in lines
    assert "crash states replayed: 4,000" in lines
    assert "steps soaked:" not in done.stdout
    assert "'kils survived' is none of" in done.stdout
    assert "2 failed, 4 passed" in lines[-1]
