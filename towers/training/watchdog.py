"""Signals that stop a run, and steps that hang.

A compiled call returns to Python only when it is done. So the training loop runs in one
worker thread, which publishes its activity, while the main thread watches the signals
and the clock.
"""

import contextlib
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Container
from concurrent import futures
from typing import Any

from towers import console, signals
from towers.errors import Preempted, StuckError
from towers.parallel.loop import STARTING_ACTIVITIES
from towers.parallel.trainer import Trainer
from towers.threads import JobThread

# After a signal: time that an interruptible activity may go on, and time after which a
# step that computes is reported.
_GRACE_SECS = 1.0
_PATIENCE_SECS = 5.0

# Factor on the time limit while steps are compiled and GPUs connect.
_STARTING_FACTOR = 6

_TICK_SECS = 0.1  # the main thread inspects the worker this often

# Maximum time that counts between two ticks; the rest is a pause.
_LONGEST_TICK_SECS = 1.0

_local = threading.local()  # `worker` in a worker thread


class AwakeClock:
    """Seconds in which this process ran, if they are read often.

    A stop, as by Ctrl-Z or `docker pause`, counts as `_LONGEST_TICK_SECS`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._read_at, self._secs = clock(), 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        now = self._clock()
        self._secs += min(now - self._read_at, _LONGEST_TICK_SECS)
        self._read_at = now
        return self._secs


class Watchdog:
    """Calls functions in a worker thread, and watches signals and the clock.

    A context manager that catches the stop signals if it is entered in the main thread.

    Args:
        trainer: its progress is watched, and it is asked to stop.
        interruptible: the activities of `trainer.progress` that may be abandoned:
            nothing that a checkpoint needs is being written.
        stuck_after_secs: seconds without progress after which the worker is stuck, and
            _STARTING_FACTOR times as many while it compiles; 0 waits forever.
        clock: returns seconds; by default an `AwakeClock`.
        tick: gets the steps taken and the activity, ten times a second.
    """

    def __init__(
        self,
        trainer: Trainer,
        interruptible: Container[str] = (),
        *,
        stuck_after_secs: float = 0.0,
        clock: Callable[[], float] | None = None,
        tick: Callable[[int, str], None] = lambda step, activity: None,
    ):
        self._trainer, self._tick = trainer, tick
        self._interruptible = interruptible
        self._stuck_after_secs = stuck_after_secs
        self._clock = AwakeClock() if clock is None else clock
        self._handlers: dict[int, Any] = {}
        self._threads: list[JobThread] = []
        self.stopped_by: str | None = None  # a signal
        self.progress_at = time.time()

    @property
    def stop_requested(self) -> bool:
        """Return whether a signal was caught."""
        return self.stopped_by is not None

    def __enter__(self) -> "Watchdog":
        if threading.current_thread() is threading.main_thread():
            self._handlers = signals.catch(self._on_signal)
        # The second one saves if the first was abandoned, also with no memory left.
        self._threads = [JobThread("worker"), JobThread("worker")]
        return self

    def __exit__(self, *error: object) -> None:
        signals.restore(self._handlers)
        self._threads.clear()

    def _on_signal(self, number, frame):
        self.stopped_by = signal.Signals(number).name

    # Called by the worker.

    def training(self) -> contextlib.AbstractContextManager:
        """Let the trainer publish its steps and activities inside."""
        return _local.worker.doing(None)

    def saving(self) -> contextlib.AbstractContextManager:
        """Read the state inside, or wait for its checkpoint; uninterruptible."""
        return _local.worker.doing("saving", uninterruptible=True)

    def activity(self, name: str) -> contextlib.AbstractContextManager:
        """Name an activity that may be abandoned; yield a call for its progress."""
        return _local.worker.doing(name)

    # Called by the main thread.

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a worker thread; return its result, or raise its error.

        After a signal the trainer is asked to stop; a step that computes, a save, and
        what is outside of activities are finished first.

        Raises:
            Preempted: the function was abandoned in an activity.
            StuckError: it made no progress for `stuck_after_secs`.
        """
        thread = self._threads.pop() if self._threads else JobThread("worker")
        worker = _Worker()
        thread.submit(setattr, _local, "worker", worker)
        future = thread.submit(function, *args)
        try:
            self._watch(worker, future)
        except BaseException:
            worker.abandon()
            thread.end()
            raise
        self._threads.append(thread)
        return future.result()

    def _watch(self, worker, future):
        before, since = None, self._clock()
        stop_asked, is_patient = None, True
        while not futures.wait([future], _TICK_SECS).done:
            now = self._clock()
            if self.stop_requested and stop_asked is None:
                self._trainer.request_stop()
                stop_asked = now
            stopping_secs = 0.0 if stop_asked is None else now - stop_asked
            with worker.lock:  # so that the worker cannot leave its activity
                steps, work, activity, may_abandon = self._work_of(worker)
                if (steps, worker.beats) != before:
                    before, since = (steps, worker.beats), now
                    self.progress_at = time.time()
                if may_abandon and stopping_secs > _GRACE_SECS:
                    worker.abandon()
                    raise Preempted(f"stopped by {self.stopped_by} while {activity}")
                factor = _STARTING_FACTOR if activity in STARTING_ACTIVITIES else 1
                limit = factor * self._stuck_after_secs
                if limit and now - since > limit:
                    worker.abandon()
                    faulthandler.dump_traceback(sys.__stderr__ or 2)
                    times = f"{factor} x " if factor > 1 else ""
                    at = f", while {activity}" if work != activity else ""
                    raise StuckError(
                        f"{work} was not finished within {times}"
                        f"{self._stuck_after_secs:g} s (--stuck_after_secs){at}"
                    )
            self._tick(steps, activity)
            if is_patient and stopping_secs > _PATIENCE_SECS:
                console.line(f"{self.stopped_by}: {work} is finished first")
                is_patient = False

    def _work_of(self, worker):
        """Return steps taken, unfinished work, activity, and if it may be left."""
        steps, activity = self._trainer.progress()
        if not worker.is_busy:
            work = f"the report after step {steps}" if steps else "the preparation"
            return steps, work, work, False
        if worker.uninterruptible:
            return steps, worker.activity, worker.activity, False
        may_abandon = worker.activity is not None or activity in self._interruptible
        return steps, f"step {steps + 1}", worker.activity or activity, may_abandon


class _Abandoned(BaseException):
    """Ends a worker that was abandoned: it must not touch the run any more."""


class _Worker:
    """The activities of a function that a worker thread calls.

    Once abandoned it raises `_Abandoned` when it enters or leaves an activity, for
    which both threads take `lock`, or reports progress.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.is_busy = self.uninterruptible = False
        self.activity: str | None = None  # the trainer's own
        self.beats = 0
        self._is_abandoned = False

    @contextlib.contextmanager
    def doing(self, activity: str | None, uninterruptible: bool = False):
        with self.lock:
            self.heartbeat()
            self.activity, self.uninterruptible = activity, uninterruptible
            self.is_busy = True
        try:
            yield self.heartbeat
        finally:
            with self.lock:
                self.is_busy = False
                self.heartbeat()

    def heartbeat(self) -> None:
        with self.lock:
            if self._is_abandoned:
                raise _Abandoned
            self.beats += 1

    def abandon(self) -> None:
        with self.lock:
            self._is_abandoned = True
