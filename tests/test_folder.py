"""Rows 5, 13 and 36 of the table of faults: the folder of a run and who holds it."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import towers
from towers.config import Config, parse_json, to_json
from towers.errors import ConfigError, DataError, RunFolderError, WorkerLostError
from towers.export import export
from towers.run import files
from towers.run.folder import RunFolder

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
def other_process(folder):
    """A process that holds the folder."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


# The lock.


@pytest.mark.row(13)
def test_a_second_process_is_refused_with_the_id_of_the_first(folder, other_process):
    with pytest.raises(ConfigError) as caught, folder.lock():
        pass
    message = str(caught.value)
    for word in (str(folder.path), f"process {other_process.pid} on ", "--workdir"):
        assert word in message
    assert os.uname().nodename in message
    # The refused one has not described itself.
    assert folder.holder()["pid"] == other_process.pid


@pytest.mark.row(13)
def test_the_lock_of_a_killed_process_is_taken_over(folder, other_process):
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    assert folder.holder() is None
    with folder.lock():
        assert folder.holder()["pid"] == os.getpid()
    # It has left no trace of a holder that would stop the next one.
    with folder.lock():
        pass


@pytest.mark.row(13)
def test_row_13_the_chief_waits_for_the_lock_of_a_process_that_ends(
    folder, other_process, capsys
):
    killing = threading.Timer(0.3, other_process.kill)
    killing.start()
    with folder.lock(wait_secs=60.0):
        assert folder.holder()["pid"] == os.getpid()
    killing.join()
    [line] = capsys.readouterr().out.splitlines()
    assert f"process {other_process.pid} on " in line
    assert line.endswith("; waiting for its lock, up to 60 s")


@pytest.mark.row(13)
def test_row_13_the_chief_does_not_wait_forever_for_a_lock(folder, other_process):
    begun = time.monotonic()
    # The machine may be lost, and its lock end later: a restart may help (exit 75).
    with pytest.raises(WorkerLostError, match=f"process {other_process.pid} on "):
        folder.lock(wait_secs=0.3)
    assert time.monotonic() - begun >= 0.3


def test_other_processes_read_the_description_of_the_holder(folder, other_process):
    assert folder.holder() == {
        "pid": other_process.pid,
        "host": os.uname().nodename,
        "device": "GPU",
    }
    other_process.stdin.close()
    other_process.wait()
    assert folder.holder() is None


def test_a_holder_may_change_its_description(folder):
    with folder.lock() as lock:
        lock.describe(device="a long name that is written over")
        assert folder.holder()["device"] == "a long name that is written over"
        lock.describe(device="CPU", towers=2)
        assert folder.holder()["device"] == "CPU"
        assert folder.holder()["towers"] == 2
        assert folder.holder()["pid"] == os.getpid()
    assert folder.holder() is None


def test_asking_for_the_holder_takes_no_lock(folder):
    assert folder.holder() is None  # there is not even a lock file
    with folder.lock():
        pass
    assert folder.holder() is None
    with folder.lock():
        folder.holder()
        with pytest.raises(ConfigError), RunFolder(folder.path).lock():
            pass


@pytest.mark.row(36)
def test_row_36_a_lock_that_the_file_server_no_longer_knows_is_that_of_another_folder(
    folder, monkeypatch
):
    def stale(descriptor):
        raise OSError(errno.ESTALE, "Stale file handle")

    def failing(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with folder.lock() as lock:
        lock.check()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", stale)
            try:  # `pytest.raises` would call fstat, too
                lock.check()
            except RunFolderError as error:
                caught = error
            patch.setattr(os, "fstat", failing)
            lock.check()  # nobody has taken the folder
        assert "no longer the folder" in str(caught)


def test_an_error_releases_the_lock(folder):
    with pytest.raises(KeyError), folder.lock():
        raise KeyError
    with folder.lock():
        pass


def test_folders_do_not_lock_each_other(folder, other_process, tmp_path):
    another = RunFolder(tmp_path / "runs" / "another")
    another.create()
    with another.lock():
        pass


# Making and clearing.


def test_a_home_is_expanded_and_no_run_lies_in_the_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/run").path == tmp_path / "run"
    for workdir in ("/", "//", "/usr/..", ""):
        with pytest.raises(ConfigError, match="^workdir"):
            RunFolder(workdir)


@pytest.mark.parametrize("place", ["", "cat", "train/dog/run", "runs/photos"])
def test_no_run_lies_among_class_folders(tmp_path, place):
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for data in ("photos", "link"):
        with pytest.raises(ConfigError, match="where folders are classes"):
            folder = RunFolder(tmp_path / "photos" / place)
            folder.validate_outside_of(tmp_path / data)
    RunFolder(tmp_path / "photos2").validate_outside_of(tmp_path / "photos")


def test_create_makes_the_folder_and_leaves_what_is_there(folder):
    folder.metrics.write_text("{}\n")
    folder.create()
    assert sorted(folder.path.iterdir()) == [folder.metrics]


@pytest.mark.parametrize("below", ["", "run"])
def test_a_regular_file_in_the_way_is_refused(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="cannot be written.*--workdir") as caught:
        RunFolder(file / below).create()
    assert str(file / below) in str(caught.value)
    assert file.read_text() == "mine"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_file_system_that_takes_no_files_is_refused():
    with pytest.raises(ConfigError, match="/proc/self/run cannot be written"):
        RunFolder("/proc/self/run").create()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_of_someone_else_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    for path in (tmp_path, tmp_path / "run"):
        with pytest.raises(ConfigError, match="cannot be written"):
            RunFolder(path).create()


@pytest.mark.parametrize("wrong", ["\0", "\ud800"])
@pytest.mark.row(17)
def test_a_text_that_is_no_path_is_refused(tmp_path, wrong):
    """Of every function that takes one."""
    path, image = f"{tmp_path}/a{wrong}b", tmp_path / "image.png"
    image.touch()
    for name, call in [
        ("workdir", lambda: RunFolder(path)),
        ("workdir", lambda: towers.train(path, Config())),
        ("workdir", lambda: towers.evaluate(path)),
        ("workdir", lambda: export(path, "keras")),
        ("output", lambda: towers.predict(tmp_path, image, output=path)),
        ("output", lambda: export(tmp_path, "keras", f"{path}.keras")),
    ]:
        with pytest.raises(ConfigError, match=f"^{name}.*has a character that no path"):
            call()
    with pytest.raises(DataError, match="there is no such file or folder"):
        towers.predict(tmp_path, path)


def test_clear_removes_what_runs_write_and_nothing_else(folder):
    written = [folder.config, folder.dataset_info, folder.metrics, folder.result]
    written += [folder.checkpoints / "step-00000001" / "MANIFEST.json"]
    written += [folder.tensorboard / "train" / "events.out.tfevents.1.host"]
    notes = [folder.path / "notes.txt", folder.path / "figures" / "loss.png"]
    for path in written + notes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    with folder.lock():
        folder.clear()
        with pytest.raises(ConfigError), folder.lock():
            pass  # the lock is in the folder too, and is still held
    assert not any(path.exists() for path in written)
    assert not folder.checkpoints.exists() and not folder.tensorboard.exists()
    assert all(path.read_text() == "{}" for path in notes)
    folder.clear()


@pytest.mark.row(38)
def test_a_link_is_refused_and_never_followed(folder, tmp_path):
    """Row 38."""
    elsewhere = tmp_path / "large_disk"
    elsewhere.mkdir()
    folder.checkpoints.symlink_to(elsewhere)
    (elsewhere / "mine").write_text("")
    with pytest.raises(RunFolderError, match=f"{folder.checkpoints} is a symbolic"):
        folder.create()
    folder.clear()
    assert (elsewhere / "mine").exists() and not folder.checkpoints.exists()


@pytest.mark.parametrize("way", ["a long name", "a loop of links"])
def test_a_folder_that_cannot_be_looked_into_is_refused(tmp_path, way):
    path = tmp_path / ("x" * 300) if way == "a long name" else tmp_path / "loop"
    if way == "a loop of links":
        path.symlink_to(path)
    for call in (RunFolder(path).check, RunFolder(path).stored_config):
        with pytest.raises(RunFolderError, match=f"{path}/.*; choose another"):
            call()


def test_only_what_killed_processes_left_is_removed(folder):
    left = [
        ".config.json.17",
        ".dataset_info.json.2",
        ".metrics.jsonl.1",
        ".writable-123",
    ]
    # Of an editor, of an evaluation under way, of a user.
    others = [".config.json.swp", ".result.json.17", ".writable-x", "config.json.17"]
    for name in left + others:
        (folder.path / name).write_text("")
    (folder.path / ".writable-5").mkdir()
    folder.remove_leftovers()
    assert {p.name for p in folder.path.iterdir()} == {*others, ".writable-5"}


# Small files.


def test_the_stored_config_comes_back(folder):
    config = Config(seed=3, batch_size=7)
    files.write_text(folder.config, to_json(config))
    assert folder.stored_config() == config


def test_a_folder_without_a_run_is_refused(folder, tmp_path):
    for path in (folder.path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=f"{path} holds no run.*--workdir"):
            RunFolder(path).stored_config()


@pytest.mark.parametrize(
    "content", [b"", b'{"seed": 3', b'{"sed": 3}', b"\xff\xfe\x00", b"[]"]
)
def test_a_stored_config_that_is_no_config_is_refused_with_its_path(folder, content):
    folder.config.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        folder.stored_config()
    assert str(folder.config) in str(caught.value)


def test_json_that_is_nested_too_deeply_is_refused():
    assert parse_json("[" * 31 + "1" + "]" * 31)
    with pytest.raises(ValueError, match="nested"):
        parse_json('{"a": [' * 50_000 + "1" + "]}" * 50_000)
