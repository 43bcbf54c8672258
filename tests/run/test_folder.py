"""A run's folder and who holds it."""

import dataclasses
import os
import pathlib
import platform
import subprocess
import threading
import time

import pytest
from processes import Program

import towers
from towers import store
from towers.check.report import check
from towers.cli.recipes import config_of_flags
from towers.config import Config, to_json
from towers.data.files.paths import data_folder
from towers.errors import ConfigError, WorkerLostError
from towers.exporting.export import export
from towers.run.board import Board
from towers.run.folder import RunFolder
from towers.run.stored_config import evaluation_config, stored_config

# Holds a run folder until it is killed, or until its standard input is closed.
HOLD = """
import sys
from towers.run.folder import RunFolder
with RunFolder(sys.argv[1]).lock() as lock:
    lock.describe(device="GPU")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "quickstart")
    folder.create()
    return folder


@pytest.fixture
def other_process(folder, tmp_path):
    """A process that holds the folder."""
    pipe = {"stdin": subprocess.PIPE}
    with Program(["-c", HOLD, folder.path], tmp_path, **pipe) as program:
        program.wait_for("held")
        yield program.process


# The lock.


@pytest.mark.row(13)
def test_a_second_process_is_refused_with_the_id_of_the_first(folder, other_process):
    with pytest.raises(ConfigError) as caught, folder.lock():
        pass
    message = str(caught.value)
    for word in (str(folder.path), f"process {other_process.pid} on ", "--workdir"):
        assert word in message
    assert os.uname().nodename in message
    # The refused one has not described itself, and evaluations see the holder.
    about = {"pid": other_process.pid, "host": os.uname().nodename, "device": "GPU"}
    assert folder.holder() == about
    # A worker waits: the machine may be lost, and its lock end later (exit 75).
    begun = time.monotonic()
    with pytest.raises(WorkerLostError, match=f"process {other_process.pid} on "):
        folder.lock(wait_secs=0.3)
    assert time.monotonic() - begun >= 0.3


@pytest.mark.row(13)
def test_the_chief_takes_over_the_lock_of_a_process_that_is_killed_meanwhile(
    folder, other_process, capsys
):
    killing = threading.Timer(0.3, other_process.kill)
    killing.start()
    with folder.lock(wait_secs=60.0) as lock:
        lock.describe(device="a long name that is written over")
        lock.describe(device="CPU", towers=2)
        about = {"pid": os.getpid(), "host": os.uname().nodename}
        assert folder.holder() == about | {"device": "CPU", "towers": 2}
        with pytest.raises(ConfigError), RunFolder(folder.path).lock():
            pass  # asking for the holder has taken no lock
    killing.join()
    assert folder.holder() is None
    [line] = capsys.readouterr().out.splitlines()
    assert f"process {other_process.pid} on " in line
    assert line.endswith("; waiting for its lock, up to 60 s")


# Making and clearing.


@pytest.mark.row(49)
def test_a_home_is_expanded_and_no_run_lies_in_the_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/run").path == tmp_path / "run"
    with pytest.raises(ConfigError, match="is the run itself"):
        RunFolder(tmp_path / "run").validate_not_inside_data("~/run", "shapes", "")
    for workdir in ("/", "//", "/usr/..", ""):
        with pytest.raises(ConfigError, match=r"^workdir"):
            RunFolder(workdir)


@pytest.mark.row(5)
@pytest.mark.parametrize("place", ["", "run", "checkpoints"])
def test_a_regular_file_in_the_way_is_refused(tmp_path, place):
    path = file = tmp_path / "file"
    if place == "checkpoints":
        path = tmp_path
        file = path / place
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"cannot be written.*--workdir"):
        RunFolder(path / "run" if place == "run" else path).create()
    assert file.read_text() == "mine"


@pytest.mark.row(49, 54)
@pytest.mark.parametrize(
    "path", ["gs://bucket/a", pathlib.Path("hf://a/b"), "~nosuch/a"]
)
def test_urls_and_homes_of_nobody_are_refused_before_anything(
    tmp_path, monkeypatch, path
):
    """In every place that takes a path."""
    monkeypatch.chdir(tmp_path)
    text, config = os.fspath(path), Config()
    calls = [
        lambda: towers.train(path, config),
        lambda: towers.dry_run(path, config),
        lambda: towers.evaluate(path),
        lambda: towers.load_run(path),
        lambda: towers.compare([path, "b"]),
        lambda: towers.predict(path, __file__),
        lambda: towers.write_predictions("a", __file__, output=path),
        lambda: export(path, "keras"),
        lambda: export("a", "keras", path),
        lambda: Config(teacher=text),
        lambda: config_of_flags(None, tmp_path, {}, workdir=text),
        lambda: config_of_flags(f"{text}.py", tmp_path, {}),
    ]
    if "~" not in text:
        calls += [
            lambda: data_folder(text),
            lambda: check("shapes", "", grid_path=text),
        ]
    for call in calls:
        with pytest.raises(ConfigError, match=f"^[a-z_]+='?{text}.*; give "):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.row(53)
def test_clear_removes_what_runs_write_and_names_the_rest(folder, monkeypatch):
    """Also an event file of a machine that is named by its address."""
    board, events = folder.boards[0], "events.out.tfevents.1700000000.a.host"
    written = [folder.config, folder.dataset_info, folder.metrics, folder.result]
    written += [folder.path / ".mlflow-run", folder.report / "index.html"]
    written += [folder.checkpoints / "step-00000001" / "MANIFEST.json"]
    written += [board / f"{events}.17"]
    named = [folder.report / "notes.md", board / f"{events}.17.0.v2"]
    named += [board / f"{events}.17.3"]
    inside = [folder.best / "a.keras", folder.tensorboard / "baseline" / f"{events}.17"]
    notes = [folder.path / "notes.txt", folder.path / "figures" / "loss.png"]
    for path in (*written, *named, *inside, *notes):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    monkeypatch.setattr(platform, "node", lambda: "192.168.1.34")
    Board(folder.tensorboard, "test").scalars(1, {"loss": 1.0})
    with folder.lock():
        assert {*folder.clear()} == {*named, *(path.parent for path in inside)}
        with pytest.raises(ConfigError), folder.lock():
            pass  # the lock is in the folder too, and is still held
    assert not any(path.exists() for path in written)
    assert not folder.checkpoints.exists() and not folder.boards[1].exists()
    assert all(path.read_text() == "{}" for path in (*named, *inside, *notes))
    folder.clear()


# Small files.


def test_the_stored_config_comes_back(folder, tmp_path):
    config = Config(seed=3, batch_size=7)
    store.write_aside(folder.config, to_json(config))
    assert stored_config(folder) == config
    repeating = dataclasses.replace(config, repeats=3, all_reduce="nccl")
    store.write_aside(folder.config, to_json(repeating))
    assert evaluation_config(folder, batch_size=1).batch_size == 1  # has no repeats
    assert evaluation_config(folder).all_reduce == "auto"  # nccl needs two GPUs
    folder.config.unlink()
    for path in (folder.path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=f"{path} holds no run.*--workdir"):
            stored_config(RunFolder(path))
    for content in (b"", b'{"seed": 3', b'{"sed": 3}', b"\xff\xfe\x00", b"[]"):
        folder.config.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{folder.config}: "):
            stored_config(folder)
