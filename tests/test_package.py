"""The package in a Python session or a notebook: `from towers import ...`."""

import inspect
import json
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import towers
from towers import evaluation, training
from towers.evaluation import predict
from towers.run.checkpointer import Checkpointer

ROOT = pathlib.Path(__file__).resolve().parents[1]

# One session that trains several times, as in a notebook: in the main thread, in that
# of a running event loop, and in another one.
SESSION = """
import asyncio, json, signal, sys
from towers import Config, evaluate, train

about = {"imported_tensorflow": "tensorflow" in sys.modules}
config = Config(dataset="embedded", width=0.05, device="cpu", num_epochs=0.02)
result = train("run", config)
about["repr"] = repr(result)
about["step"], about["path"] = result.step, str(result.path)
about["accuracy"] = result.accuracy
about["state_step"] = int(result.state["step"])
about["evaluated"] = evaluate("run")

handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
async def cell():
    return train("run", config)
about["finished"] = asyncio.run(cell()).accuracy
async def cell_in_thread():
    return await asyncio.to_thread(train, "other", config)
about["other_step"] = asyncio.run(cell_in_thread()).step
about["handlers_restored"] = handlers == [
    signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)
]
try:
    train("more", Config(dataset="embedded", device="cpu", num_towers=4))
except ValueError as error:
    about["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(about))
"""


def python(script, cwd, **kwargs):
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\nsys.path.insert(0, {str(ROOT)!r}){script}",
        ],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The folder of the session, its results, and the other lines that it printed."""
    folder = tmp_path_factory.mktemp("session")
    done = python(SESSION, folder)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert done.stderr == ""
    return folder, json.loads(last), lines


def test_a_session_trains_and_evaluates_without_importing_tensorflow_first(session):
    folder, about, _ = session
    assert not about["imported_tensorflow"]
    assert (about["path"], about["step"], about["state_step"]) == ("run", 2, 2)
    assert Checkpointer(folder / "run" / "checkpoints").steps() == [2]
    assert "step=2" in about["repr"] and len(about["repr"]) < 100
    assert about["evaluated"]["test_images"] == 2000
    assert about["evaluated"]["test_accuracy_ema"] == about["accuracy"]


def test_a_session_may_train_in_an_event_loop_and_in_another_thread(session):
    _, about, lines = session
    assert about["finished"] == about["accuracy"]
    assert any(line.startswith("run is finished: step 2 of 2") for line in lines)
    assert about["other_step"] == 2 and about["handlers_restored"]
    assert "done: step 2 of 2 is saved in other" in lines


def test_more_towers_than_the_first_call_made_are_one_line(session):
    assert session[1]["error"].startswith("ConfigError: num_towers=4 with 1 logical")


PYTHON_PAGE = (ROOT / "docs/python.md").read_text()


def page_lines():
    """The block of code of docs/python.md."""
    section = PYTHON_PAGE.partition("# In Python\n")[2]
    block = re.match(r"\n((?:    .*\n|\n)+)", section)[1]
    return textwrap.dedent(block)


def test_the_lines_of_the_page_train_and_evaluate(tmp_path):
    lines, count = re.subn(r"num_epochs=[\d.]+", "num_epochs=0.02", page_lines())
    done = python(f"\n{lines}", tmp_path)
    assert count == 1 and done.returncode == 0, done.stderr
    [accuracy] = re.findall(r"^2 (\S+) runs/shapes$", done.stdout, re.MULTILINE)
    [line] = re.findall(r"^step 2: test accuracy .*\(.*$", done.stdout, re.MULTILINE)[
        -1:
    ]
    assert f"; with moving averages of the parameters {float(accuracy):.4f} (" in line


@pytest.mark.slow
def test_the_lines_of_the_page_reach_their_accuracy(tmp_path):
    done = python(f"\n{page_lines()}", tmp_path)
    printed = re.search(r"^(\d+) (\S+) runs/shapes$", done.stdout, re.MULTILINE)
    promised = re.search(r"`(\d+) (\S+) runs/shapes`", PYTHON_PAGE)
    assert printed[1] == promised[1]
    assert float(printed[2]) == pytest.approx(float(promised[2]), abs=0.02)


@pytest.mark.parametrize("without", ["sys.stderr = None", "os.close(2)"])
def test_imports_need_no_standard_error(tmp_path, without):
    script = "import towers\nwith towers.quiet_imports(): import json\nprint('well')"
    done = python(f"\nimport os\n{without}\n{script}", tmp_path)
    assert done.stdout == "well\n"


def test_the_package_exports_what_it_lists():
    assert all(callable(getattr(towers, name)) for name in towers.__all__)


@pytest.mark.parametrize(
    "function",
    [training.train, evaluation.evaluate, evaluation.load_run, predict.predict],
)
def test_what_is_documented_is_what_is_called(function):
    documented = inspect.signature(getattr(towers, function.__name__)).parameters
    called = inspect.signature(function).parameters
    assert {n: (p.kind, p.default) for n, p in documented.items()} == {
        n: (p.kind, p.default) for n, p in called.items() if n in documented
    }
