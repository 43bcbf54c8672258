"""`metrics.jsonl`."""

import errno
import json
import os

import numpy as np
import pytest

from towers import store
from towers.run.records import MetricsFile


def append_all(metrics, steps):
    for step in steps:
        metrics.append({"step": step, "loss": 1 / step})
        metrics.flush()


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_record_is_a_line_of_plain_json(path):
    losses = np.array([0.25, np.nan], np.float32)
    metrics = MetricsFile(path, 0)
    metrics.append({"step": np.int64(3), "tower_losses": losses, "note": "two\nlines"})
    metrics.flush()
    assert path.read_text().count("\n") == 1
    expected = {"step": 3, "tower_losses": [0.25, None], "note": "two\nlines"}
    assert json.loads(path.read_text()) == expected


@pytest.mark.parametrize("resume_step,kept", [(0, 0), (29, 3)])
@pytest.mark.row(32)
def test_row_32_a_resumed_run_drops_the_steps_it_takes_again(path, resume_step, kept):
    append_all(MetricsFile(path, 0), [1, 10, 20, 30])
    before = path.read_text().splitlines()
    resumed = MetricsFile(path, resume_step)
    resumed.flush()
    assert path.read_text().splitlines() == before[:kept]
    append_all(resumed, [31, 40])
    assert steps_in(path) == [*[1, 10, 20, 30][:kept], 31, 40]


@pytest.mark.row(32)
def test_row_32_a_line_torn_anywhere_is_dropped(path):
    append_all(MetricsFile(path, 0), [1, 10, 20])
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for length in range(last, len(whole) + 1):
        path.write_bytes(whole[:length])
        # Without its line break the last record is whole, though its line is not.
        survives = length >= len(whole) - 1
        append_all(MetricsFile(path, resume_step=20), [30])
        assert steps_in(path) == ([1, 10, 20, 30] if survives else [1, 10, 30])
    assert not path.with_name("metrics.jsonl.damaged").exists()


@pytest.mark.row(35)
def test_row_35_records_that_cannot_be_written_wait(path, monkeypatch):
    metrics = MetricsFile(path, 0)
    append_all(metrics, [1])

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "append", full)
        with pytest.raises(OSError, match="No space"):
            append_all(metrics, [10])
    assert steps_in(path) == [1]
    assert [record["step"] for record in metrics.records()] == [1, 10]
    append_all(metrics, [20])
    assert metrics.queue == [] and steps_in(path) == [1, 10, 20]


@pytest.mark.parametrize(
    "line", [b"\xff", b'{"step": 5, "st', b'{"step": true}', b'{"step": 1}']
)
@pytest.mark.row(37)
def test_row_37_a_damaged_file_is_set_aside_and_its_records_are_taken_over(
    path, line, capsys, monkeypatch
):
    append_all(MetricsFile(path, 0), [1, 10])
    first, last = path.read_bytes().splitlines(keepends=True)
    damaged = first + line + b"\n" + last
    path.write_bytes(damaged)

    def fail(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    metrics = MetricsFile(path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(PermissionError):
            append_all(metrics, [20])
    # Where it cannot be set aside it is not replaced.
    assert path.read_bytes() == damaged and not capsys.readouterr().out
    metrics.flush()
    assert steps_in(path) == [1, 10, 20]
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == damaged
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.row(37)
def test_row_37_lines_of_steps_beyond_the_checkpoint_are_ignored(path):
    path.write_text("".join(f'{{"step": {i}}}\n' for i in (10, 920, 30, 40)))
    append_all(MetricsFile(path, 50), [60])
    assert steps_in(path) == [10, 30, 40, 60]
