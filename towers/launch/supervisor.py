"""Workers that end together, and start anew where that may help; on this machine, each
with a part of its GPUs, cores and ports.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from towers.errors import JOB, ConfigError, Preempted, is_retryable
from towers.launch.process import Process, Share, finish, say
from towers.run import signals
from towers.threads import num_driver_gpus

# After the failure of a worker its heartbeats end the others. SIGTERM then ends those
# that still wait for it to start; a save is finished first.
NOTICE_SECS = 15.0
GRACE_SECS = 60.0  # from SIGTERM to SIGKILL

# After a stop the others end at once, while the chief may save for this many times as
# long; its own limit is --stuck_after_secs.
SAVE_FACTOR = 10

_TICK_SECS = 0.1  # between two readings of the clock

# Starts all workers when it is entered, or none where its argument is done, which then
# is the number of a signal; ends those left at its exit. A worker has the attributes
# `index`, `ended` and `code`, the method `send` and the text of a `Process`.
StartFn = Callable[[asyncio.Future], AbstractAsyncContextManager[Sequence]]


def worst(codes: Sequence[int]) -> int:
    """The exit code that explains the end of all workers, in their order.

    A defect (70, or a code without a meaning) or a signal that killed a worker (128 +
    its number) comes before 2 to 6, these before 75, and that before 0. Among equals
    the first counts.
    """
    ranks = {0: 0, Preempted.exit_code: 1} | dict.fromkeys(range(2, 7), 2)
    return max(codes, key=lambda code: ranks.get(code, 3))


def signal_due(secs: float, grace_secs: float, is_saving: bool) -> int | None:
    """The signal for workers that run on for some time after a failure or a stop: none
    yet, SIGTERM, or SIGKILL. They have `grace_secs` to end by themselves, at most
    NOTICE_SECS, and again after SIGTERM, SAVE_FACTOR times as long if one may save.
    """
    notice_secs = min(NOTICE_SECS, grace_secs)
    if secs < notice_secs:
        return None
    most_secs = grace_secs * (SAVE_FACTOR if is_saving else 1)
    return signal.SIGTERM if secs < notice_secs + most_secs else signal.SIGKILL


def job_environ() -> dict[str, str]:
    """Environment variables shared by all workers and restarts of a job."""
    own = {"PYTHONUNBUFFERED": "1", JOB: str(uuid.uuid4())}
    return {name: os.environ.get(name, value) for name, value in own.items()}


def tf_config(addresses: Sequence[str], index: int) -> dict[str, str]:
    """TF_CONFIG of a worker, which has host:port of all of them."""
    task = {"type": "worker", "index": index}
    place = {"cluster": {"worker": list(addresses)}, "task": task}
    return {"TF_CONFIG": json.dumps(place)}


def supervise(
    start: StartFn, *, max_restarts: int = 0, grace_secs: float = GRACE_SECS
) -> int:
    """Runs workers until all have ended, in the main thread; returns the exit code, see
    `worst`. A signal is passed on to all workers, once. Without one, all are started
    anew where the cause may pass, see `is_retryable`.
    """
    if not 0 <= grace_secs < math.inf:
        raise ConfigError(f"grace_secs={grace_secs:g}: must be finite and at least 0")
    return asyncio.run(_supervise(start, max_restarts, grace_secs))


async def _supervise(start, max_restarts, grace_secs):
    loop = asyncio.get_running_loop()
    stopped = loop.create_future()

    def stop(number):
        if not stopped.done():
            stopped.set_result(number)

    former = signals.catch(lambda number, _: loop.call_soon_threadsafe(stop, number))
    try:
        for restart in itertools.count(1):
            async with start(stopped) as workers:
                ended = await _until_ended(workers, stopped, grace_secs)
            codes = [worker.code for worker in ended] or [Preempted.exit_code]
            code = worst(codes)
            if not code:
                break
            cause = "stopped by a signal before the workers were started"
            if ended:
                cause = str(ended[codes.index(code)])
            may_help = (
                all(map(is_retryable, filter(None, codes))) and not stopped.done()
            )
            if not may_help or restart > max_restarts:
                say(cause)
                break
            say(f"{cause}; restart {restart} of {max_restarts}: all workers start anew")
        await finish(stopped.done)
    finally:
        signals.restore(former)
    return code


async def _until_ended(workers, stopped, grace_secs):
    """The workers in the order of their ends; it ends those that run on."""
    running, ended, since = {worker.ended: worker for worker in workers}, [], None
    while running:
        await asyncio.wait(
            [*running] if stopped.done() else [*running, stopped],
            timeout=_TICK_SECS,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in [task for task in running if task.done()]:
            task.result()
            ended.append(running.pop(task))
        if stopped.done():
            for worker in running.values():
                worker.send(stopped.result())
        failed = [worker for worker in ended if worker.code]
        if not running or not (failed or stopped.done()):
            continue
        since = since or time.monotonic()
        is_saving = stopped.done() and all(
            worker.code == Preempted.exit_code for worker in failed
        )
        number = signal_due(time.monotonic() - since, grace_secs, is_saving)
        sent = [str(x.index) for x in running.values() if number and x.send(number)]
        if sent:
            why = failed[0] if failed else "stopped"
            name = signal.Signals(number).name
            say(f"{why}; {name} to {', '.join(sent)}, still running")
    return ended


# On this machine.


def launch(
    command: Sequence[str], num_workers: int, *, device: str = "auto", **options
) -> int:
    """Runs a command as every worker of a cluster, in the main thread; returns the exit
    code, see `worst`. `device="cpu"` hides the GPUs; the other options are of
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
        return list(map(str, range(num_driver_gpus())))
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
