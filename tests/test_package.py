"""The package in a Python session or a notebook: `from towers import ...`."""

import asyncio
import json
import re
import signal
import textwrap

import pytest
from PIL import Image
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


# Prints what differs in the process after a training; descriptor 2 is also compared
# during each import.
SIDE_EFFECTS = """
import gc, logging, os, signal, sys, threading, warnings
sys.modules.update(dict.fromkeys(["matplotlib", "scipy", "sklearn"]))
import keras, tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

layers = [keras.Input((8, 8, 3)), keras.layers.Conv2D(3, 3, groups=3)]
layers += [keras.layers.BatchNormalization(), keras.layers.GlobalAveragePooling2D()]
model = keras.Sequential([*layers, keras.layers.Dense(2)])
descriptors = set()
def descriptor():
    status = os.fstat(2)
    descriptors.add((status.st_dev, status.st_ino))
def state():
    return {
        "finders": list(sys.meta_path),
        "iterators": [dict(vars(OwnedIterator)), dict(vars(tf.data.Iterator))],
        "layers": [
            (type(x), vars(x) | {"__annotations__": {}})
            for x in vars(keras.layers).values() if isinstance(x, type)
        ],
        "model": [type(layer) for layer in model.layers],
        "standard error": descriptors,
        "frozen": gc.get_freeze_count(),
        "hooks": [sys.excepthook, threading.excepthook, sys.unraisablehook],
        "warnings": [list(warnings.filters), logging.getLogger("PIL").level],
        "signals": [signal.getsignal(x) for x in signal.valid_signals()],
    }
descriptor()
before = state() | {"standard error": set(descriptors)}
sys.addaudithook(lambda event, _: event == "import" and descriptor())
import towers
config = towers.Config(
    dataset="image_folder", data_dir="data", image_size=8, max_steps=3, batch_size=8,
    device="cpu", num_towers=1,
)
result = towers.train("run", config, model=model, report=False)
assert result.step == 3
print([name for name, value in state().items() if value != before[name]])
"""


def test_the_package_changes_nothing_else_in_a_process(tmp_path):
    for index in range(32):
        folder = tmp_path / "data" / ("train", "test")[index // 16] / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
    with Program(["-c", SIDE_EFFECTS], tmp_path) as program:
        assert program.wait() == 0, program.output
    assert program.output.splitlines()[-1] == "[]"
