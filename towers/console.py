"""Lines for the user: what happens on standard output, errors on standard error.

No call raises an error, and none waits for long:

- Where nobody reads for a while, as in `run_train.py | less` or after Ctrl-S, lines are
  kept, and printed before later ones or at the end of the process: it waits for those
  who read, after an error for END_SECS at most.
- On a terminal some lines may be live, see `Live`.
- Where printing fails, because nobody reads any more (`run_train.py | head`) or a log
  file is on a full disk, the program goes on in silence.
"""

import atexit
import collections
import functools
import os
import select
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from towers.messages import printable, version_line

if TYPE_CHECKING:
    from rich.console import RenderableType

# How long the first of the lines that nobody reads waits.
_PATIENCE_SECS = 1.0
_MAX_KEPT = 1000

# How long lines are waited for where a process ends at once.
END_SECS = 2.0

RED, YELLOW = 31, 33

# How progress is shown; auto is live on a terminal, else plain.
MODES = ("auto", "live", "plain", "off")

# Between frames of what is live.
_REFRESH_SECS = 0.25


def line(text: str) -> None:
    """Prints one plain line on standard output, at once."""
    _print(text)


def warn(text: str) -> None:
    """Prints a warning there."""
    _print(f"warning: {text}", YELLOW)


def print_versions(*lines: str) -> None:
    """Print the versions, once in a process, and more lines."""
    _print_once(version_line())
    for text in lines:
        line(text)


_print_once = functools.cache(line)


def _print(text, color=None):
    if live := _live:  # another thread may end it
        live.print(_colored(_folded(printable(text)), color))
    else:
        _out.print(text, color)


def error(text: str) -> None:
    """Print one plain line on standard error."""
    if live := _live:
        live.stop()
    _err.print(text, RED)


def remark(text: str) -> None:
    """Print one plain line on standard error, in a notebook on standard output."""
    (line if is_notebook() else error)(text)


def is_terminal() -> bool:
    """True if standard output is a terminal that can move its cursor."""
    return _out.isatty() and os.environ.get("TERM") != "dumb"


def columns(most: int) -> int:
    """Return the width of a line: a terminal's if that is narrower, else `most`."""
    return min(most, shutil.get_terminal_size().columns) if _out.isatty() else most


def is_notebook() -> bool:
    """Return whether standard output is the output of a notebook's cell."""
    return type(sys.stdout).__module__ == "ipykernel.iostream"


def _folded(text):
    """Return a line for a terminal, which would break it inside words."""
    width = shutil.get_terminal_size().columns
    if len(text) <= width:
        return text
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, max(width, 20), subsequent_indent="  ", **options)


def _colored(text, color):
    if color is None or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{color}m{text}\x1b[0m"


class Live:
    """Lines at the end of a terminal that are renewed; others go above them."""

    def __init__(self, render: Callable[[int], "RenderableType"]):
        global _live
        import rich.console
        import rich.live

        self._console = rich.console.Console(file=_out, force_terminal=True)
        self._render, self._refreshed_at = render, 0.0
        self._live = rich.live.Live(
            get_renderable=self._next,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        _live = self

    def _next(self):
        self._width = self._console.width
        self._shown = self._render(self._width)
        return self._shown

    def refresh(self) -> None:
        """Renews them, at most every _REFRESH_SECS, unless nobody reads."""
        now = time.monotonic()
        if _live is self and now >= self._refreshed_at + _REFRESH_SECS:
            self._refreshed_at = now
            if not _out.is_behind():
                self._remove_folds()
                self._live.refresh()

    def _remove_folds(self):
        """Removes the lines that a terminal adds where it becomes narrow."""
        width = self._console.width
        if width < self._width:
            options = self._console.options.update(width=self._width)
            lines = self._console.render_lines(self._shown, options, pad=False)
            lengths = (sum(s.cell_length for s in line) for line in lines)
            folds = sum(max(0, length - 1) // width for length in lengths)
            _out.write("\r\x1b[2K" + "\x1b[A\x1b[2K" * folds)

    def print(self, text: str) -> None:
        """Prints a line above."""
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def stop(self) -> None:
        """Removes them; the terminal is as it was."""
        global _live
        if _live is self:
            _live = None
            self._live.stop()


_live: Live | None = None


def flush() -> None:
    """End what is live, and print what is kept if that does not wait."""
    if live := _live:
        live.stop()
    _out.print_kept()
    _out.flush()


def lost_output() -> str:
    """Return why standard output did not take a line; empty if it took all."""
    return _out.lost


def finish() -> None:
    """Prints what is kept, before `os._exit`; waits for about END_SECS."""
    end = time.monotonic() + END_SECS
    while any([_out.print_kept(), _err.print_kept()]) and time.monotonic() < end:
        time.sleep(0.02)


class _Stream:
    """A stream of `sys`, also for rich, and the newest lines that it has not taken."""

    def __init__(self, name):
        self._name, self._kept = name, collections.deque(maxlen=_MAX_KEPT)
        self.lost = ""  # why a line could not be printed
        self._lock = threading.Lock()

    def print(self, text, color=None):
        text = printable(text)
        if self.isatty():
            text = _colored(_folded(text), color)
        self.write(f"{text}\n")

    def write(self, text):
        encoding = self.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._kept.append(text)
        self.print_kept()

    @property
    def encoding(self):
        return getattr(self._file(), "encoding", None) or "utf-8"

    def isatty(self):
        try:
            return self._file().isatty()
        except (AttributeError, ValueError):  # there is none, or it is closed
            return False

    def is_behind(self):
        return bool(self._kept) or not self._is_ready()

    def print_kept(self):
        """Returns whether lines are left."""
        if not self._lock.acquire(timeout=_PATIENCE_SECS):
            return True  # a thread is in the middle of a line, and will print this one
        try:
            while self._kept and self._is_ready():
                self._write(self._kept.popleft())
            return bool(self._kept)
        finally:
            self._lock.release()

    def print_all(self):
        """Waits for those who read, until a signal ends the process."""
        while self._kept:
            self._write(self._kept.popleft())

    def flush(self):
        try:
            if self._is_ready():
                self._file().flush()
        except (AttributeError, OSError, ValueError):
            pass

    def _file(self):
        return getattr(sys, self._name)

    def _is_ready(self):
        """True if the stream takes a line, or fails: then `_write` does not wait."""
        secs = _PATIENCE_SECS if len(self._kept) <= 1 else 0.0
        try:
            poll = select.poll()
            poll.register(self._file().fileno(), select.POLLOUT)
            return bool(poll.poll(1000 * secs))
        except (AttributeError, OSError, ValueError):  # no file, or no such function
            return True

    def _write(self, text):
        try:
            # In one piece, from any thread.
            print(text, end="", file=self._file(), flush=True)
        except BrokenPipeError:
            setattr(sys, self._name, open(os.devnull, "w"))
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.lost = getattr(error, "strerror", None) or str(error)


_out, _err = _Stream("stdout"), _Stream("stderr")
for _stream in (_err, _out):  # the last one first
    atexit.register(_stream.print_all)
