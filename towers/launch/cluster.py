"""Workers that start and end together."""

import contextlib
import itertools
import json
import math
import os
import select
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from towers.errors import ConfigError, Preempted
from towers.launch import output
from towers.launch.machine import Share, divide, free_ports
from towers.launch.output import say
from towers.launch.worker import Worker
from towers.run import signals
from towers.run.folder import JOB

# After the failure of a worker its heartbeats end the others. SIGTERM then ends those
# that still wait for it to start; a save is finished first.
NOTICE_SECS = 15.0
GRACE_SECS = 60.0  # from SIGTERM to SIGKILL

# After a stop the others end at once, while the chief may save for so many times as
# long; its own limit is --stuck_after_secs.
SAVE_FACTOR = 10

# A restart does not help against options, data, a checkpoint or numbers, see
# `towers.errors`. It may against all else, also against a defect: a fault of a GPU or
# of its driver ends as one, and so does an unknown error of the network.
LASTING = (2, 3, 4, 5)
FORESEEN = (*LASTING, 6)

# Between two polls for workers that have ended: usually, and while one that has closed
# its streams is about to end.
_TICK_SECS = 0.1
_SHORT_TICK_SECS = 0.01


def worst(codes: Sequence[int]) -> int:
    """The exit code that explains the end of all workers.

    A defect (70, or a code without a meaning) or a signal that killed a worker (128 +
    its number) comes before 2 to 6, these before 75, and that before 0. Among equals
    the first counts.

    Args:
        codes: of the workers, in the order in which they ended.
    """
    ranks = {0: 0, Preempted.exit_code: 1} | dict.fromkeys(FORESEEN, 2)
    return max(codes, key=lambda code: ranks.get(code, 3))


class Escalation:
    """The signals to workers that run on after another one has failed, or after a stop.

    Args:
        grace_secs: they have so long to end by themselves, at most NOTICE_SECS, and so
            long again after SIGTERM, before they are killed; SAVE_FACTOR times as long
            after a stop of all, as one may be saving.
        clock: seconds, which only grow.
    """

    def __init__(self, grace_secs: float, clock: Callable[[], float] = time.monotonic):
        self._signals = [
            (signal.SIGTERM, min(NOTICE_SECS, grace_secs)),
            (signal.SIGKILL, grace_secs),
        ]
        self._clock, self._since = clock, None

    def due(self, code: int, is_stop: bool) -> signal.Signals | None:
        """The next signal, when it is time; the first call says that one has failed, or
        that all are to end.

        Args:
            code: the worst exit code so far, see `worst`.
            is_stop: whether a signal has asked all workers to end.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        if not self._signals:
            return None
        number, secs = self._signals[0]
        stopped = is_stop and code in (0, Preempted.exit_code)
        if number == signal.SIGKILL and stopped:
            secs *= SAVE_FACTOR
        if now - self._since < secs:
            return None
        self._since = now
        self._signals.pop(0)
        return number


class Cluster:
    """Workers that start and end together.

    Args:
        command: of each worker.
        shares: one per worker.
        grace_secs: when one has ended with an error, see `Escalation`.

    Attributes:
        stopped_by: the signal to the launcher that was passed on, or None.
    """

    def __init__(
        self, command: Sequence[str], shares: Sequence[Share], grace_secs: float
    ):
        self._command, self._shares = command, shares
        self._grace_secs = grace_secs
        self._job = str(uuid.uuid4())
        self._workers: list[Worker] = []
        self.stopped_by: int | None = None

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Passes the stop signals on to the workers; for the main thread."""
        before = signals.catch(self._on_signal)
        try:
            yield
        finally:
            signals.restore(before)

    def _on_signal(self, number, frame):
        if self.stopped_by is None:
            self.stopped_by = number
            for worker in self._workers:
                worker.send(number)

    def run(self) -> list[Worker]:
        """Starts the workers; returns them in the order in which they ended."""
        self._workers = []
        try:
            with free_ports(len(self._shares)) as ports:
                self._start(ports)
                return self._wait()
        finally:
            for worker in self._workers:
                worker.kill()

    def _start(self, ports):
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        for index, share in enumerate(self._shares):
            if self.stopped_by is not None:
                break
            task = {"type": "worker", "index": index}
            environ = {"PYTHONUNBUFFERED": "1", JOB: self._job} | os.environ
            environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
            self._workers.append(Worker(index, self._command, environ, share))
        if self.stopped_by is not None:  # the last one may have missed it
            for worker in self._workers:
                worker.send(self.stopped_by)

    def _wait(self):
        ended, escalation = [], Escalation(self._grace_secs)
        while running := [worker for worker in self._workers if worker not in ended]:
            streams = [worker.open_streams() for worker in running]
            tick_secs = _TICK_SECS if all(streams) else _SHORT_TICK_SECS
            for stream in select.select(sum(streams, []), [], [], tick_secs)[0]:
                stream.copy()
            ended += [worker for worker in running if worker.has_ended()]
            failed = [worker for worker in ended if worker.code]
            late = [worker for worker in running if worker not in ended]
            code = worst([0, *(worker.code for worker in failed)])
            is_stop = self.stopped_by is not None
            if not late or not (failed or is_stop):
                continue
            if number := escalation.due(code, is_stop):
                sent = [str(worker.index) for worker in late if worker.send(number)]
                if sent:
                    why = failed[0] if failed else "stopped"
                    say(f"{why}; {number.name} to {', '.join(sent)}, still running")
        return ended


def launch(
    command: Sequence[str],
    num_workers: int,
    *,
    max_restarts: int = 0,
    grace_secs: float = GRACE_SECS,
    device: str = "auto",
) -> int:
    """Runs a command as every worker of a cluster; call it in the main thread.

    Args:
        command: a program and its arguments.
        num_workers: number of processes.
        max_restarts: how often all workers are started anew where the cause may pass:
            no worker ended with 2, 3, 4 or 5, and no signal came to the launcher.
        grace_secs: see `Cluster`.
        device: "cpu" hides the GPUs from the workers.

    Returns:
        The exit code, see `worst`.

    Raises:
        ConfigError: the machine cannot be divided, or a worker cannot be started; or
            grace_secs is negative or not finite.
    """
    if not 0 <= grace_secs < math.inf:
        raise ConfigError(f"grace_secs={grace_secs:g}: must be finite and at least 0")
    cluster = Cluster(command, divide(num_workers, os.environ, device), grace_secs)
    with cluster.catching_signals():
        for restart in itertools.count(1):
            ended = cluster.run()
            codes = [worker.code for worker in ended] or [Preempted.exit_code]
            code = worst(codes)
            if not code:
                break
            cause = "stopped by a signal before the workers were started"
            if ended:
                cause = str(ended[codes.index(code)])
            may_pass = not set(codes) & set(LASTING) and cluster.stopped_by is None
            if not may_pass or restart > max_restarts:
                say(cause)
                break
            say(f"{cause}; restart {restart} of {max_restarts}: all workers start anew")
        output.finish(lambda: cluster.stopped_by is not None)
    return code
