"""The wheel that `make dist` builds, installed without a checkout."""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile

import pytest
from PIL import Image
from processes import ROOT, WAIT_SECS, environ_of

pytestmark = pytest.mark.slow


def checked(*command, cwd, **environ):
    """What a command prints that ends well, on both streams."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environ_of({"PYTHONPATH": "", **environ}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def tracked():
    """The files of the checkout that are in git."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout of git")
    names = checked("git", "ls-files", "-z", cwd=ROOT).split("\0")
    return {name for name in names if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def dist(tracked, tmp_path_factory):
    """The wheel and the source distribution, built in a copy of the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "configs" / "__pycache__").mkdir()
    (copy / "configs" / "__pycache__" / "photos.pyc").touch()
    checked("make", "-o", "setup", f"PY={sys.executable}", "dist", cwd=copy)
    [wheel], [source] = ((copy / "dist").glob(x) for x in ("*.whl", "*.tar.gz"))
    return wheel, source


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """An environment with the wheel and the packages of this one."""
    environment = tmp_path_factory.mktemp("environment")
    checked(sys.executable, "-m", "venv", "--without-pip", ".", cwd=environment)
    python = environment / "bin" / "python"
    [folder] = environment.glob("lib/python*/site-packages")
    paths = [x for x in sys.path if x.endswith("-packages")]
    (folder / "others.pth").write_text("\n".join(paths))
    pip = sys.executable, "-m", "pip", "-qq", "--python", python
    options = "--no-index", "--no-deps", "--ignore-installed"  # `make` links the clone
    checked(*pip, "install", *options, dist[0], cwd=environment)
    return environment


@pytest.fixture
def typed(installed, tmp_path):
    """Runs a line in an empty folder, with the programs of the environment."""
    path = f"{installed / 'bin'}:{os.environ['PATH']}"
    return lambda line: checked(*shlex.split(line), cwd=tmp_path, PATH=path)


def test_what_is_built_has_the_files_of_the_checkout(dist, tracked):
    wheel, source = dist
    with tarfile.open(source) as archive:
        names = {x.name.partition("/")[2] for x in archive if x.isfile()}
    names -= {"PKG-INFO", "setup.cfg"}  # of setuptools
    assert {x for x in names if not x.startswith("tf_towers.egg-info/")} == tracked

    inside = {x: x for x in tracked if x.startswith("towers/")}
    inside |= {f"towers/recipes/{x[8:]}": x for x in tracked if x.startswith("configs")}
    with zipfile.ZipFile(wheel) as archive:
        names = {x for x in archive.namelist() if ".dist-info/" not in x}
        assert names == set(inside) > {"towers/py.typed", "towers/recipes/photos.py"}
        for name, path in inside.items():
            assert archive.read(name) == (ROOT / path).read_bytes(), name


def test_a_run_is_trained_evaluated_and_exported_without_a_checkout(typed, tmp_path):
    Image.new("RGB", (50, 40)).save(tmp_path / "photo.png")
    place = typed("python -c 'import towers; print(towers.__file__)'")
    assert "site-packages" in place and str(ROOT) not in place
    run = "--device=cpu --workdir=runs/quickstart"
    train = "towers-train --config=quickstart --device=cpu --batch_size=16"
    printed = [
        typed(f"{train} --max_steps=3"),
        typed(f"towers-eval {run}"),
        typed(f"towers-predict {run} --json photo.png"),
        typed("towers-export --workdir=runs/quickstart --format=keras"),
        typed(f"{train} --max_steps=1 --workdir=other --lr_range_test"),
    ]
    folder = tmp_path / "runs" / "quickstart"
    assert json.loads((folder / "result.json").read_text())["step"] == 3
    report = json.loads((folder / "report" / "report.json").read_text())
    assert report["command"] == [*train.split(), "--max_steps=3"]
    lines = [x for x in printed[2].splitlines() if x.startswith("{")]
    assert [json.loads(x)["path"] for x in lines] == ["photo.png"]
    assert list((folder / "export").glob("*.keras"))
    assert re.search(r"suggested learning rate .*: towers-train --\w+", printed[-1])
    for text in printed:
        assert not re.search(r"run_\w+\.py|" + re.escape(str(ROOT)), text)


def test_make_links_the_clone_for_programs_elsewhere(tracked, tmp_path):
    clone, place = tmp_path / "clone", tmp_path / "elsewhere"
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((ROOT / name).read_bytes())
    place.mkdir()
    checked(sys.executable, "-m", "venv", "--without-pip", ".venv", cwd=clone)
    [folder] = clone.glob(".venv/lib/python*/site-packages")
    paths = [x for x in sys.path if x.endswith("-packages")]
    (folder / "others.pth").write_text("\n".join(paths))
    lock = (clone / "requirements.lock").read_bytes()
    (clone / ".venv/.installed").write_bytes(lock)  # what the lock names is here
    for _ in range(2):
        checked("make", "CUDA=0", "setup", cwd=clone)
        code = "import towers.cli.train; print(towers.__file__)"
        printed = checked(clone / ".venv/bin/python", "-c", code, cwd=place)
        assert printed.strip().endswith(str(clone / "towers/__init__.py"))
    assert (clone / ".venv/bin/towers-train").exists()


PROGRAM = """
import pathlib
from typing import Any, assert_type

import numpy as np

import towers
from towers import Config, callbacks, evaluate, export, load_run, predict, train


class Printer(callbacks.Callback):
    def on_evaluation(self, step: int, metrics: callbacks.Metrics) -> None:
        print(step, metrics["test_accuracy"])


config = Config(dataset="shapes", num_epochs=2, learning_rate=0.1)
assert_type(config.num_epochs, float)
result = train("runs/a", config, callbacks=[Printer()], profile_steps=(5, 10))
assert_type(result.accuracy, float | None)
assert_type(result.history["loss"].values, np.ndarray)
assert_type(evaluate(pathlib.Path("runs/a"), step="last"), dict[str, Any])
assert_type(predict("runs/a", ["a.jpg"]).top(5), list[list[tuple[str, float]]])
run = load_run("runs/a", step=5)
assert_type(run.image_shape, tuple[int, int, int])
images = np.zeros((2, *run.image_shape), np.uint8)
data = (images, np.zeros(2, np.int64)), (images, [0, 1])
train("runs/b", config, data=data, class_names=["a", "b"])
assert_type(export("runs/b", "keras"), pathlib.Path)

Config(num_epochs="2")  # wrong
train("runs/a")  # wrong
train("runs/a", config, callbacks=[print])  # wrong
load_run("runs/a").steps  # wrong
towers.trainn("runs/a", config)  # wrong
"""


def test_mypy_accepts_a_program_and_finds_its_mistakes(installed, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    python = installed / "bin" / "python"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "program.py"),
            *("--python-executable", python),
        ],
        cwd=tmp_path,
        env=environ_of({"PYTHONPATH": ""}),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = PROGRAM.splitlines()
    wrong = {i for i, line in enumerate(lines, 1) if line.endswith("# wrong")}
    found = re.findall(r"^program.py:(\d+): error", done.stdout, re.MULTILINE)
    assert {int(x) for x in found} == wrong, done.stdout + done.stderr
