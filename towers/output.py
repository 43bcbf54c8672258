"""Lines that a program prints, which hold nothing up and cannot be the cause of an
error."""

import atexit
import collections
import contextlib
import os
import select
import sys
import threading

from towers.errors import printable

# Lines that nobody reads yet, the newest of them, and how long the first one waits.
_unread: collections.deque[str] = collections.deque(maxlen=1000)
_printing = threading.Lock()
_PATIENCE_SECS = 1.0


def say(line: str) -> None:
    """Prints one plain line, at once.

    Where nobody reads for a while, as in `run_train.py | less` or after Ctrl-S, the
    lines are kept, and printed before later ones or at the end of the process: the
    training does not wait.

    Where printing fails, because nobody reads any more (`run_train.py | head`) or a log
    file is on a full disk, the training goes on in silence; the metrics are in
    `metrics.jsonl` as well.
    """
    line = printable(line)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    _unread.append(line.encode(encoding, "backslashreplace").decode(encoding))
    if not _printing.acquire(timeout=_PATIENCE_SECS):
        return  # a thread is in the middle of a line, and will print this one
    try:
        while _unread and _takes_a_line(_PATIENCE_SECS if len(_unread) == 1 else 0.0):
            _print(_unread.popleft())
    finally:
        _printing.release()


def _takes_a_line(secs):
    """Whether standard output takes a line within some seconds, or fails: then `_print`
    does not wait."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return bool(poll.poll(1000 * secs))
    except (AttributeError, OSError, ValueError):  # no file, or no such function here
        return True


@atexit.register
def _print_unread():
    """Waits for those who read, until a signal ends the process."""
    while _unread:
        _print(_unread.popleft())


def _print(line):
    try:
        print(f"{line}\n", end="", flush=True)  # in one piece, from any thread
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")
    except (OSError, ValueError):  # ValueError: standard output is closed
        pass


def remark(line: str) -> None:
    """Prints one plain line on standard error, at once, where standard output has a
    program's results; does nothing where that fails."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        print(f"{printable(line)}\n", end="", file=sys.stderr, flush=True)
