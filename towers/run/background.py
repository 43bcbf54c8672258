"""Jobs in the background, one at a time, such as writing a checkpoint."""

import queue
import threading
from collections.abc import Callable

# A run that ends because of an error waits so long for the last job.
_LATE_SECS = 60.0


class Background:
    """Runs jobs one after another in one thread; a context manager that waits for the
    last one.

    The thread is always the same one: glibc keeps freed memory per thread, such as the
    buffers of a save.

    The error of a job is raised once, by the next call of `submit`, `check` or `wait`.

    Args:
        say: takes a line for the user.
    """

    def __init__(self, say: Callable[[str], None] = print):
        self._say = say
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the previous job and starts this one, even if the previous one
        failed; its error is raised after that."""
        try:
            self.wait()
        finally:
            if self._thread is None:
                # A daemon: where a job never ends, the interpreter can still end.
                self._thread = threading.Thread(
                    target=self._run, name="background", daemon=True
                )
                self._thread.start()
            self._is_idle.clear()
            self._jobs.put(job)

    def check(self) -> None:
        """Raises the error of a finished job; does not wait."""
        if self._is_idle.is_set():
            self.wait()

    def wait(self) -> None:
        """Waits for the last job."""
        self._wait(None)

    def _wait(self, timeout):
        self._is_idle.wait(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self):
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._error = error
            del job  # and the state that it holds
            self._is_idle.set()

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        try:
            if error is None:
                self.wait()
            else:
                self._wait(_LATE_SECS)
        except Exception as late:
            if error is None:
                raise
            self._say(str(late))  # the run ends because of an error already
        finally:
            self._jobs.put(None)
