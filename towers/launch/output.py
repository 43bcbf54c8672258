"""The output of the workers and of the launcher, in whole lines."""

import asyncio
import contextlib
import functools
import os
import select
import time
from collections.abc import Callable

from towers.errors import one_line
from towers.job_thread import JobThread

program = "towers.launch"  # begins the lines of the launcher itself

# Of a line, whose rest is printed as the next one; and of lines that nobody reads.
MOST_BYTES = 2**20
_LATE_SECS = 1.0


def write(target: int, data: bytes) -> None:
    """Writes whole lines to a descriptor, without waiting for those who read.

    What comes while MOST_BYTES wait is dropped, and counted. Where nobody reads any
    more, training goes on in silence.
    """
    if target not in _writers:
        _writers[target] = _Writer(target)
    _writers[target].write(data)


def say(line: str) -> None:
    """Prints a line of the launcher itself."""
    write(2, f"{program}: {one_line(line)}\n".encode())


async def finish(is_stopped: Callable[[], bool]) -> None:
    """Waits for those who read; after a stop no longer than _LATE_SECS."""
    patience = None
    while any(writer.num_bytes for writer in _writers.values()):
        if is_stopped():
            patience = patience or time.monotonic() + _LATE_SECS
            if time.monotonic() > patience:
                return
        await asyncio.sleep(0.01)


class _Writer:
    """Writes in a thread of its own, so that who does not read holds nothing up."""

    def __init__(self, target: int):
        self.num_bytes = self._num_dropped = 0
        self._target, self._thread = target, JobThread(f"output {target}")

    def write(self, data: bytes) -> None:
        if self.num_bytes and self.num_bytes + len(data) > MOST_BYTES:
            self._num_dropped += data.count(b"\n")
            return
        if self._num_dropped:
            dropped = f"{program}: {self._num_dropped} lines dropped: nobody read them"
            data, self._num_dropped = f"{dropped}\n".encode() + data, 0
        self.num_bytes += len(data)
        self._thread.submit(functools.partial(self._write_all, data))

    def _write_all(self, data):
        num_bytes = len(data)
        with contextlib.suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._target, data) :]
                except BlockingIOError:
                    select.select([], [self._target], [])
        self.num_bytes -= num_bytes


_writers: dict[int, _Writer] = {}
