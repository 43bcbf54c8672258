"""Workers that end together, and start anew where that may help."""

import asyncio
import itertools
import json
import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from towers.errors import JOB, ConfigError, Preempted, is_retryable
from towers.launch import output
from towers.launch.output import say
from towers.run import signals

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
    """The exit code that explains the end of all workers.

    A defect (70, or a code without a meaning) or a signal that killed a worker (128 +
    its number) comes before 2 to 6, these before 75, and that before 0. Among equals
    the first counts.

    Args:
        codes: of the workers, in the order in which they ended.
    """
    ranks = {0: 0, Preempted.exit_code: 1} | dict.fromkeys(range(2, 7), 2)
    return max(codes, key=lambda code: ranks.get(code, 3))


def signal_due(secs: float, grace_secs: float, is_saving: bool) -> int | None:
    """The signal for workers that run on so long after a failure or a stop: none yet,
    SIGTERM, or SIGKILL.

    Args:
        secs: since one failed, or all were asked to stop.
        grace_secs: they have so long to end by themselves, at most NOTICE_SECS, and so
            long again after SIGTERM.
        is_saving: whether one may be saving, for which there is SAVE_FACTOR times as
            long.
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
    """Runs workers until all have ended; call it in the main thread.

    A signal is passed on to all workers, once.

    Args:
        start: see `StartFn`.
        max_restarts: how often all workers are started anew where the cause may pass,
            see `towers.errors.is_retryable`, and no signal came.
        grace_secs: see `signal_due`.

    Returns:
        The exit code, see `worst`.

    Raises:
        ConfigError: grace_secs is negative or not finite; or of `start`.
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
        await output.finish(stopped.done)
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
