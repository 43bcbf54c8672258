"""`metrics.jsonl` (row 32)."""

import errno
import io
import json
import os
import pathlib
import sys
import threading

import numpy as np
import pytest

from towers.run import metrics
from towers.run.metrics import MetricsFile, last_accuracy, read_metrics


def append(metrics, record):
    metrics.append(record)
    metrics.flush()


def append_all(metrics, steps):
    for step in steps:
        append(metrics, {"step": step, "loss": 1 / step})


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_record_is_a_line_of_plain_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = {
        "step": np.int64(3),
        "loss": np.float32(0.5),
        "tower_losses": np.array([0.25, 0.75], np.float32),
        "test": {"accuracy": np.float64(0.1)},
        "note": "two\nlines",
    }
    append(MetricsFile(path, 0), record)
    assert path.read_text().count("\n") == 1
    assert json.loads(path.read_text()) == {
        "step": 3,
        "loss": 0.5,
        "tower_losses": [0.25, 0.75],
        "test": {"accuracy": 0.1},
        "note": "two\nlines",
    }


def test_a_record_can_be_read_when_flush_returns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in (1, 2, 3):
        append(metrics, {"step": step})
        assert steps_in(path) == list(range(1, step + 1))


def test_a_resumed_run_drops_the_steps_it_takes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10, 20, 30])
    before = path.read_text().splitlines()
    resumed = MetricsFile(path, resume_step=20)
    resumed.flush()
    assert path.read_text().splitlines() == before[:3]
    append_all(resumed, [30, 40])
    assert steps_in(path) == [1, 10, 20, 30, 40]


def test_a_run_from_the_start_drops_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10])
    append_all(MetricsFile(path, resume_step=0), [1])
    assert steps_in(path) == [1]


@pytest.mark.row(32)
def test_a_line_torn_anywhere_is_dropped_and_the_steps_strictly_increase(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10, 20])
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for length in range(last, len(whole) + 1):
        path.write_bytes(whole[:length])
        # Without its line break the last record is whole, though its line is not.
        survives = length >= len(whole) - 1
        append_all(MetricsFile(path, resume_step=20), [30])
        assert steps_in(path) == ([1, 10, 20, 30] if survives else [1, 10, 30])


@pytest.mark.row(37)
def test_row_37_a_file_without_an_end_is_not_read_to_it(tmp_path, monkeypatch):
    """A terabyte that was never written takes no room, and an hour to be read."""
    monkeypatch.setattr(metrics, "_MOST_OTHERS", 20)
    path, lines = tmp_path / "metrics.jsonl", []
    append_all(MetricsFile(path, 0), [1, 10])
    with open(path, "r+b") as file:
        file.truncate(2**40)
    resumed = MetricsFile(path, 10, say=lines.append)
    append_all(resumed, [20])
    assert steps_in(path) == [1, 10, 20]
    assert os.stat(f"{path}.damaged").st_size == 2**40
    assert len(lines) == 1 and "up to 20 such, are taken over" in lines[0]


def test_zeros_that_a_power_cut_left_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10])
    with open(path, "ab") as file:
        file.write(bytes(100))
    assert [record["step"] for record in read_metrics(path)[0]] == [1, 10]
    append_all(MetricsFile(path, resume_step=10), [20])
    assert steps_in(path) == [1, 10, 20]


def test_numbers_come_back_as_they_were(tmp_path):
    path = tmp_path / "metrics.jsonl"
    loss = 0.1 + 0.2
    append(MetricsFile(path, 0), {"step": 1, "loss": loss})
    MetricsFile(path, resume_step=1).flush()
    assert read_metrics(path)[0] == [{"step": 1, "loss": loss}]


def remove(path):
    path.unlink()


def move(path):
    path.rename(path.with_name("moved"))


def replace(path):
    path.with_name("other").write_text('{"step": 7}\n')
    path.with_name("other").rename(path)


@pytest.mark.parametrize("change", [remove, move, replace])
@pytest.mark.row(35)
def test_row_35_a_file_that_is_removed_or_replaced_is_written_anew(tmp_path, change):
    path, lines = tmp_path / "metrics.jsonl", []
    metrics = MetricsFile(path, 0, say=lines.append)
    append_all(metrics, [1, 10])
    change(path)
    append_all(metrics, [20, 30])
    assert steps_in(path) == [1, 10, 20, 30]
    assert len(lines) == 1 and "was removed, replaced or cut" in lines[0]
    metrics.sync()
    metrics.close()


@pytest.mark.row(35)
def test_row_35_a_file_that_is_cut_short_keeps_what_is_in_memory(tmp_path):
    """As `logrotate` with `copytruncate` does."""
    path, lines = tmp_path / "metrics.jsonl", []
    metrics = MetricsFile(path, 0, say=lines.append)
    append_all(metrics, [1, 10])
    os.truncate(path, len(path.read_bytes()) - 1)
    append_all(metrics, [20])
    assert steps_in(path) == [1, 10, 20] and len(lines) == 1
    metrics.sync()
    append_all(metrics, [30])
    os.truncate(path, 0)
    assert [record["step"] for record in metrics.records()] == [30]
    append_all(metrics, [40])
    assert steps_in(path) == [30, 40]  # the others were only on the disk
    assert len(lines) == 2
    metrics.close()


@pytest.mark.row(35)
def test_row_35_what_could_not_be_flushed_to_the_disk_is_kept_back(
    tmp_path, monkeypatch
):
    """After an error the next fsync says that all is well."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    append_all(metrics, [1, 10])
    metrics.sync()
    append_all(metrics, [20, 30])
    errors = [OSError(errno.EIO, "Input/output error")]
    fsync = os.fsync

    def failing(descriptor):
        append_all(metrics, [40])  # meanwhile, by another thread
        raise errors.pop()

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError):
        metrics.sync()
    monkeypatch.setattr(os, "fsync", fsync)
    assert [record["step"] for record in metrics.unwritten] == [20, 30, 40]
    assert metrics.kept_back(30) == metrics.unwritten[:2]
    # Where the system has dropped them, they are written once more.
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b'{"step": 20')])
    metrics.sync()
    assert metrics.unwritten == [] and path.read_bytes() == content
    metrics.close()


def test_only_some_records_are_in_memory_until_they_are_flushed_to_the_disk(
    tmp_path, monkeypatch
):
    calls = []
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    append(metrics, {"step": 0})
    monkeypatch.setattr(os, "fsync", calls.append)
    append_all(metrics, range(1, 2501))
    assert len(calls) == 2
    metrics.close()


@pytest.mark.row(37)
def test_row_37_a_damaged_file_that_cannot_be_moved_aside_is_not_replaced(
    tmp_path, monkeypatch
):
    path, lines = tmp_path / "metrics.jsonl", []
    append_all(MetricsFile(path, 0), [1, 10])
    damaged = b"\xff\n" + path.read_bytes()
    path.write_bytes(damaged)

    def fail(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    metrics = MetricsFile(path, 10, say=lines.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(PermissionError):
            append(metrics, {"step": 20})
    assert path.read_bytes() == damaged and lines == []
    metrics.flush()
    assert steps_in(path) == [1, 10, 20]
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == damaged
    assert len(lines) == 1


@pytest.mark.row(37)
def test_row_37_one_wrong_step_costs_no_other_line(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", []
    path.write_text("".join(f'{{"step": {i}}}\n' for i in (10, 920, 30, 40)))
    metrics = MetricsFile(path, 50, [{"step": 50}], lines.append)
    append(metrics, {"step": 60})
    assert steps_in(path) == [10, 30, 40, 50, 60]
    path.write_text('{"step": 920, "test_accuracy": 0.5}\n')
    assert last_accuracy(path, 40) is None


def test_one_thread_appends_while_another_one_flushes(tmp_path):
    """As a checkpoint does, which is written in the background."""
    path, is_done = tmp_path / "metrics.jsonl", threading.Event()
    metrics = MetricsFile(path, 0)
    metrics.flush()

    def flush():
        while not is_done.is_set():
            metrics.flush()

    thread = threading.Thread(target=flush)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        append_all(metrics, range(1, 2001))
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert steps_in(path) == list(range(1, 2001))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.row(37)
def test_row_37_a_file_that_cannot_be_read_is_damaged():
    memory = pathlib.Path("/proc/self/mem")  # a file whose first byte gives EIO
    with open(memory, "rb") as file, pytest.raises(OSError, match="Input/output"):
        file.readline()
    assert read_metrics(memory) == ([], True)


@pytest.mark.row(37)
def test_row_37_what_was_read_before_an_error_of_the_disk_is_taken_over(
    tmp_path, monkeypatch
):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10])

    class Failing(io.FileIO):
        def readline(self, size):
            if self.tell() > 0:
                raise OSError(errno.EIO, "Input/output error")
            return super().readline(size)

    monkeypatch.setattr(metrics, "open", Failing, raising=False)
    assert read_metrics(path) == ([{"step": 1, "loss": 1.0}], True)


@pytest.mark.parametrize("step", [-(10**20), -1, 2**63, 1.0, True])
@pytest.mark.row(37)
def test_row_37_a_step_that_is_no_int64_is_none(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": step, "loss": 1}) + '\n{"step": 3}\n')
    assert read_metrics(path) == ([{"step": 3}], True)
