"""The package in a Python session or a notebook: `from towers import ...`."""

import json
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import towers
from towers.run.checkpointer import Checkpointer

ROOT = pathlib.Path(__file__).resolve().parents[1]

PYTHON_PAGE = (ROOT / "docs/python.md").read_text()


def page_lines():
    """The block of code of docs/python.md."""
    section = PYTHON_PAGE.partition("# In Python\n")[2]
    block = re.match(r"\n((?:    .*\n|\n)+)", section)[1]
    return textwrap.dedent(block)


def python(script, cwd):
    begin = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    command = [sys.executable, "-c", begin + script]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


# After the lines of the page, in the same process.
MORE = """
import asyncio, json, signal, towers
about = {"repr": repr(result), "step": result.step, "accuracy": result.accuracy}
about["evaluated"] = json.load(open("runs/shapes/result.json"))
handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
async def cell():
    return train("runs/shapes", config)
about["finished"] = asyncio.run(cell()).accuracy
about["handlers_restored"] = handlers == [
    signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)
]
try:
    train("more", Config(dataset="shapes", device="cpu", num_towers=4))
except ValueError as error:
    about["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(about))
"""


def test_a_session_trains_by_the_lines_of_the_page_also_in_a_loop(tmp_path):
    """And TensorFlow is not imported before it is needed."""
    shorter = {r"num_epochs=[\d.]+": "num_epochs=0.02", r"width=[\d.]+": "width=0.05"}
    lines = page_lines()
    for long, short in shorter.items():
        lines, count = re.subn(long, short, lines)
        assert count == 1
    imports = "import towers; from towers import Config\n"
    imports += "assert 'tensorflow' not in sys.modules\n"
    done = python(imports + lines + MORE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *printed, last = done.stdout.splitlines()
    about = json.loads(last)
    assert Checkpointer(tmp_path / "runs" / "shapes" / "checkpoints").steps() == [2]
    assert f"2 {about['accuracy']} runs/shapes" in printed
    assert "step=2" in about["repr"] and len(about["repr"]) < 100
    assert about["evaluated"]["test_images"] == 2000
    assert about["evaluated"]["test_accuracy_ema"] == about["accuracy"]
    assert about["finished"] == about["accuracy"]
    assert any(x.startswith("runs/shapes is finished: step 2 of 2") for x in printed)
    assert about["handlers_restored"]
    # More towers than the first call made.
    assert about["error"].startswith("ConfigError: num_towers=4 with 1 logical")


@pytest.mark.slow
def test_the_lines_of_the_page_reach_their_accuracy(tmp_path):
    done = python(page_lines(), tmp_path)
    printed = re.search(r"^(\d+) (\S+) runs/shapes$", done.stdout, re.MULTILINE)
    promised = re.search(r"`(\d+) (\S+) runs/shapes`", PYTHON_PAGE)
    assert printed[1] == promised[1]
    assert float(printed[2]) == pytest.approx(float(promised[2]), abs=0.02)


def test_the_package_exports_what_it_lists():
    assert all(callable(getattr(towers, name)) for name in towers.__all__)
