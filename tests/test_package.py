"""The package in a Python session or a notebook: `from towers import ...`."""

import asyncio
import json
import re
import signal
import textwrap

import pytest
from processes import ROOT, Program

import towers
from towers.run.checkpointer import Checkpointer

PYTHON_PAGE = (ROOT / "docs/python.md").read_text()


def page_lines():
    """The block of code of docs/python.md."""
    section = PYTHON_PAGE.partition("# In Python\n")[2]
    block = re.match(r"\n((?:    .*\n|\n)+)", section)[1]
    return textwrap.dedent(block)


@pytest.mark.slow
def test_the_lines_of_the_page_train_also_in_a_loop(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shorter = {r"num_epochs=[\d.]+": "num_epochs=0.02", r"width=[\d.]+": "width=0.05"}
    lines, names = page_lines(), {}
    for long, short in shorter.items():
        lines, count = re.subn(long, short, lines)
        assert count == 1
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    exec(lines, names)
    result = names["result"]
    assert Checkpointer(tmp_path / "runs" / "shapes" / "checkpoints").steps() == [2]
    evaluated = json.loads((tmp_path / "runs/shapes/result.json").read_text())
    assert evaluated["test_images"] == 2000
    assert evaluated["test_accuracy_ema"] == result.accuracy
    assert "step=2" in repr(result) and len(repr(result)) < 100

    async def cell():
        return towers.train("runs/shapes", names["config"])

    assert asyncio.run(cell()).accuracy == result.accuracy
    assert "runs/shapes is finished: step 2 of 2" in capfd.readouterr().out
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert before == after


@pytest.mark.slow
def test_the_lines_of_the_page_reach_their_accuracy(tmp_path):
    with Program(["-c", page_lines()], tmp_path) as program:
        assert program.wait(600) == 0, program.output
    printed = re.search(r"^(\d+) (\S+) runs/shapes$", program.output, re.MULTILINE)
    promised = re.search(r"`(\d+) (\S+) runs/shapes`", PYTHON_PAGE)
    assert printed[1] == promised[1]
    assert float(printed[2]) == pytest.approx(float(promised[2]), abs=0.02)


def test_the_package_exports_what_it_lists():
    assert all(callable(getattr(towers, name)) for name in towers.__all__)
