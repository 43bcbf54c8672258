"""Starts the workers of a cluster on this machine, and ends them together.

    python -m towers.launch --num_workers=3 -- --config=cifar10_cnn

Each worker runs `python run_train.py --strategy=multi_worker` with the flags that
follow `--`, and finds its place in TF_CONFIG. GPUs, or the cores of a CPU, are divided
among the workers. SIGTERM and SIGINT are passed on once to each worker. The exit code
is the worst of theirs: a defect or a signal that killed one before 2 to 6, these before
75, and that before 0.
"""

from towers import signals

if __name__ == "__main__":  # before the imports that take time
    signals.exit_on_signals()

import argparse
import collections
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, NamedTuple

from absl import flags

from towers import console
from towers.cli import flags as config_flags
from towers.errors import JOB, ConfigError, Preempted, StuckError, is_retryable
from towers.messages import IS_WHEEL, ROOT, one_line, program
from towers.threads import num_driver_gpus

PROGRAM = "towers.launch"
MAX_COUNT = 2**16  # restarts, or workers: beyond any cluster
HINT = f"the flags of {program('train')} follow --, such as -- --config=quickstart"

NOTICE_SECS = 15.0  # from the failure of a worker to SIGTERM; heartbeats are faster
GRACE_SECS = 60.0  # from SIGTERM to SIGKILL
SAVE_FACTOR = 10  # on this time after a stop, as the chief may be saving
TICK_SECS = 0.05  # between checks of the workers
LATE_SECS = 1.0  # for the last lines of a worker; perhaps nobody reads them
_MAX_LINE_BYTES = 2**20

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

_copies: list[threading.Thread] = []
_locks: dict[int, threading.Lock] = collections.defaultdict(threading.Lock)


class Share(NamedTuple):
    """A worker's part of the machine."""

    gpus: str | None = None  # its CUDA_VISIBLE_DEVICES; None leaves it unchanged
    cores: tuple[int, ...] = ()  # numbers of CPU cores; empty for all


class Worker:
    """A process in a process group of its own, whose lines get its number as a prefix.

    Attributes:
        code: its exit code once it has ended, as a shell gives it, but 75 if a signal
            from `send` killed it, or 6 if that was SIGKILL.
    """

    code: int | None = None
    _end = "is running"

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        share: Share,
    ):
        self.index = index
        self._sent: set[int] = set()
        gpus = {} if share.gpus is None else {"CUDA_VISIBLE_DEVICES": share.gpus}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environ, **gpus},
                process_group=0,  # Ctrl-C in a terminal reaches the launcher alone
                preexec_fn=functools.partial(_in_child, os.getpid(), share.cores),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"cannot start worker {index}: {error}") from None
        for pipe, target in (self._process.stdout, 1), (self._process.stderr, 2):
            args = pipe, target, b"[%d] " % index
            _copies.append(threading.Thread(target=_copy, args=args, daemon=True))
            _copies[-1].start()

    def __str__(self) -> str:
        return f"worker {self.index} {self._end}"

    def has_ended(self) -> bool:
        """Return whether the process has ended; kill the rest of its group then."""
        if self.code is None and (code := self._process.poll()) is not None:
            self._kill_group()
            self._end, self.code = f"ended with exit code {code}", code
            if code < 0:
                name, self.code = signal.strsignal(-code), 128 - code
                self._end = f"was killed by signal {-code} ({name})"
            if -code in self._sent:
                self.code = Preempted.exit_code
            if code == -signal.SIGKILL and -code in self._sent:
                self.code, self._end = StuckError.exit_code, "was killed, as it ran on"
        return self.code is not None

    def send(self, number: int) -> bool:
        """Send a signal, each at most once; return whether it was not sent before."""
        if number in self._sent:
            return False
        self._sent.add(number)
        self._process.send_signal(number)
        return True

    def kill(self) -> None:
        """End the process and its group at once."""
        if not self.has_ended():
            self._kill_group()
            self._process.wait()

    def _kill_group(self):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _in_child(parent, cores):
    """Prepare the new process before its program starts."""
    if _LIBC:  # on Linux it is killed when the launcher ends, however that ends
        _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(Preempted.exit_code)
    if cores:
        os.sched_setaffinity(0, cores)


def _copy(pipe: IO[bytes], target: int, prefix: bytes) -> None:
    """Write whole lines of a pipe on a descriptor, or drop them if it is closed."""
    with pipe:
        while line := pipe.readline(_MAX_LINE_BYTES):
            line = prefix + line.removesuffix(b"\n") + b"\n"
            with _locks[target], contextlib.suppress(OSError):
                while line:
                    select.select([], [target], [])  # it may be non-blocking
                    line = line[os.write(target, line[: select.PIPE_BUF]) :]


def wait_for_lines(secs: float) -> bool:
    """Wait until the lines of ended workers are printed; return whether they are."""
    end = time.monotonic() + secs
    for thread in _copies:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in _copies)


def worst(codes: Sequence[int]) -> int:
    """Return the first of the worst exit codes, in the order of the module's text.

    A defect is 70, or a code without a meaning; a signal is 128 + its number.
    """
    ranks = {0: 0, Preempted.exit_code: 1} | dict.fromkeys(range(2, 7), 2)
    return max(codes, key=lambda code: ranks.get(code, 3))


def signal_due(secs: float, grace_secs: float, is_saving: bool) -> int | None:
    """Return the signal for workers that still run after a failure or a stop, if any.

    They have `grace_secs` to end by themselves, at most NOTICE_SECS, and again after
    SIGTERM, SAVE_FACTOR times as long if one may save; then it is SIGKILL.
    """
    notice_secs = min(NOTICE_SECS, grace_secs)
    if secs < notice_secs:
        return None
    max_secs = grace_secs * (SAVE_FACTOR if is_saving else 1)
    return signal.SIGTERM if secs < notice_secs + max_secs else signal.SIGKILL


def supervise(
    start: Callable[[list[int]], AbstractContextManager[Sequence]],
    name: str,
    *,
    max_restarts: int = 0,
    grace_secs: float = GRACE_SECS,
) -> int:
    """Run workers in the main thread until all have ended; return the `worst` code.

    A signal is passed on to all workers, once. Without one, all are started again if
    that may help, see `is_retryable`.

    Args:
        start: starts all workers in a context, which kills those left at its end; takes
            a list, and starts none once the list has the number of a signal.
        name: name of the launcher, which begins its lines.
        max_restarts: maximum number of restarts.
        grace_secs: see `signal_due`.
    """
    say = functools.partial(print_line, name)
    if not 0 <= grace_secs < math.inf:
        raise ConfigError(f"grace_secs={grace_secs:g}: must be finite and at least 0")
    stop: list[int] = []
    former = signals.catch(lambda number, _: stop.append(number))
    try:
        for restart in itertools.count(1):
            with start(stop) as workers:
                ended = _until_ended(workers, stop, say, grace_secs)
            wait_for_lines(LATE_SECS)
            codes = [worker.code for worker in ended] or [Preempted.exit_code]
            code, cause = worst(codes), "stopped by a signal before the workers started"
            if not code:
                break
            if ended:
                cause = str(ended[codes.index(code)])
            may_help = all(map(is_retryable, filter(None, codes))) and not stop
            if not may_help or restart > max_restarts:
                say(cause)
                break
            say(f"{cause}; restart {restart} of {max_restarts}: all workers start anew")
        while not wait_for_lines(LATE_SECS) and not stop:
            pass
    finally:
        signals.restore(former)
    return code


def _until_ended(workers, stop, say, grace_secs):
    """Return the workers in the order of their ends; end those that run on."""
    running, ended, since = list(workers), [], None
    while running:
        ended += [worker for worker in running if worker.has_ended()]
        running = [worker for worker in running if worker not in ended]
        if stop:
            for worker in running:
                worker.send(stop[0])
        failed = [worker for worker in ended if worker.code]
        if running and (failed or stop):
            since = since or time.monotonic()
            codes = {worker.code for worker in failed}
            is_saving = bool(stop) and codes <= {Preempted.exit_code}
            number = signal_due(time.monotonic() - since, grace_secs, is_saving)
            sent = [str(x.index) for x in running if number and x.send(number)]
            if number and sent:
                why, name = failed[0] if failed else "stopped", signal.Signals(number)
                say(f"{why}; {name.name} to {', '.join(sent)}, still running")
        time.sleep(TICK_SECS)
    return ended


def job_environ() -> dict[str, str]:
    """Return environment variables shared by all workers and restarts of a job."""
    own = {"PYTHONUNBUFFERED": "1", JOB: str(uuid.uuid4())}
    return {name: os.environ.get(name, value) for name, value in own.items()}


def tf_config(addresses: Sequence[str], index: int) -> dict[str, str]:
    """Return TF_CONFIG of a worker, with host:port of all workers."""
    cluster, task = {"worker": list(addresses)}, {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def launch(
    command: Sequence[str], num_workers: int, *, device: str = "auto", **options: Any
) -> int:
    """Run a command as every worker of a cluster; see `supervise` for the options.

    With `device="cpu"` the workers see no GPU.
    """
    shares, job = divide(num_workers, os.environ, device), job_environ()

    @contextlib.contextmanager
    def start(stop):
        workers = []
        try:
            with free_ports(num_workers) as ports:
                addresses = [f"127.0.0.1:{port}" for port in ports]
                for index, share in enumerate(shares):
                    if not stop:
                        environ = job | tf_config(addresses, index)
                        workers.append(Worker(index, command, environ, share))
                yield workers
        finally:
            for worker in workers:
                worker.kill()

    return supervise(start, PROGRAM, **options)


def print_line(name: str, line: str) -> None:
    """Print a line of a launcher."""
    console.error(f"{name}: {one_line(line)}")


def divide(
    num_workers: int, environ: Mapping[str, str], device: str = "auto"
) -> list[Share]:
    """Return the share of each worker: GPUs, or cores without GPUs.

    All get the same number, as sums round by the number of threads and workers that
    round otherwise are refused (`towers.cluster.agreement`). Cores may be left over.
    """
    gpus = [] if device == "cpu" else _visible_gpus(environ)
    if len(gpus) % num_workers:
        way = "name other GPUs in CUDA_VISIBLE_DEVICES, or train with --device=cpu"
        why = f"{len(gpus)} GPU(s): all workers get the same number; take a divisor"
        raise ConfigError(f"num_workers={num_workers} with {why}, {way}")
    if gpus:
        return [Share(gpus=",".join(part)) for part in _parts(gpus, num_workers)]
    hidden = "" if device == "cpu" else None  # else each worker takes memory of them
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = sorted(os.sched_getaffinity(0)) if has_affinity else []
    return [Share(hidden, tuple(part)) for part in _parts(cores, num_workers)]


def _parts(items, count):
    """Return `count` contiguous parts of the same length, as long as possible."""
    size = len(items) // count
    return [items[i * size : (i + 1) * size] for i in range(count)]


def _visible_gpus(environ):
    """Return the names of the GPUs that CUDA would use."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return list(map(str, range(num_driver_gpus())))
    # CUDA ignores a name that is not a GPU's, such as -1, and those after it.
    is_gpu = re.compile(r"\d+|(GPU|MIG)-\S+").fullmatch
    return list(itertools.takewhile(is_gpu, map(str.strip, names.split(","))))


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Reserve TCP ports inside of the context, on Linux against all other programs.

    There they stay bound, without listening, in a way that leaves them to a server that
    sets SO_REUSEADDR, as TensorFlow's servers do.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))  # a server of TensorFlow listens on all addresses
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            if sys.platform == "linux":
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            else:
                each.close()
        yield ports


def train_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a worker: `python run_train.py`, or `towers-train`.

    A strategy among the arguments overrides the one set here.
    """
    path = str(ROOT / "run_train.py")
    if IS_WHEEL:
        folders = [os.path.dirname(sys.executable), *os.get_exec_path()]
        path = shutil.which("towers-train", path=os.pathsep.join(folders)) or path
    return [sys.executable, path, "--strategy=multi_worker", *arguments]


def parse(argv: Sequence[str]) -> list[str]:
    """Give the flags their values; return the program and what follows `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    try:
        config_flags.parse(argv[:end])
    except ConfigError as error:
        hint = "" if "--" in argv else f"; {HINT}"
        raise ConfigError(f"{str(error).rstrip('.')}{hint}") from None
    if not argv[end + 1 :]:
        raise ConfigError(f"no command: {HINT}")
    return [argv[0], *argv[end + 1 :]]


def define_worker_flags(max_workers: int) -> None:
    """Define the flags of both launchers."""
    about = "Number of worker processes."
    flags.DEFINE_integer("num_workers", None, about, 1, max_workers, required=True)
    about = "Maximum number of restarts of all workers after one was killed, was "
    about += "stuck, met a defect, or stopped without a signal to the launcher."
    flags.DEFINE_integer("max_restarts", 0, about, 0, MAX_COUNT)


def define_flags() -> None:
    """Define the flags before `--`."""
    define_worker_flags(max_workers=64)
    about = "Seconds for the other workers to notice a failed one and end, at most "
    about += f"{NOTICE_SECS:g}, and again after SIGTERM; then they are killed. After a "
    about += f"stop they have {SAVE_FACTOR} times as long: one may be saving."
    flags.DEFINE_float("grace_secs", GRACE_SECS, about, 0.0)


def main(argv: Sequence[str]) -> int:
    """Run the workers; return their exit code."""
    if "TF_CONFIG" in os.environ:
        way = f"unset it, or run {program('train')} as a worker of that cluster"
        raise ConfigError(f"TF_CONFIG is set: the launcher starts a cluster; {way}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", "-device", nargs="?", default="auto")
    device = parser.parse_known_args(argv[1:])[0].device
    values, command = flags.FLAGS, train_command(argv[1:])
    options = {name: values[name].value for name in ("max_restarts", "grace_secs")}
    return launch(command, values.num_workers, device=device, **options)


if __name__ == "__main__":
    define_flags()
    config_flags.start(main, parse, PROGRAM)
