"""The output of the workers and of the launcher, in whole lines."""

import asyncio
import collections
import os
import select
from collections.abc import Callable

from towers import console
from towers.errors import one_line

program = "towers.launch"  # begins the lines of the launcher itself

# Longest line; its rest is printed as the next one.
_MOST_BYTES = 2**20
_LATE_SECS = 1.0

_copies: set[asyncio.Task] = set()
_locks: dict[int, asyncio.Lock] = collections.defaultdict(asyncio.Lock)


def say(line: str) -> None:
    """Prints a line of the launcher itself."""
    console.error(f"{program}: {one_line(line)}")


def copy(reader: asyncio.StreamReader, target: int, prefix: bytes) -> asyncio.Task:
    """Prints what comes, in whole lines.

    Nothing more is read where nobody reads what was printed before. A worker goes on
    then, and keeps its newest lines (see `console`).

    Args:
        reader: what is read, to its end.
        target: the descriptor where it is printed.
        prefix: of each line.
    """
    task = asyncio.create_task(_copy(reader, target, prefix))
    _copies.add(task)
    task.add_done_callback(_copies.discard)
    return task


async def _copy(reader, target, prefix):
    rest = b""
    while data := await reader.read(_MOST_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _MOST_BYTES:
            lines, rest = [*lines, rest], b""
        await _write(target, b"".join(prefix + line + b"\n" for line in lines))
    if rest:
        await _write(target, prefix + rest + b"\n")


async def _write(target, data):
    """Writes whole lines; where nobody reads any more, drops them."""
    async with _locks[target]:
        while data:
            try:
                is_ready = bool(select.select([], [target], [], 0)[1])
                if is_ready:  # then it takes PIPE_BUF bytes at once
                    data = data[os.write(target, data[: select.PIPE_BUF]) :]
            except BlockingIOError:
                is_ready = False
            except OSError:
                return
            if not is_ready:
                await asyncio.sleep(0.01)


async def finish(is_stopped: Callable[[], bool]) -> None:
    """Waits for those who read; after a stop no longer than _LATE_SECS."""
    while _copies:
        await asyncio.wait(_copies, timeout=_LATE_SECS)
        if is_stopped():
            return
