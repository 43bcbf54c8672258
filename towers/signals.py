"""The signals that stop a run; without imports that take time."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator

STOP_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),  # warnings of a time limit, as Slurm sends them
)
_STATUS = "/proc/self/status"
_EXIT_CODE = 75  # as of towers.errors.Preempted
_WRITE_SECS = 1.0  # a line waits this long for its reader


def catch(handler: Callable[..., None]) -> dict[int, Callable[..., None] | int | None]:
    """Set the handler of the stop signals, in the main thread; return former ones.

    A SIGHUP that is ignored, as with `nohup`, stays so, and so does a SIGUSR1 or
    SIGUSR2 that the calling program uses.
    """
    return {x: signal.signal(x, handler) for x in STOP_SIGNALS if not _is_used(x)}


def _is_used(number):
    """Return whether the calling program ignores a signal, or uses SIGUSR1 or 2."""
    former = signal.getsignal(number)
    if number in (signal.SIGTERM, signal.SIGINT):
        return False
    if former == signal.SIG_IGN or number == signal.SIGHUP:
        return former == signal.SIG_IGN
    if former != signal.SIG_DFL:
        return not (getattr(former, "__module__", None) or "").startswith("towers.")
    try:  # Python does not know handlers of C, such as those of `faulthandler.register`
        with open(_STATUS) as status:
            [caught] = (x.split()[1] for x in status if x.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        return False


def restore(handlers: dict[int, Callable[..., None] | int | None]) -> None:
    """Set the handlers that `catch` has returned."""
    for number, handler in handlers.items():
        # None stands for one that Python did not install and cannot restore.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def exit_on_signals(
    message: str = "nothing to save; the same command continues", stream: str = "stdout"
) -> None:
    """Let signals end the process with a message, until a watchdog takes over.

    The message goes to the current file of the stream.
    """
    try:
        descriptor = os.dup(getattr(sys, stream).fileno())
    except (AttributeError, OSError, ValueError):  # it is closed, or not a file
        descriptor = None

    def stop(number, frame):
        name = signal.Signals(number).name
        line = f"stopped by {name}, {message}\n"
        # The signal may have interrupted a print, which cannot be nested, and nobody
        # may be left to read the line.
        errors = AttributeError, OSError, RuntimeError, TypeError, ValueError
        with contextlib.suppress(*errors):
            sys.stdout.flush()
        with contextlib.suppress(*errors):
            if select.select([], [descriptor], [], _WRITE_SECS)[1]:
                os.write(descriptor, line.encode())
        os._exit(_EXIT_CODE)

    catch(stop)


@contextlib.contextmanager
def preemptible() -> Iterator[None]:
    """Let a signal unwind the code inside, then raise Preempted."""
    names = []

    def interrupt(number, frame):
        catch(signal.SIG_IGN)
        names.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    former = catch(interrupt)
    try:
        yield
    except BaseException:
        if not names:
            raise
    finally:
        restore(former)
    if names:
        from towers.errors import Preempted

        raise Preempted(f"stopped by {names[0]}, nothing is written; start it again")
