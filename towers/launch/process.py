"""A worker process, which does not outlive the launcher, and its output by lines."""

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import functools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from towers import console
from towers.errors import ConfigError, Preempted, StuckError
from towers.messages import one_line

program = "towers.launch"  # begins the lines of the launcher itself

# How long output is waited for after the end: another process may hold the pipe.
_LATE_SECS = 1.0
# Longest line; its rest is printed as the next one.
_MAX_BYTES = 2**20
# Half of the output that waits to be printed at most.
_BUFFER_BYTES = 2**20
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

_copies: set[asyncio.Task] = set()
_locks: dict[int, asyncio.Lock] = collections.defaultdict(asyncio.Lock)


@dataclasses.dataclass(frozen=True)
class Share:
    """A worker's part of the machine: its CUDA_VISIBLE_DEVICES, which None leaves
    unchanged, and the numbers of the CPU cores that it may use, empty for all.
    """

    gpus: str | None = None
    cores: tuple[int, ...] = ()


class Process(asyncio.subprocess.SubprocessStreamProtocol):
    """A worker process in a process group of its own, whose lines are printed behind
    its number.

    Attributes:
        index: number of the worker.
        ended: a task, done once it has ended and its lines are printed, or had a second
            for that; the rest of its process group is killed then.
        code: its exit code, once it has ended: as a shell gives it, but where it was
            killed by a signal that `send` had sent 75, or 6 of SIGKILL, which it gets
            when it does not end in time.
    """

    def __init__(self, index: int, loop: asyncio.AbstractEventLoop):
        super().__init__(limit=_BUFFER_BYTES, loop=loop)
        self.index = index
        self.code: int | None = None
        self._end = "is running"
        self._sent: set[int] = set()
        self._exited = asyncio.Event()

    @classmethod
    async def start(
        cls,
        index: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        share: Share,
    ) -> "Process":
        """Starts a worker, with `environ` besides the environment of this process;
        ConfigError where it cannot be started.
        """
        loop = asyncio.get_running_loop()
        gpus = {} if share.gpus is None else {"CUDA_VISIBLE_DEVICES": share.gpus}
        try:
            transport, self = await loop.subprocess_exec(
                functools.partial(cls, index, loop),
                *command,
                stdin=subprocess.DEVNULL,
                env=os.environ | environ | gpus,
                process_group=0,  # Ctrl-C in a terminal reaches the launcher alone
                preexec_fn=functools.partial(_in_child, os.getpid(), share.cores),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"cannot start worker {index}: {error}") from None
        self._child, prefix = transport, b"[%d] " % index
        self._copies = [copy(self.stdout, 1, prefix), copy(self.stderr, 2, prefix)]
        self.ended = asyncio.create_task(self._until_end())
        return self

    def __str__(self) -> str:
        return f"worker {self.index} {self._end}"

    def send(self, number: int) -> bool:
        """Sends a signal, each at most once; False where it was sent before."""
        if number in self._sent:
            return False
        self._sent.add(number)
        if not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.get_pid(), number)
        return True

    async def kill(self) -> None:
        """Ends it and its process group at once."""
        if self.code is None:
            self._kill_group()
        await self.ended

    async def _until_end(self):
        await self._exited.wait()
        self._kill_group()
        await asyncio.wait(self._copies, timeout=_LATE_SECS)
        code = self._child.get_returncode()
        self._child.close()
        self._end = f"ended with exit code {code}"
        if code < 0:
            number, code = -code, 128 - code
            self._end = f"was killed by signal {number} ({signal.strsignal(number)})"
            if number in self._sent:
                code = Preempted.exit_code
                if number == signal.SIGKILL:
                    code = StuckError.exit_code
                    self._end = "did not end in time and was killed"
        self.code = code

    def _kill_group(self):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.get_pid(), signal.SIGKILL)

    def process_exited(self) -> None:
        """Called by the event loop."""
        super().process_exited()
        self._exited.set()


def _in_child(parent, cores):
    """Runs in the new process, before the program."""
    if _LIBC:  # on Linux alone: it is killed when the launcher ends, however that ends
        _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(Preempted.exit_code)
    if cores:
        os.sched_setaffinity(0, cores)


def say(line: str) -> None:
    """Prints a line of the launcher itself."""
    console.error(f"{program}: {one_line(line)}")


def copy(reader: asyncio.StreamReader, target: int, prefix: bytes) -> asyncio.Task:
    """Prints what comes in whole lines, on a descriptor. Nothing more is read where
    nobody reads what was printed before: a worker goes on then, and keeps its newest
    lines (see `console`).
    """
    task = asyncio.create_task(_copy(reader, target, prefix))
    _copies.add(task)
    task.add_done_callback(_copies.discard)
    return task


async def _copy(reader, target, prefix):
    rest = b""
    while data := await reader.read(_MAX_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _MAX_BYTES:
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
