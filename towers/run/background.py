"""One job at a time, off the critical path, in a thread of its own."""

import threading
from collections.abc import Callable

# How long a run that ends for another reason waits for the last job.
_LATE_SECS = 60.0


class Background:
    """Runs jobs one after another while its owner goes on; a context manager that waits
    for the last one.

    What a job raises is raised once, by the next call of `submit`, `check` or `wait`.

    Args:
        say: takes a line for the user.
    """

    def __init__(self, say: Callable[[str], None] = print):
        self._say = say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the job before this one and begins this one, even where the one
        before failed: what it raised comes after that."""
        try:
            self.wait()
        finally:
            # A daemon: where a job never ends, the interpreter still can.
            self._thread = threading.Thread(
                target=self._run, args=[job], name="background", daemon=True
            )
            self._thread.start()

    def check(self) -> None:
        """Raises what a finished job raised; waits for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits for the last job."""
        self._join(None)

    def _join(self, timeout):
        if self._thread is not None:
            self._thread.join(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job):
        try:
            job()
        except BaseException as error:
            self._error = error

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        if error is None:
            self.wait()
            return
        try:
            self._join(_LATE_SECS)
        except Exception as late:
            self._say(str(late))  # the run ends for another reason already
