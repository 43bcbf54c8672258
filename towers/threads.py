"""Numbers of cores and GPUs; threads that do jobs one after another."""

import os
import pathlib
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

from towers import console

_LATE_SECS = 60.0  # time for the last job of a run that ends with an error

# Folder of NVIDIA's driver with an entry for each GPU.
DRIVER_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_driver_gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver sees."""
    return len(list(DRIVER_GPUS.iterdir())) if DRIVER_GPUS.is_dir() else 0


class JobThread:
    """A thread that calls one function after the other.

    It starts at once, as with no memory left `threading.Thread.start` waits forever.
    It is a daemon, unlike the threads of a `ThreadPoolExecutor`, so that the
    interpreter can end even if a job does not.
    """

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        threading.Thread(
            target=_work, args=[self._jobs], name=name, daemon=True
        ).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> futures.Future:
        """Call a function after those before."""
        future: futures.Future = futures.Future()
        self._jobs.put((future, function, args))
        return future

    def end(self) -> None:
        """End the thread after its last job."""
        self._jobs.put(None)

    __del__ = end


def _work(jobs):
    while (job := jobs.get()) is not None:
        future, function, args = job
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del job, future, function, args  # and the state that they hold


class Background:
    """Jobs one after another in a thread; a context manager that waits for the last.

    The error of a job is raised once, by the next call of any method.
    """

    def __init__(self) -> None:
        self._thread = JobThread("background")
        self._job: futures.Future | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Start a job after the previous one, whose error is raised after that."""
        try:
            self.wait()
        finally:
            self._job = self._thread.submit(job)

    def raise_job_error(self) -> None:
        """Raise the error of a finished job, without waiting."""
        self.wait(0.0)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Wait for the last job."""
        job = self._job
        if job is not None and futures.wait([job], timeout_secs).done:
            self._job = None
            job.result()

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        try:
            self.wait(None if error is None else _LATE_SECS)
        except Exception as late:
            if error is None:
                raise
            console.line(str(late))  # the run ends because of an error already
        finally:
            self._thread.end()
