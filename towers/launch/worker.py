"""A worker process, which does not outlive the launcher."""

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Sequence

from towers.errors import ConfigError, Preempted, StuckError, end_with_parent
from towers.launch.machine import Share
from towers.launch.output import Stream


class Worker:
    """A worker process in a process group of its own.

    Attributes:
        code: its exit code, once it has ended: as a shell gives it, but where it was
            killed by a signal that the launcher had sent 75, or 6 of SIGKILL, which it
            gets when it does not end in time.
    """

    def __init__(
        self, index: int, command: Sequence[str], environ: dict[str, str], share: Share
    ):
        self.index = index
        self.code: int | None = None
        self._end = "is running"
        self._sent: dict[int, object] = {}  # by number
        gpus = {} if share.gpus is None else {"CUDA_VISIBLE_DEVICES": share.gpus}
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ | gpus,
                process_group=0,  # Ctrl-C in a terminal reaches the launcher alone
                preexec_fn=functools.partial(_in_child, os.getpid(), share.cores),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"cannot start worker {index}: {error}") from None
        prefix = b"[%d] " % index
        self._streams = [
            Stream(self._process.stdout, 1, prefix),
            Stream(self._process.stderr, 2, prefix),
        ]

    def __str__(self) -> str:
        return f"worker {self.index} {self._end}"

    def open_streams(self) -> list[Stream]:
        return [stream for stream in self._streams if not stream.pipe.closed]

    def send(self, number: int) -> bool:
        """Sends a signal, each at most once; False where it was sent before."""
        first = object()
        # In one step, as a handler that sends may interrupt this.
        is_first = self._sent.setdefault(number, first) is first
        if is_first:
            self._process.send_signal(number)
        return is_first

    def has_ended(self) -> bool:
        """True once it has ended; the rest of its process group is then killed."""
        if self.code is None and (code := self._process.poll()) is not None:
            self._kill_group()
            for stream in self._streams:
                stream.close()
            self.code, self._end = code, f"ended with exit code {code}"
            if code < 0:
                name = signal.strsignal(-code)
                self._end = f"was killed by signal {-code} ({name})"
                self.code = 128 - code
                if -code == signal.SIGKILL and signal.SIGKILL in self._sent:
                    self.code = StuckError.exit_code
                    self._end = "did not end in time and was killed"
                elif -code in self._sent:
                    self.code = Preempted.exit_code
        return self.code is not None

    def kill(self) -> None:
        """Ends it and its process group at once."""
        if not self.has_ended():
            self._kill_group()
            self._process.wait()
            self.has_ended()

    def _kill_group(self):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _in_child(parent, cores):
    """Runs in the new process, before the program."""
    end_with_parent(parent)
    if cores:
        os.sched_setaffinity(0, cores)
