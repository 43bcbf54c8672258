"""A run's folder that changes, fills up or holds other things: rows 34 to 38."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import shutil
import threading

import pytest
import small_runs
from small_runs import (
    OTHER_STRATEGIES,
    assert_equal_states,
    every_strategy,
    records,
    saved_steps,
    small_config,
)
from test_board import read_board

from towers import training
from towers.config import to_json
from towers.errors import CheckpointError, ConfigError, RunFolderError
from towers.evaluation import evaluate
from towers.parallel.trainer import Trainer
from towers.run import board, checkpoints, files, metrics, run
from towers.run.folder import RunFolder, config_to_continue
from towers.run.reports import Reports
from towers.training import train


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_runs.use(monkeypatch)
    monkeypatch.setattr(run, "RETRY_SECS", 0.0)


@pytest.fixture
def half_way(tmp_path):
    return small_runs.half_way(tmp_path / "run")


# Row 34: config.json is missing, or not what the checkpoint says.


@pytest.mark.parametrize("content", [None, "{", "[" * 100_000, "of another run"])
@pytest.mark.row(34)
def test_row_34_the_checkpoint_decides_what_run_it_is(half_way, content):
    path, other = half_way / "config.json", small_config(learning_rate=0.5, seed=77)
    path.unlink()
    if content == "of another run":
        path.write_text(json.dumps(dataclasses.asdict(other)))
    elif content:
        path.write_text(content)
    message = "learning_rate was 0.1 and is 0.5, |seed was 0 and is 77"
    with pytest.raises(ConfigError, match=message):
        train(half_way, other)
    assert saved_steps(half_way) == [5]
    state = train(half_way, small_config()).state
    assert_equal_states(state, small_runs.uninterrupted(small_config()).state)


@pytest.mark.row(34)
def test_row_34_an_evaluation_takes_the_network_and_the_data_of_the_checkpoint(
    half_way,
):
    expected = evaluate(half_way)
    config = json.loads((half_way / "config.json").read_text())
    (half_way / "config.json").write_text(
        json.dumps(config | {"augment": "tutorial", "ema_decay": 0.0, "tta": "mirror"})
    )
    result = evaluate(half_way)
    assert result["test_correct"] == expected["test_correct"]
    assert "test_accuracy_tta" in result  # which changes no mathematics
    (half_way / "config.json").unlink()
    assert evaluate(half_way) == expected


@pytest.mark.row(34)
def test_row_34_a_command_without_a_recipe_stands_on_the_config_of_the_checkpoint(
    half_way, tmp_path
):
    config = small_config(max_steps=5)
    assert config_to_continue(half_way) == config
    changed = dataclasses.replace(config, learning_rate=0.5, log_every_steps=7)
    (half_way / "config.json").write_text(to_json(changed))
    assert config_to_continue(half_way) == dataclasses.replace(
        config, log_every_steps=7
    )
    (half_way / "config.json").unlink()
    assert config_to_continue(half_way) == config
    assert config_to_continue(tmp_path / "nothing") is None
    shutil.rmtree(half_way / "checkpoints")
    assert config_to_continue(half_way) is None
    (half_way / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: not a config.json"):
        config_to_continue(half_way)
    assert config_to_continue(half_way, overwrite=True) is None


# Row 35: no room for what only reports.


@contextlib.contextmanager
def full_disk(owner, name, fails=lambda *args: True):
    """The function raises the error of a full disk."""
    original = getattr(owner, name)

    def full(*args, **kwargs):
        if fails(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, full)
        yield


@every_strategy
@pytest.mark.row(35)
def test_row_35_without_room_for_reports_the_training_goes_on(
    tmp_path, capsys, strategy
):
    config = small_config(
        log_every_steps=1, eval_every_epochs=1.0, summary_every_steps=3, **strategy
    )
    expected = small_runs.uninterrupted(config)
    capsys.readouterr()
    with (
        full_disk(files, "write_text"),
        full_disk(board.Board, "_open"),
        full_disk(metrics.MetricsFile, "_write"),
    ):
        result = train(tmp_path, dataclasses.replace(config, max_steps=5))
    out = capsys.readouterr().out
    for name in ("metrics.jsonl", "TensorBoard", "config.json"):
        lines = [line for line in out.splitlines() if f"warning: {name} cannot" in line]
        assert len(lines) == 1 and "bytes are free" in lines[0]
    assert re.search(r"(\d+) report\(s\) in TensorBoard were not written: \1 lost", out)
    kept = "5 report(s) in metrics.jsonl were not written; 5 of them are kept in the"
    assert kept in out and f"{kept} last checkpoint\n" in out
    assert not (tmp_path / "metrics.jsonl").exists()

    result = train(tmp_path, config)
    assert_equal_states(result.state, expected.state)
    assert records(tmp_path) == expected.records


@pytest.mark.row(35)
def test_row_35_metrics_are_kept_back_whole_until_there_is_room(tmp_path, monkeypatch):
    """A write that stops in the middle of a line leaves nothing of it."""
    room = 100

    def pwrite(descriptor, content, place):
        if place >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor, content[: room - place], place)

    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    path = tmp_path / "metrics.jsonl"
    file = metrics.MetricsFile(path, 0)
    file.flush()
    failed = []
    for step in range(1, 31):
        if step == 20:
            room = 10_000
        try:
            file.append({"step": step, "loss": 1.5})
            file.flush()
        except OSError:
            failed.append(step)
        assert not metrics.read_metrics(path)[1]  # the file is never damaged
    assert failed[-1] == 19 and len(failed) > 10
    assert [r["step"] for r in metrics.read_metrics(path)[0]] == list(range(1, 31))


def fill(disk):
    (disk / "fill").write_bytes(bytes(shutil.disk_usage(disk).free))


@pytest.mark.row(35)
def test_row_35_events_lost_on_a_full_disk_are_noticed_and_spoil_no_others(small_disk):
    """TensorFlow's writer tells nobody; here a real disk is full."""
    events = board.Board(small_disk, "train")
    events.scalars(1, {"loss": 0.5})
    fill(small_disk)
    num_failed = 0
    for step in range(2, 202):
        try:
            events.scalars(step, {"loss": 0.5, "accuracy": 0.25})
        except OSError as error:
            assert error.errno == errno.ENOSPC
            num_failed += 1
    assert num_failed > 100
    (small_disk / "fill").unlink()
    events.scalars(300, {"loss": 0.125})
    # Of files of the same second the order is not that of their events.
    curves = sorted(read_board(small_disk, "train")["loss"])
    assert curves[0] == (1, 0.5) and curves[-1] == (300, 0.125)
    assert len(curves) == 202 - num_failed
    assert len(list((small_disk / "train").iterdir())) < 5


@pytest.mark.row(35)
def test_row_35_a_training_on_a_disk_that_fills_up_and_empties_again(
    small_disk, capsys
):
    """The disk is full from step 4 to step 7."""
    config = small_config(log_every_steps=1, summary_every_steps=1)
    expected = small_runs.uninterrupted(config)
    calls = []

    def after_call():
        calls.append(None)
        if len(calls) == 4:
            fill(small_disk)
        if len(calls) == 7:
            (small_disk / "fill").unlink()

    result = train(small_disk / "run", config, after_call=after_call)
    assert_equal_states(result.state, expected.state)
    assert records(small_disk / "run") == expected.records
    assert "TensorBoard can be written again" in capsys.readouterr().out


@pytest.mark.row(4)
def test_row_4_a_checkpoint_is_tried_once_more(tmp_path, capsys):
    config, failures = small_config(max_steps=4), [1]
    with full_disk(os, "rename", lambda *args: failures and failures.pop()):
        train(tmp_path / "once", config)
    assert saved_steps(tmp_path / "once") == [4]
    assert "Trying once more" in capsys.readouterr().out
    failures = [1, 1]
    with full_disk(os, "rename", lambda *args: failures and failures.pop()):
        with pytest.raises(CheckpointError, match="bytes, .* are free"):
            train(tmp_path / "twice", config)


@pytest.mark.row(35)
def test_row_35_metrics_that_cannot_be_flushed_to_the_disk_are_in_the_checkpoint(
    tmp_path, monkeypatch, capsys
):
    def fails(descriptor):
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith("/metrics.jsonl")

    config = small_config(log_every_steps=1, checkpoint_every_steps=3, max_steps=6)
    with full_disk(os, "fsync", fails):
        train(tmp_path, config)
    kept = small_runs.saved(tmp_path).trainer_state["unwritten"]
    assert [record["step"] for record in kept] == [1, 2, 3, 4, 5, 6]
    out = capsys.readouterr().out
    assert "6 report(s) in metrics.jsonl were not written; 6 of them are kept" in out


@pytest.mark.row(35)
def test_row_35_failed_attempts_are_no_reports_and_what_is_lost_is_told(tmp_path):
    lines, folder = [], RunFolder(tmp_path)
    with full_disk(files, "write_text"), Reports(folder, "train", lines.append) as x:
        x.open_metrics(0, [])
        for step in (1, 2, 3):
            x.record({"step": step})
            x.sync()
        x.kept_steps = {1, 2}
    first, last = lines
    assert "cannot be written" in first and "again" not in first
    assert last.endswith(
        "3 report(s) in metrics.jsonl were not written; 2 of them are kept in the last "
        "checkpoint: 1 lost"
    )


@pytest.mark.row(35)
def test_row_35_a_log_that_cannot_be_read_at_the_end_costs_the_history(tmp_path):
    lines, record = [], {"step": 1, "loss": 0.5}
    with Reports(RunFolder(tmp_path), "train", lines.append) as reports:
        reports.open_metrics(0, [])
        reports.record(record)
        assert reports.records() == [record]
        with full_disk(os, "pread"):
            assert reports.records() == []
    [line] = lines
    assert line == "warning: metrics.jsonl cannot be read: No space left on device"


@pytest.mark.row(35)
def test_row_35_an_error_when_the_log_is_closed_ends_no_run(tmp_path):
    """As a network file system reports a full disk."""
    with contextlib.ExitStack() as stack:
        with Reports(RunFolder(tmp_path), "train", pytest.fail) as reports:
            reports.open_metrics(0, [])
            reports.record({"step": 1})
            open_file = reports.metrics._descriptor
            stack.callback(os.close, open_file)
            stack.enter_context(full_disk(os, "close", lambda x: x == open_file))
    assert records(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("name", ["result.json", "tensorboard"])
@pytest.mark.row(35)
def test_row_35_an_evaluation_that_cannot_be_written_is_told(half_way, capsys, name):
    expected = evaluate(half_way)
    (half_way / "result.json").unlink()
    capsys.readouterr()
    broken = (files, "write_text") if name == "result.json" else (board.Board, "_open")
    with full_disk(*broken):
        assert evaluate(half_way) == expected
    out = capsys.readouterr().out
    assert "accuracy" in out and "cannot be written: No space left on device" in out
    assert "1 report(s) in " in out and "were not written: 1 lost" in out


# Row 36: the folder is removed, moved or replaced.


def move(folder):
    folder.rename(folder.with_name("moved"))


def remove(folder):
    """At once: a log that is removed in a folder which is still there is made anew."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


def replace(folder):
    """As `rm -r` and another run there would."""
    other = small_runs.half_way(folder.with_name("other"))
    (other / ".lock").write_text("{}")
    newest = other / "checkpoints" / "step-00000005"
    shutil.copytree(newest, newest.with_name("step-00000001"))
    remove(folder)
    other.rename(folder)


def files_in(folder):
    """Path -> content. TensorFlow makes missing folders, which may stay empty."""
    snapshot = small_runs.snapshot(folder)
    return {path: content for path, content in snapshot.items() if content is not None}


@pytest.mark.parametrize("change", [remove, move, replace])
@pytest.mark.parametrize("when", ["between steps", "in a save"])
@pytest.mark.row(36)
def test_row_36_a_folder_that_is_gone_ends_the_run_saved_beside_it(
    tmp_path, change, when
):
    assert_saved_beside(tmp_path, change, when)


@pytest.mark.parametrize("strategy", OTHER_STRATEGIES)
@pytest.mark.row(36)
def test_row_36_a_folder_that_is_gone_under_every_strategy(tmp_path, strategy):
    assert_saved_beside(tmp_path, move, "between steps", **strategy)


def assert_saved_beside(tmp_path, change, when, **strategy):
    config = small_config(log_every_steps=1, **strategy)
    workdir = tmp_path / "run"
    expected, calls, before = small_runs.uninterrupted(config), [], {}

    def change_once():
        calls.append(None)
        if len(calls) == 4:
            change(workdir)
            before.update(files_in(workdir))

    with pytest.MonkeyPatch.context() as patch:
        after_call = change_once
        if when == "in a save":
            config = dataclasses.replace(config, checkpoint_every_steps=1)
            small_runs.halt_at(patch, "saving", change_once)
            after_call = lambda: None  # noqa: E731
        message = "run is no longer the folder .* is saved in .*run-aside-1: continue"
        with pytest.raises(RunFolderError, match=message) as caught:
            train(workdir, config, after_call=after_call)
    assert caught.value.exit_code == 4
    assert files_in(workdir) == before, "the other folder was touched"

    aside = tmp_path / "run-aside-1"
    (step,) = saved_steps(aside)
    assert f"step {step} is saved in" in str(caught.value)
    state = train(aside, dataclasses.replace(config, checkpoint_every_steps=0)).state
    assert_equal_states(state, expected.state)
    assert records(aside) == expected.records


@pytest.mark.parametrize("is_link", [True, False])
@pytest.mark.row(36)
def test_row_36_another_folder_of_checkpoints_ends_the_run_saved_beside_it(
    tmp_path, is_link
):
    workdir, other, calls, before = tmp_path / "run", tmp_path / "other", [], {}
    small_runs.half_way(other)

    def exchange_before_the_first_save():
        calls.append(None)
        if len(calls) == 4:
            if is_link:
                (workdir / "checkpoints").symlink_to(other / "checkpoints")
            else:
                (workdir / "checkpoints").write_text("")
            before.update(files_in(other))

    config = small_config(
        checkpoint_every_steps=5, log_every_steps=1, keep_checkpoints=1
    )
    message = (
        "checkpoints is a .*, where a run has a folder.* is saved in .*run-aside-1"
    )
    with pytest.raises(RunFolderError, match=message):
        train(workdir, config, after_call=exchange_before_the_first_save)
    assert files_in(other) == before, "the other run was touched"
    assert saved_steps(tmp_path / "run-aside-1") == [5]


@pytest.mark.parametrize("name", ["tensorboard", "tensorboard/train"])
@pytest.mark.row(36)
def test_row_36_another_folder_of_curves_gets_none(tmp_path, capsys, name):
    workdir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (elsewhere / "train").mkdir(parents=True)

    def exchange_once():
        if not (workdir / name).is_symlink():
            (workdir / name).rename(tmp_path / "moved")
            (workdir / name).symlink_to(elsewhere)

    train(workdir, small_config(log_every_steps=1), after_call=exchange_once)
    assert "warning: TensorBoard cannot be written" in capsys.readouterr().out
    assert not files_in(elsewhere)


@pytest.mark.row(36)
def test_row_36_a_folder_that_is_gone_after_the_last_save_is_noticed(
    tmp_path, monkeypatch
):
    workdir, keep, is_moved = tmp_path / "run", checkpoints.keep, threading.Event()

    def keep_and_move(*args):
        keep(*args)
        move(workdir)
        is_moved.set()

    def wait():
        assert is_moved.wait(30)

    monkeypatch.setattr(checkpoints, "keep", keep_and_move)
    config = small_config(checkpoint_every_steps=1, max_steps=1)
    with pytest.raises(RunFolderError, match="step 1 is saved in .*run-aside-1"):
        train(workdir, config, after_call=wait)
    assert saved_steps(tmp_path / "run-aside-1") == [1]


@pytest.mark.row(36)
def test_row_36_reports_are_not_written_to_another_run(tmp_path):
    """It comes while a step is computed, before its log line and an evaluation."""
    workdir, calls, before = tmp_path / "run", [], {}
    small_runs.half_way(tmp_path / "made outside of the step")

    def replace_once():
        calls.append(None)
        if len(calls) == 5:
            replace(workdir)
            before.update(files_in(workdir))

    config = small_config(log_every_steps=1, eval_every_epochs=1.0)
    expected = small_runs.uninterrupted(config)
    with pytest.MonkeyPatch.context() as patch:
        small_runs.halt_at(patch, "computing", replace_once)
        with pytest.raises(RunFolderError, match="step 5 is saved in"):
            train(workdir, config)
    assert files_in(workdir) == before
    train(tmp_path / "run-aside-1", config)
    assert records(tmp_path / "run-aside-1") == expected.records


@pytest.mark.parametrize("when", ["overwrite", "keep"])
@pytest.mark.row(36)
def test_row_36_nothing_of_another_run_is_removed(tmp_path, monkeypatch, when):
    workdir, before, calls = tmp_path / "run", {}, []
    owner, name = {
        "overwrite": (training, "start_banner"),
        "keep": (checkpoints, "keep"),
    }[when]
    original = getattr(owner, name)

    def replace_first(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2 - (when == "overwrite"):
            replace(workdir)
            before.update(files_in(workdir))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, replace_first)
    config = small_config(checkpoint_every_steps=1, keep_checkpoints=1)
    with pytest.raises(RunFolderError, match="is no longer the folder"):
        train(workdir, config, overwrite=when == "overwrite")
    assert before and files_in(workdir) == before


@pytest.mark.row(36)
def test_row_36_a_damaged_log_does_not_prevent_saving_aside(tmp_path):
    workdir, calls = tmp_path / "run", []

    def damage_and_move():
        calls.append(None)
        if len(calls) == 4:
            with open(workdir / "metrics.jsonl", "r+b") as log:
                log.write(b"\xff")
            move(workdir)

    config = small_config(log_every_steps=1)
    with pytest.raises(RunFolderError, match="step 4 is saved in"):
        train(workdir, config, after_call=damage_and_move)
    aside = tmp_path / "run-aside-1"
    assert [record["step"] for record in records(aside)] == [1, 2, 3, 4]
    state = train(aside, config).state
    assert_equal_states(state, small_runs.uninterrupted(config).state)


@pytest.mark.parametrize("fails", ["checkpoint", "log"])
@pytest.mark.row(36)
def test_row_36_what_is_saved_aside_is_whole_or_not_there(tmp_path, fails):
    """Without its log and config.json it continues as well."""
    workdir, calls, config = tmp_path / "run", [], small_config(log_every_steps=1)

    def move_once():
        calls.append(None)
        if len(calls) == 4:
            move(workdir)

    def is_aside(path, *_):
        return "run-aside" in str(path)

    broken = {"checkpoint": (os, "rename"), "log": (files, "write_text")}[fails]
    with full_disk(*broken, is_aside):
        with pytest.raises(RunFolderError) as caught:
            train(workdir, config, after_call=move_once)
    is_saved = fails == "log"
    assert ("cannot be saved beside it" in str(caught.value)) != is_saved
    assert (tmp_path / "run-aside-1").exists() == is_saved
    if is_saved:
        state = train(tmp_path / "run-aside-1", config).state
        assert_equal_states(state, small_runs.uninterrupted(config).state)


# Row 37: metrics.jsonl is a log.


@pytest.mark.parametrize(
    "line",
    [b"\xff\n", b"[]\n", b"{}\n", b'{"step": "1"}\n', b"[" * 5000 + b"\n", b"\0\n"],
)
@pytest.mark.row(37)
def test_row_37_a_damaged_log_is_moved_aside_and_refuses_no_run(half_way, capsys, line):
    path = half_way / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    damaged = first + line + b"".join(others)
    path.write_bytes(damaged)
    train(half_way, small_config())
    assert (half_way / "metrics.jsonl.damaged").read_bytes() == damaged
    assert records(half_way) == small_runs.uninterrupted(small_config()).records
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl has lines that are no records") == 1


def test_leftovers_of_killed_processes_are_removed(half_way):
    names = [".config.json.17", ".metrics.jsonl.17", ".writable-17"]
    for name in names:
        (half_way / name).write_text("")
    train(half_way, small_config())
    assert not [name for name in names if (half_way / name).exists()]


# Row 38: links, FIFOs, devices and folders in the place of files.


def link(path, victim):
    path.symlink_to(victim)


def fifo(path, victim):
    os.mkfifo(path)


def folder(path, victim):
    path.mkdir()


def hard_link(path, victim):
    path.hardlink_to(victim)


@pytest.mark.parametrize(
    "name", [".lock", "config.json", "dataset_info.json", "metrics.jsonl"]
)
@pytest.mark.parametrize("plant", [link, fifo, folder, hard_link])
@pytest.mark.row(38)
def test_row_38_nothing_planted_is_followed_written_or_waited_for(
    half_way, tmp_path, name, plant
):
    victim = tmp_path / "victim"
    victim.write_text('{"precious": 1}\n')
    (half_way / name).unlink(missing_ok=True)
    plant(half_way / name, victim)
    if plant is hard_link and name != ".lock":
        train(half_way, small_config())  # it is replaced
        assert os.stat(half_way / name).st_nlink == 1
    else:
        with pytest.raises((ConfigError, RunFolderError), match=f"{name} .*is .*"):
            train(half_way, small_config())
        assert saved_steps(half_way) == [5]
    assert victim.read_text() == '{"precious": 1}\n'


@pytest.mark.parametrize("way", ["a long name", "a loop of links"])
@pytest.mark.row(38)
def test_row_38_an_evaluation_of_a_folder_that_cannot_be_looked_into_is_refused(
    tmp_path, way
):
    path = tmp_path / ("x" * 300)
    if way == "a loop of links":
        path = tmp_path / "loop"
        path.symlink_to(path)
    with pytest.raises(RunFolderError, match="choose another --workdir"):
        evaluate(path)


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "tensorboard/train"])
@pytest.mark.row(38)
def test_row_38_a_link_or_a_file_in_the_place_of_a_folder_is_refused(
    half_way, tmp_path, name
):
    shutil.move(half_way / name, tmp_path / "elsewhere")
    (half_way / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=f"{name} is a symbolic link"):
        train(half_way, small_config())
    with pytest.raises(RunFolderError, match=f"{name} is a symbolic link"):
        evaluate(half_way)
    (half_way / name).unlink()
    (half_way / name).write_text("")
    with pytest.raises(RunFolderError, match=f"{name} is a file"):
        train(half_way, small_config())


@pytest.mark.row(38)
def test_row_38_a_linked_leftover_is_neither_walked_nor_emptied(half_way, tmp_path):
    large = tmp_path / "large"
    large.mkdir()
    (large / "file").write_bytes(bytes(10_000))
    (half_way / "checkpoints" / ".tmp-x").symlink_to(large)
    lines = []
    checkpoints.remove_leftovers(half_way / "checkpoints", lines.append)
    (line,) = lines
    assert int(line.split()[-2]) == len(str(large))  # the link's own bytes
    assert (large / "file").stat().st_size == 10_000


@pytest.mark.parametrize("name", ["MANIFEST.json", "trainer_state.json"])
@pytest.mark.parametrize("plant", [link, fifo, folder])
@pytest.mark.row(38)
def test_row_38_in_a_checkpoint_they_make_it_invalid(half_way, tmp_path, name, plant):
    checkpoint = half_way / "checkpoints" / "step-00000005"
    shutil.move(checkpoint / name, tmp_path / name)
    plant(checkpoint / name, tmp_path / name)
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        train(half_way, small_config())


def test_a_workdir_that_is_no_text_is_refused(tmp_path):
    name = os.fsdecode(b"run-\xff")
    with pytest.raises(ConfigError, match="name is not UTF-8"):
        train(pathlib.Path(tmp_path, name), small_config())


@every_strategy
@pytest.mark.row(41)
def test_row_41_a_whole_step_is_saved_before_an_unforeseen_error(tmp_path, strategy):
    config = small_config(**strategy)

    def fail():
        if len(saved_steps(tmp_path)) == 0:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, config, after_call=fail)
    assert saved_steps(tmp_path)
    state = training.train(tmp_path, config).state
    assert_equal_states(state, small_runs.uninterrupted(config).state)


def test_a_damaged_checkpoint_is_told_once_in_a_run(tmp_path, capsys):
    def damage():
        if 2 in saved_steps(tmp_path):
            path = tmp_path / "checkpoints" / "step-00000002" / "MANIFEST.json"
            path.unlink(missing_ok=True)

    config = small_config(checkpoint_every_steps=2, keep_checkpoints=5)
    train(tmp_path, config, after_call=damage)
    assert saved_steps(tmp_path) == [2, 4, 6, 8, 10]
    assert capsys.readouterr().out.count("step-00000002") == 1


def test_what_is_saved_already_is_not_read_again(tmp_path, monkeypatch):
    calls, state = [], Trainer.state
    monkeypatch.setattr(Trainer, "state", lambda self: calls.append(1) or state(self))
    train(tmp_path, small_config(checkpoint_every_steps=10))
    assert len(calls) == 2  # for the checkpoint, and the result
