"""Workers that another launcher starts, on several machines, and that end together."""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from towers.errors import ConfigError, WorkerLostError
from towers.launch.cluster import GRACE_SECS, LASTING, Escalation, worst
from towers.launch.machine import Share, held_port
from towers.launch.worker import Worker
from towers.run.folder import JOB

_TICK_SECS = 1.0  # between two polls of the `Outcomes`


class Outcomes:
    """Exit codes and descriptions of all workers; an actor of Ray."""

    def __init__(self):
        self._cluster, self._num_begun, self._stops = "", 0, False
        self._outcomes: list[tuple[int, str]] = []

    def begin(self, cluster: str) -> None:
        """A worker begins; after a restart its cluster has other ports."""
        if cluster != self._cluster:
            self._cluster, self._num_begun, self._outcomes = cluster, 0, []
        self._num_begun += 1

    def end(self, code: int, description: str) -> None:
        """A worker has ended, or cannot start."""
        self._outcomes.append((code, description))

    def stop(self) -> bool:
        """Stops all workers; False where none is running.

        Where Ray has killed workers, which then report nothing, it stays True.
        """
        self._stops = True
        return self._num_begun > len(self._outcomes)

    def get(self) -> tuple[list[tuple[int, str]], bool]:
        """The outcomes, in the order of the ends, and whether all are to stop."""
        return self._outcomes, self._stops


def cause_of(outcomes: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """The one of them that explains all, see `worst`; 0 where there is none."""
    codes = [code for code, _ in outcomes]
    return outcomes[codes.index(worst(codes))] if outcomes else (0, "")


def run_worker(
    command: Sequence[str],
    folder: str,
    share: Share,
    num_workers: int,
    ask: Callable[..., Any],
    job: str,
    grace_secs: float = GRACE_SECS,
) -> None:
    """Runs a command as one of the workers, and waits for the end of all.

    Args:
        command: a program and its arguments.
        folder: where it runs.
        share: the GPUs that it sees.
        num_workers: of the cluster.
        ask: calls a method of the `Outcomes`, by its name.
        job: a name that all workers and restarts share.
        grace_secs: after the failure of another worker, see `Escalation`.

    Raises:
        WorkerLostError: all workers are to be started anew.
    """
    environ = {"PYTHONUNBUFFERED": "1", JOB: job} | os.environ
    environ.pop("TF_USE_LEGACY_KERAS", None)  # set by Ray
    place = json.loads(environ["TF_CONFIG"])
    index = place["task"]["index"]
    ask("begin", json.dumps(place["cluster"]))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_holding_port(place["cluster"]["worker"][index]))
            os.chdir(folder)
            worker = Worker(index, command, environ, share)
        except (OSError, ConfigError, WorkerLostError) as error:
            code = getattr(error, "exit_code", ConfigError.exit_code)
            ask("end", code, f"worker {index} cannot start: {error}")
        else:
            try:
                _wait(worker, ask, Escalation(grace_secs))
            finally:
                worker.kill()
            ask("end", worker.code, str(worker))
    while len(ask("get")[0]) < num_workers:
        time.sleep(_TICK_SECS)
    outcomes, stops = ask("get")
    code, description = cause_of(outcomes)
    if code and not stops and not {code for code, _ in outcomes} & set(LASTING):
        raise WorkerLostError(f"{description}; all start anew if a restart is left")


@contextlib.contextmanager
def _holding_port(address: str) -> Iterator[None]:
    """Holds the port that Ray has found free, seconds before the worker listens.

    Raises:
        WorkerLostError: somebody has taken it; after a restart it is another one.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held_port(int(address.rpartition(":")[2])))
        except OSError as error:
            raise WorkerLostError(f"{address}: {error.strerror}") from None
        yield


def _wait(worker, ask, escalation):
    """Prints the lines of a worker until it has ended, and ends it if need be."""
    poll_at = 0.0
    while not worker.has_ended():
        for stream in select.select(worker.open_streams(), [], [], 0.05)[0]:
            stream.copy()
        if time.monotonic() < poll_at:
            continue
        poll_at = time.monotonic() + _TICK_SECS
        outcomes, stops = ask("get")
        if stops:  # Ray blocks SIGINT
            worker.send(signal.SIGTERM)
        code, _ = cause_of(outcomes)
        if (code or stops) and (number := escalation.due(code, stops)):
            worker.send(number)
