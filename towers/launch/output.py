"""The output of the workers and of the launcher, in whole lines."""

import contextlib
import os
import select

from towers.errors import one_line

PROGRAM = "towers.launch"

_MOST_BYTES = 2**20  # of a line; the rest is printed as the next one


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


def _write(target, data):
    """Writes all; where nobody reads any more, training goes on in silence."""
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                select.select([], [target], [])
