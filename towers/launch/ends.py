"""Workers that another launcher starts, on several machines, and that end together."""

import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from towers.errors import ConfigError, WorkerLostError
from towers.launch.cluster import GRACE_SECS, LASTING, worst
from towers.launch.machine import Share
from towers.launch.worker import Worker

_TICK_SECS = 1.0  # between two looks at the `Ends`


class Ends:
    """How the workers have ended: exit codes and descriptions. One object for
    all of them, on one of the machines."""

    def __init__(self):
        self._cluster, self._num_begun, self._stops = "", 0, False
        self._ends: list[tuple[int, str]] = []

    def begin(self, cluster: str) -> None:
        """A worker begins; after a restart its cluster has other ports."""
        if cluster != self._cluster:
            self._cluster, self._num_begun, self._ends = cluster, 0, []
        self._num_begun += 1

    def end(self, code: int, description: str) -> None:
        """A worker has ended, or cannot start."""
        self._ends.append((code, description))

    def stop(self) -> bool:
        """Stops all workers; False where none is running."""
        self._stops = True
        return self._num_begun > len(self._ends)

    def get(self) -> tuple[list[tuple[int, str]], bool]:
        """The ends in their order, and whether all workers are to stop."""
        return self._ends, self._stops


def cause_of(ends: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """The one of them that explains all, see `worst`; 0 where there is none."""
    codes = [code for code, _ in ends]
    return ends[codes.index(worst(codes))] if ends else (0, "")


def run_worker(
    command: Sequence[str],
    folder: str,
    share: Share,
    num_workers: int,
    ask: Callable[..., Any],
    grace_secs: float = GRACE_SECS,
) -> None:
    """Runs a command as one of the workers, and waits for the end of all.

    Args:
        command: a program and its arguments.
        folder: where it runs.
        share: the GPUs that it sees.
        num_workers: of the cluster.
        ask: calls a method of the `Ends`, by its name.
        grace_secs: so long after the failure of another worker it is killed.

    Raises:
        WorkerLostError: all workers are to be started anew.
    """
    environ = {"PYTHONUNBUFFERED": "1"} | os.environ
    environ.pop("TF_USE_LEGACY_KERAS", None)  # set by Ray
    place = json.loads(environ["TF_CONFIG"])
    index = place["task"]["index"]
    ask("begin", json.dumps(place["cluster"]))
    try:
        os.chdir(folder)
        worker = Worker(index, command, environ, share)
    except (OSError, ConfigError) as error:
        ask("end", ConfigError.exit_code, f"worker {index} cannot start: {error}")
    else:
        try:
            _wait(worker, ask, grace_secs)
        finally:
            worker.kill()
        ask("end", worker.code, str(worker))
    while len(ask("get")[0]) < num_workers:
        time.sleep(_TICK_SECS)
    ends, stops = ask("get")
    code, description = cause_of(ends)
    if code and not stops and not {code for code, _ in ends} & set(LASTING):
        raise WorkerLostError(f"{description}; all start anew if a restart is left")


def _wait(worker, ask, grace_secs):
    """Prints the lines of a worker until it has ended, and ends it if need be."""
    look_at, kill_at = 0.0, None
    while not worker.has_ended():
        for stream in select.select(worker.open_streams(), [], [], 0.05)[0]:
            stream.copy()
        if time.monotonic() < look_at:
            continue
        look_at = time.monotonic() + _TICK_SECS
        ends, stops = ask("get")
        if stops:  # Ray blocks SIGINT
            worker.send(signal.SIGTERM)
        if kill_at is None and cause_of(ends)[0]:
            kill_at = time.monotonic() + grace_secs
        if kill_at is not None and time.monotonic() > kill_at:
            worker.send(signal.SIGKILL)
