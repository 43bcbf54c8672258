"""Signals that stop a run, and steps that do not end.

A compiled call does not return to Python before it is done, so it runs in a thread of
its own while the main thread watches: it sees signals at once and knows how long the
last step took.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Container
from typing import Any

from towers.errors import Preempted, StuckError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# After a signal: how long a call that is not computing may go on, and after how long a
# step that does compute is worth a line.
_GRACE_SECS = 1.0
_PATIENCE_SECS = 5.0


def exit_on_signals() -> None:
    """A signal ends the process; there is nothing to save before a watchdog is on."""

    def stop(number, frame):
        name = signal.Signals(number).name
        line = f"stopped by {name}, nothing to save; the same command continues\n"
        # The signal may have cut into a print, which does not bear a second one, and
        # nobody may be left to read the line.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stdout.fileno(), line.encode())
        os._exit(Preempted.exit_code)

    for number in _SIGNALS:
        signal.signal(number, stop)


class Watchdog:
    """Runs calls under watch; a context manager that catches the stop signals.

    Args:
        stuck_after_secs: seconds without a finished step after which a call is stuck; 0
            waits for ever.
        say: takes a line for the user.
        clock: seconds, as `time.monotonic`.
    """

    def __init__(
        self,
        *,
        stuck_after_secs: float = 0.0,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stuck_after_secs = stuck_after_secs
        self._say = say
        self._clock = clock
        self._handlers = {}
        self.stopped_by: str | None = None

    def __enter__(self) -> "Watchdog":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number, frame):
        self.stopped_by = signal.Signals(number).name

    def run(
        self,
        call: Callable[[], Any],
        *,
        progress: Callable[[], tuple[int, str]],
        interruptible: Container[str],
        request_stop: Callable[[], None] = lambda: None,
    ) -> Any:
        """Runs `call` in a thread and returns its result or raises its error.

        Args:
            call: what to run.
            progress: (steps done, phase), readable while the call runs.
            interruptible: the phases in which the call may be left behind: nothing that
                a save needs is being written.
            request_stop: asks the call to return after the step in hand.

        Raises:
            Preempted: a signal came, and the call was left behind in a phase that may
                be. Where the call returned in time its result comes back as usual, and
                `stopped_by` says which signal it was.
            StuckError: no step was finished for `stuck_after_secs`.
        """
        outcome = {}

        def work():
            try:
                outcome["result"] = call()
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=work, name="step", daemon=True)
        thread.start()
        before, since = None, self._clock()
        stop_asked, patient = None, True
        while thread.is_alive():
            thread.join(0.1)
            now = self._clock()
            steps, phase = progress()
            if steps != before:
                before, since = steps, now
            if self.stopped_by and thread.is_alive():
                if stop_asked is None:
                    request_stop()
                    stop_asked = now
                elif phase in interruptible and now - stop_asked > _GRACE_SECS:
                    raise Preempted(f"stopped by {self.stopped_by} while {phase}")
                elif patient and now - stop_asked > _PATIENCE_SECS:
                    self._say(f"{self.stopped_by}: step {steps + 1} is finished first")
                    patient = False
            if self._stuck_after_secs and now - since > self._stuck_after_secs:
                faulthandler.dump_traceback(all_threads=True)
                raise StuckError(
                    f"step {steps + 1} was not finished within "
                    f"{self._stuck_after_secs:g} s (--stuck_after_secs), while {phase}"
                )
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]
