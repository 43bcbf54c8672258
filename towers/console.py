"""Lines for the user: progress on standard output, errors on standard error.

No call raises an error, and none waits for long. If nobody reads for a while, as in
`run_train.py | less` or after Ctrl-S, lines are kept and printed later, or at the end
of the process. If printing fails, because nobody reads any more (`run_train.py
| head`) or a log file is on a full disk, the program continues in silence.
"""

import atexit
import collections
import functools
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from towers.messages import printable, version_line

if TYPE_CHECKING:
    from rich.console import RenderableType

# Time to wait for a reader: of the first line that nobody reads, and after an error at
# the end of the process.
_PATIENCE_SECS = 1.0
END_SECS = 2.0

_MAX_KEPT = 1000  # lines that nobody has read

RED, YELLOW = 31, 33

# Displays of progress; auto is live on a terminal, else plain.
MODES = ("auto", "live", "plain", "off")

_REFRESH_SECS = 0.25  # between frames of live lines


def line(text: str) -> None:
    """Print one plain line on standard output, at once."""
    _print(text)


def warn(text: str) -> None:
    """Print a warning on standard output."""
    _print(f"warning: {text}", YELLOW)


def print_versions(*lines: str) -> None:
    """Print the versions, once in a process, and more lines."""
    _print_once(version_line())
    for text in lines:
        line(text)


_print_once = functools.cache(line)


def _print(text, color=None):
    if live := _out.live:  # another thread may end it
        live.print(_colored(printable(text), color))
    else:
        _out.print(text, color)


def error(text: str) -> None:
    """Print one plain line on standard error."""
    if live := _out.live:
        live.stop()
    _err.print(text, RED)


def remark(text: str) -> None:
    """Print one plain line on standard error, in a notebook on standard output."""
    (line if is_notebook() else error)(text)


def is_terminal() -> bool:
    """Return whether standard output is a terminal that can move its cursor."""
    return _out.isatty() and os.environ.get("TERM") != "dumb"


def columns(most: int) -> int:
    """Return the width of a line: `most`, or a terminal's width if that is smaller."""
    return min(most, shutil.get_terminal_size().columns) if _out.isatty() else most


def is_notebook() -> bool:
    """Return whether standard output is the output of a notebook's cell."""
    return type(sys.stdout).__module__ == "ipykernel.iostream"


def _colored(text, color):
    if color is None or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{color}m{text}\x1b[0m"


class Live:
    """Lines at the end of a terminal that are updated; others go above them."""

    def __init__(self, render: Callable[[int], "RenderableType"]):
        import rich.console
        import rich.live

        self._console = rich.console.Console(file=cast(Any, _out), force_terminal=True)
        self._refreshed_at = 0.0
        self._live = rich.live.Live(
            get_renderable=lambda: render(self._console.width),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        _out.live = self

    def refresh(self) -> None:
        """Update the lines, at most every _REFRESH_SECS, unless nobody reads."""
        now = time.monotonic()
        if _out.live is self and now >= self._refreshed_at + _REFRESH_SECS:
            self._refreshed_at = now
            if not _out.is_behind():
                self._live.refresh()

    def print(self, text: str) -> None:
        """Print a line above."""
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def stop(self) -> None:
        """Remove the lines."""
        if _out.live is self:
            _out.live = None
            self._live.stop()


def flush() -> None:
    """End the live lines, and print the kept ones unless nobody reads."""
    if live := _out.live:
        live.stop()
    _out.print_kept()


def lost_output() -> str:
    """Return why a line could not be printed; empty if all were."""
    return _out.lost


def finish() -> None:
    """Print the kept lines before `os._exit`; wait for END_SECS at most."""
    end = time.monotonic() + END_SECS
    while any([_out.print_kept(), _err.print_kept()]) and time.monotonic() < end:
        time.sleep(0.02)


class _Stream:
    """A stream of `sys`, also for rich, and its newest lines that nobody has read."""

    def __init__(self, name):
        self._name, self._kept = name, collections.deque(maxlen=_MAX_KEPT)
        self.live: Live | None = None
        self.lost = ""  # why a line could not be printed
        self._lock = threading.Lock()

    def print(self, text, color=None):
        text = _colored(printable(text), color if self.isatty() else None)
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
        """Print the kept lines; return whether any are left."""
        if not self._lock.acquire(timeout=_PATIENCE_SECS):
            return True  # another thread is printing, and will print this line
        try:
            while self._kept and self._is_ready():
                self._write(self._kept.popleft())
            return bool(self._kept)
        finally:
            self._lock.release()

    def print_all(self):
        """Print the kept lines, however long that takes."""
        while self._kept:
            self._write(self._kept.popleft())

    flush = print_kept

    def _file(self):
        return getattr(sys, self._name)

    def _is_ready(self):
        """Return whether `_write` would not wait: somebody reads, or it fails."""
        secs = _PATIENCE_SECS if len(self._kept) <= 1 else 0.0
        try:
            poll = select.poll()
            poll.register(self._file().fileno(), select.POLLOUT)
            return bool(poll.poll(1000 * secs))
        except (AttributeError, OSError, ValueError):  # no file, or no such function
            return True

    def _write(self, text):
        try:
            print(text, end="", file=self._file(), flush=True)
        except BrokenPipeError:
            setattr(sys, self._name, open(os.devnull, "w"))  # noqa: SIM115
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.lost = getattr(error, "strerror", None) or str(error)


_out, _err = _Stream("stdout"), _Stream("stderr")
atexit.register(_err.print_all)
atexit.register(_out.print_all)  # runs first
