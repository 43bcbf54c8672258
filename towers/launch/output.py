"""The output of the workers and of the launcher, in whole lines."""

import contextlib
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable

from towers.errors import one_line

PROGRAM = "towers.launch"

# Of a line, whose rest is printed as the next one; and of lines that nobody reads.
_MOST_BYTES = 2**20
_LATE_SECS = 1.0


class Stream:
    """Copies the standard output or error of a worker, each line behind a prefix."""

    def __init__(self, pipe, target: int, prefix: bytes):
        os.set_blocking(pipe.fileno(), False)
        self.pipe, self._target, self._prefix = pipe, target, prefix
        self._line = b""  # the beginning of one

    def fileno(self) -> int:
        return self.pipe.fileno()

    def copy(self) -> bool:
        """Prints the lines that have come; False where there was nothing to read."""
        data = self.pipe.read(2**16)
        if data is None:
            return False
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _MOST_BYTES:
            lines, self._line = [*lines, self._line], b""
        _write(self._target, b"".join(self._prefix + line + b"\n" for line in lines))
        if not data:
            self.pipe.close()
        return bool(data)

    def close(self) -> None:
        """Prints what is left. Another process may hold the pipe open, and write."""
        for _ in range(16):  # more than a pipe holds
            if self.pipe.closed or not self.copy():
                break
        if self._line:
            _write(self._target, self._prefix + self._line + b"\n")
        self.pipe.close()


def say(line: str) -> None:
    """Prints a line of the launcher itself."""
    _write(2, f"{PROGRAM}: {one_line(line)}\n".encode())


def finish(is_stopped: Callable[[], bool]) -> None:
    """Waits for those who read; after a stop no longer than _LATE_SECS."""
    stopped_at = math.inf
    while any(writer.num_bytes for writer in _writers.values()):
        if is_stopped():
            stopped_at = min(stopped_at, time.monotonic())
        if time.monotonic() - stopped_at > _LATE_SECS:
            break
        time.sleep(0.01)


class _Writer:
    """Writes in a thread of its own, so that who does not read holds nothing up.

    What comes while _MOST_BYTES wait is lost, and counted. Where nobody reads any more,
    training goes on in silence.
    """

    def __init__(self, target: int):
        self.num_bytes = self._num_lost = 0
        self._target, self._queue = target, queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def write(self, data: bytes) -> None:
        if self.num_bytes + len(data) > _MOST_BYTES:
            self._num_lost += data.count(b"\n")
            return
        if self._num_lost:
            lost = f"{PROGRAM}: {self._num_lost} lines are lost: nobody read them\n"
            data, self._num_lost = lost.encode() + data, 0
        self.num_bytes += len(data)
        self._queue.put(data)

    def _run(self):
        while True:
            data = self._queue.get()
            _write_all(self._target, data)
            self.num_bytes -= len(data)


_writers: dict[int, _Writer] = {}


def _write(target, data):
    if target not in _writers:
        _writers[target] = _Writer(target)
    _writers[target].write(data)


def _write_all(target, data):
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                select.select([], [target], [])
