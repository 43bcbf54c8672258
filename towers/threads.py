"""Threads that do jobs one after another, such as writing a checkpoint."""

import functools
import queue
import threading
from collections.abc import Callable

from towers import console

# A run that ends because of an error waits so long for the last job.
_LATE_SECS = 60.0


class JobThread:
    """A thread that calls one function after the other.

    It starts at once: with no memory left, `threading.Thread.start` waits forever for a
    thread that cannot begin. And glibc keeps freed memory for each thread, such as the
    buffers of a save.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: where a job never ends, the interpreter can still end.
        threading.Thread(
            target=_work, args=[self._jobs], name=name, daemon=True
        ).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Calls a function, which raises no error, after those before."""
        self._jobs.put(job)

    def end(self) -> None:
        """Ends the thread after its last job, as does the end of this object."""
        self._jobs.put(None)

    __del__ = end


def _work(jobs):
    while (job := jobs.get()) is not None:
        job()
        del job  # and the state that it holds


class Background:
    """Runs jobs one after another in one thread; a context manager that waits for the
    last one.

    The error of a job is raised once, by the next call of `submit`, `raise_job_error`
    or `wait`.
    """

    def __init__(self):
        self._thread = JobThread("background")
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the previous job and starts this one, even if the previous one
        failed; its error is raised after that."""
        try:
            self.wait()
        finally:
            self._is_idle.clear()
            self._thread.submit(functools.partial(self._do, job))

    def raise_job_error(self) -> None:
        """Raises the error of a finished job; does not wait."""
        if self._is_idle.is_set():
            self.wait()

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits for the last job."""
        self._is_idle.wait(timeout_secs)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _do(self, job):
        try:
            job()
        except BaseException as error:
            self._error = error
        finally:
            self._is_idle.set()

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
