"""The parts of the machine that the workers get: GPUs, CPU cores and ports."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import socket
import sys
from collections.abc import Iterator, Mapping

from towers.errors import ConfigError

DRIVER_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")


@dataclasses.dataclass(frozen=True)
class Share:
    """A worker's part of the machine.

    Attributes:
        gpus: its CUDA_VISIBLE_DEVICES; None leaves the variable as it is.
        cores: numbers of the CPU cores that it may use; empty for all.
    """

    gpus: str | None = None
    cores: tuple[int, ...] = ()


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
    """Free TCP ports, held as by `held_port`."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bound(0)) for _ in range(count)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            _leave_to_server(each)
        yield ports


@contextlib.contextmanager
def held_port(port: int) -> Iterator[None]:
    """On Linux nobody else is given this TCP port inside of the context.

    There it stays bound, without listening, in a way that leaves it to a server that
    sets SO_REUSEADDR, as those of TensorFlow do.

    Raises:
        OSError: somebody else has it.
    """
    with _bound(port) as held:
        _leave_to_server(held)
        yield


def _bound(port):
    bound = socket.socket()
    try:
        bound.bind(("", port))  # a server of TensorFlow listens on all addresses
    except OSError:
        bound.close()
        raise
    return bound


def _leave_to_server(bound):
    if sys.platform == "linux":
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        bound.close()
