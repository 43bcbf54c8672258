"""What a training shows while it runs."""

import io
import itertools
import os
import pty
import re
import sys
import time

import pytest

from towers import console
from towers.training.display import LiveDisplay, PlainDisplay, Status, create_display

STATUS = Status(
    last_step=39100,
    num_epochs=100.0,
    step=12000,
    epoch=30.7,
    epochs_per_step=1 / 391,
    loss=0.51234,
    accuracy=0.82345,
    learning_rate=0.05,
    images_per_sec=12345.6,
    input_wait_percent=3.1,
    secs_left=4800.0,
)


def test_lines_come_by_the_clock_at_growing_intervals(capsys):
    now = [0.0]
    display = PlainDisplay(Status(10**9, 1.0), lambda: now[0])
    printed = []
    for now[0] in range(24 * 3600):
        display.tick(int(now[0]), "computing")
        if lines := capsys.readouterr().out.splitlines():
            assert lines == [f"step {now[0]}/1000000000"]
            printed.append(now[0])
    assert printed[:3] == [5, 10, 15] and 20 < len(printed) < 60
    pauses = [b - a for a, b in itertools.pairwise(printed)]
    assert pauses == sorted(pauses)
    with display:
        pass
    now[0] *= 9
    display.tick(9, "writing")
    assert capsys.readouterr().out == ""


def test_a_mode_chooses_and_without_a_terminal_there_are_lines(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(create_display("auto", STATUS)) is PlainDisplay
    create_display("off", STATUS).tick(1, "computing")
    assert sys.stdout.getvalue() == ""


def test_a_notebook_moves_no_cursor_and_shows_remarks_as_no_errors(monkeypatch):
    """The kernel's stream, as the packages of notebooks are not here."""
    kernels = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr(sys, "stdout", kernels())
    for mode in ("auto", "live"):
        assert type(create_display(mode, STATUS)) is PlainDisplay
    console.remark("a remark")
    assert sys.stdout.getvalue() == "a remark\n"


class Screen:
    """The lines of a terminal that gets text with a few control sequences."""

    def __init__(self):
        self.lines, self.row, self.hidden = [""], 0, False

    def feed(self, text):
        self.hidden = text.rfind("\x1b[?25l") > text.rfind("\x1b[?25h")
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row == len(self.lines))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif re.fullmatch(r"\x1b\[1?A", part):
                self.row -= 1
            elif part[0] not in "\x1b\r":
                self.lines[self.row] += part


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns: a function that reads it, and the file to write to."""
    reader, writer = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    os.set_blocking(reader, False)
    with open(reader, "rb"), open(writer, "w") as output:

        def read():
            output.flush()
            time.sleep(0.01)
            return os.read(reader, 100_000).decode()

        yield read, output


def test_a_terminal_shows_bars_below_the_lines_and_is_as_it_was_at_the_end(
    terminal, monkeypatch
):
    screen, (read, output) = Screen(), terminal
    monkeypatch.setattr(sys, "stdout", output)
    with create_display("auto", STATUS) as display:
        assert isinstance(display, LiveDisplay)
        display.tick(20000, "computing")
        screen.feed(read())
        figures, run, epoch = screen.lines
        assert figures.startswith("loss 0.512  accuracy 0.823  12,346 images/s")
        assert "51%  step 20000/39100" in run and "52 of 100" in epoch
        assert max(map(len, screen.lines)) <= 77 and screen.hidden
        display.tick(20000, "computing gradients for the summary")
        console.line("epoch 30: test accuracy 0.8")
        screen.feed(read())
        assert screen.lines[2].count("━") == run.count("━") > 20
        assert screen.lines[0] == "epoch 30: test accuracy 0.8"
        assert len(screen.lines) == 4
    screen.feed(read())
    assert [x for x in screen.lines if x] == ["epoch 30: test accuracy 0.8"]
    assert not screen.hidden
