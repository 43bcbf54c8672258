"""Lines for the user: what happens on standard output, errors on standard error.

No call raises an error, and none waits for long:

- Where nobody reads for a while, as in `run_train.py | less` or after Ctrl-S, lines are
  kept, and printed before later ones or at the end of the process.
- Where printing fails, because nobody reads any more (`run_train.py | head`) or a log
  file is on a full disk, the program goes on in silence.
"""

import atexit
import collections
import os
import select
import sys
import threading

# How long the first of the lines that nobody reads waits.
_PATIENCE_SECS = 1.0
_MOST_KEPT = 1000


def line(text: str) -> None:
    """Prints one plain line on standard output, at once."""
    _out.print(text)


def warn(text: str) -> None:
    """Prints a warning there."""
    line(f"warning: {text}")


def error(text: str) -> None:
    """Prints one plain line on standard error, where standard output has the results of
    a program, or the program ends."""
    _err.print(text)


def flush() -> None:
    """Prints what is kept, and flushes standard output, where that does not wait."""
    _out.print_kept()
    _out.flush()


def printable(text: str) -> str:
    """The text with control characters, line breaks and bytes that are no text as
    escapes, such as \\n, so that it is one line and changes no terminal."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


class _Stream:
    """A stream of `sys` by its name, and the newest lines that it has not taken."""

    def __init__(self, name):
        self._name, self._kept = name, collections.deque(maxlen=_MOST_KEPT)
        self._lock = threading.Lock()

    def print(self, text):
        encoding = getattr(self._file(), "encoding", None) or "utf-8"
        text = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        self._kept.append(text)
        self.print_kept()

    def print_kept(self):
        if not self._lock.acquire(timeout=_PATIENCE_SECS):
            return  # a thread is in the middle of a line, and will print this one
        try:
            while self._kept and self._is_ready():
                self._write(self._kept.popleft())
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
        """Whether the stream takes a line, or fails: then `_write` does not wait."""
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
            print(f"{text}\n", end="", file=self._file(), flush=True)
        except BrokenPipeError:
            setattr(sys, self._name, open(os.devnull, "w"))
        except (OSError, ValueError):  # ValueError: the stream is closed
            pass


_out, _err = _Stream("stdout"), _Stream("stderr")
atexit.register(_out.print_all)
