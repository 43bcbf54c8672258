"""Workers on this machine, and the parts of it that they get: GPUs, cores and ports."""

import contextlib
import itertools
import os
import pathlib
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from towers.errors import ConfigError
from towers.launch.process import Process, Share
from towers.launch.supervisor import job_environ, supervise, tf_config

DRIVER_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")


def launch(
    command: Sequence[str], num_workers: int, *, device: str = "auto", **options
) -> int:
    """Runs a command as every worker of a cluster; call it in the main thread.

    Args:
        command: a program and its arguments.
        num_workers: number of processes.
        device: "cpu" hides the GPUs from the workers.
        **options: of `supervise`.

    Returns:
        The exit code, see `towers.launch.supervisor.worst`.

    Raises:
        ConfigError: the machine cannot be divided, or a worker cannot be started; or of
            `supervise`.
    """
    shares, job = divide(num_workers, os.environ, device), job_environ()

    @contextlib.asynccontextmanager
    async def start(stopped) -> AsyncIterator[list[Process]]:
        workers = []
        try:
            with free_ports(num_workers) as ports:
                addresses = [f"127.0.0.1:{port}" for port in ports]
                for index, share in enumerate(shares):
                    environ = job | tf_config(addresses, index)
                    if not stopped.done():
                        workers.append(
                            await Process.start(index, command, environ, share)
                        )
                yield workers
        finally:
            for worker in workers:
                await worker.kill()

    return supervise(start, **options)


def divide(
    num_workers: int, environ: Mapping[str, str], device: str = "auto"
) -> list[Share]:
    """The share of each worker: GPUs, or cores where there is no GPU to train on.

    All get the same number, as sums round by the number of threads and workers that
    round otherwise are refused (`towers.run.peers`). Cores may be left over.

    Raises:
        ConfigError: the GPUs cannot be divided evenly.
    """
    if gpus := [] if device == "cpu" else _visible_gpus(environ):
        if len(gpus) % num_workers:
            raise ConfigError(
                f"num_workers={num_workers} with {len(gpus)} GPU(s): all workers get "
                f"the same number; take a divisor of {len(gpus)}, name other GPUs in "
                "CUDA_VISIBLE_DEVICES, or train with --device=cpu"
            )
        return [Share(gpus=",".join(part)) for part in _parts(gpus, num_workers)]
    hidden = "" if device == "cpu" else None  # else each worker takes memory of them
    cores = []
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_workers:
        return [Share(gpus=hidden)] * num_workers
    return [Share(hidden, tuple(part)) for part in _parts(cores, num_workers)]


def _parts(items, count):
    """`count` contiguous parts of the same length, as long as possible."""
    size = len(items) // count
    return [items[i * size : (i + 1) * size] for i in range(count)]


def _visible_gpus(environ):
    """The names of the GPUs that CUDA would use."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        count = len(list(DRIVER_GPUS.iterdir())) if DRIVER_GPUS.is_dir() else 0
        return [str(number) for number in range(count)]
    # As CUDA does: those before the first that is none, such as -1.
    is_gpu = re.compile(r"\d+|(GPU|MIG)-\S+").fullmatch
    return list(itertools.takewhile(is_gpu, map(str.strip, names.split(","))))


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """TCP ports that on Linux nobody else is given inside of the context.

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
