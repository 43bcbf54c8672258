"""The lines that a run prints."""

import errno
import io
import os
import sys
import threading

import pytest
from full_pipes import fill

import towers.output
from towers.output import say
from towers.run.log import duration, log_line


@pytest.mark.parametrize(
    "secs,words",
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (41.6, "42 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_durations_are_words(secs, words):
    assert duration(secs) == words


def test_the_log_line_says_where_the_run_stands():
    record = {"step": 400, "epoch": 1.024, "loss": 1.23456, "learning_rate": 0.05}
    timed = {"images_per_sec": 12345.6, "input_wait_percent": 3.14159}
    assert log_line(record | timed, 1600, 100.0, 2.5) == (
        "step 400/1600 (25.0%)  epoch 1.02  loss 1.2346  learning rate 0.05  "
        "12,346 images/s  input wait 3.1%  12 s left"
    )


def test_the_log_line_counts_the_skipped_steps_where_there_may_be_some():
    record = {"step": 1, "epoch": 0.01, "loss": float("nan"), "learning_rate": 0.5}
    line = log_line(record | {"skipped_steps": 3}, 1000, None, 12.34)
    assert "loss nan  learning rate 0.5  skipped steps 3  first step" in line
    assert "skipped" not in log_line(record, 1000, None, 12.34)


def test_the_log_line_names_no_speed_before_one_is_known():
    record = {"step": 1, "epoch": 0.01, "loss": 2.3, "learning_rate": 1e-5}
    line = log_line(record, 1000, None, 12.34)
    assert line.startswith("step 1/1000 (0.1%)") and "1e-05" in line
    assert line.endswith("  first step, with tracing and compiling: 12.3 s")
    assert "images/s" not in line and "left" not in line


@pytest.mark.parametrize(
    "line,expected",
    [
        ("saved in ré", rb"saved in r\xe9"),
        ("saved in a\nb\x1b[31m", rb"saved in a\nb\x1b[31m"),
        ("saved in \udcff", rb"saved in \udcff"),
    ],
)
def test_a_line_can_be_printed_whatever_a_path_holds(monkeypatch, line, expected):
    """Standard output may be ASCII alone."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    say(line)
    assert written.getvalue() == expected + b"\n"


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_training_goes_on_where_its_lines_cannot_be_printed(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for output in (Full(), closed):
        monkeypatch.setattr(sys, "stdout", output)
        say("step 1")


@pytest.mark.row(12)
def test_row_12_a_training_does_not_wait_for_those_who_read_its_lines(monkeypatch):
    """As with `| less`: they get the lines when they read on."""
    monkeypatch.setattr(towers.output, "_PATIENCE_SECS", 0.1)
    reader, writer = os.pipe()
    with open(reader, "rb") as lines, open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        num_bytes = fill(writer)
        thread = threading.Thread(target=lambda: [say("a"), say("b")], daemon=True)
        thread.start()
        thread.join(30)
        is_waiting = thread.is_alive()
        lines.read(num_bytes)
        assert not is_waiting
        say("c")
        output.close()
        assert lines.read() == b"a\nb\nc\n"
