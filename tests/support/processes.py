"""Processes that tests start, watch, and end."""

import contextlib
import json
import os
import pathlib
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WAIT_SECS = 120  # for what takes seconds on an idle machine
TICK_SECS = 0.01

# Variables of whoever runs the tests, which would change what the processes do.
_OWN = re.compile(r"(CUDA|KERAS|SLURM|TF|TOWERS)_\w+|PYTHONUNBUFFERED")

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def environ_of(changes: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of a process that imports from the checkout."""
    inherited = {k: v for k, v in os.environ.items() if not _OWN.fullmatch(k)}
    return inherited | {"PYTHONPATH": f"{ROOT}:{HERE}:{HERE.parent}"} | dict(changes)


def run(*command: str, **environ: str) -> subprocess.CompletedProcess:
    """Run a Python program, with the arguments of `python`, to its end."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environ_of(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECS,
    )


class Program:
    """A running Python program; a context manager that kills it at the end.

    Args:
        command: the arguments of `python`.
        folder: where it runs, and where its output goes.
        environ: changes of the environment.
        prefix: a command that starts it.
        **options: of `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence,
        folder: pathlib.Path,
        environ: Mapping[str, str] = {},
        prefix: Sequence[str] = (),
        **options,
    ):
        self.path = folder / f"output-{time.monotonic_ns()}.txt"
        with open(self.path, "wb") as output:
            given = {
                "cwd": folder,
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": output,
                # A signal to the tests is not one to it.
                "start_new_session": True,
            }
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *map(str, command)],
                env=environ_of(environ),
                **given | options,
            )

    @property
    def output(self) -> str:
        return self.path.read_text(errors="replace")

    def wait_until(self, is_so: Callable[[], bool], secs: float = WAIT_SECS) -> None:
        """Waits, while it runs."""
        patience = time.monotonic() + secs
        while not is_so():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < patience, self.output
            time.sleep(TICK_SECS)

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """The matches in the output, once there are so many."""
        found = []

        def is_so():
            found[:] = re.findall(pattern, self.output, re.MULTILINE)
            return len(found) >= count

        self.wait_until(is_so)
        return found

    is_plain = True  # the output has neither colors nor carriage returns: row 31

    def wait(self, secs: float = WAIT_SECS) -> int:
        """The exit code."""
        try:
            code = self.process.wait(secs)
        except subprocess.TimeoutExpired:
            pytest.fail(self.output)
        if self.is_plain:
            assert "\r" not in self.output and "\x1b" not in self.output
        return code

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        with self.process:  # which closes the pipes
            pass


class Server(Program):
    """A program that answers each line of JSON with a line."""

    def __init__(self, command: Sequence, folder: pathlib.Path, **options):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__(command, folder, **pipes, **options)

    def send(self, job) -> None:
        print(json.dumps(job), file=self.process.stdin, flush=True)

    def answer(self, secs: float = 300) -> str:
        ready, _, _ = select.select([self.process.stdout], [], [], secs)
        line = self.process.stdout.readline().strip() if ready else ""
        assert line, self.output[-3000:]
        return line

    def end(self) -> None:
        """There are no more jobs."""
        self.process.stdin.close()
        assert self.wait() == 0, self.output[-3000:]

    def __exit__(self, error_type, *_) -> None:
        try:
            if error_type is None:
                self.end()
        finally:
            super().__exit__()


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.split()[0] not in "XZ"


def wait_for_ends(pids: Sequence[int]) -> None:
    patience = time.monotonic() + WAIT_SECS
    while any(map(is_running, map(int, pids))):
        assert time.monotonic() < patience
        time.sleep(TICK_SECS)


def fill(pipe: int) -> int:
    """Writes until a pipe takes no more; how many bytes."""
    num_bytes = 0
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += os.write(pipe, bytes(4096))
    os.set_blocking(pipe, True)
    return num_bytes
