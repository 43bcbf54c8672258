"""The lines that a run prints."""

import atexit
import collections
import contextlib
import os
import select
import sys
import threading
from collections.abc import Mapping

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


def duration(secs: float) -> str:
    """Such as "42 s", "3 min 20 s" or "2 h 05 min"."""
    secs = round(secs)
    if secs < 60:
        return f"{secs} s"
    if secs < 3600:
        return f"{secs // 60} min {secs % 60:02d} s"
    return f"{secs // 3600} h {secs % 3600 // 60:02d} min"


def log_line(
    record: Mapping[str, float],
    last_step: int,
    steps_per_sec: float | None,
    start_secs: float,
) -> str:
    """The log line of a step.

    Args:
        record: "step", "epoch", "loss", "learning_rate", and once they are known
            "images_per_sec" and "input_wait_percent"; "skipped_steps" where steps may
            be skipped.
        last_step: of the run.
        steps_per_sec: for the time left; None until it is known.
        start_secs: duration of the first call.
    """
    step = record["step"]
    speed = f"first step, with tracing and compiling: {start_secs:.1f} s"
    if steps_per_sec:
        left = duration((last_step - step) / steps_per_sec)
        speed = (
            f"{record['images_per_sec']:,.0f} images/s  "
            f"input wait {record['input_wait_percent']:.1f}%  {left} left"
        )
    skipped = ""
    if "skipped_steps" in record:
        skipped = f"skipped steps {record['skipped_steps']}  "
    return (
        f"step {step}/{last_step} ({step / last_step:.1%})  "
        f"epoch {record['epoch']:.2f}  loss {record['loss']:.4f}  "
        f"learning rate {record['learning_rate']:.4g}  {skipped}{speed}"
    )
