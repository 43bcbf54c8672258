"""Jobs in the background, one at a time, such as writing a checkpoint."""

import threading
from collections.abc import Callable

# A run that ends because of an error waits so long for the last job.
_LATE_SECS = 60.0


class Background:
    """Runs jobs one after another in a thread of their own; a context manager that
    waits for the last one.

    The error of a job is raised once, by the next call of `submit`, `check` or `wait`.

    Args:
        say: takes a line for the user.
    """

    def __init__(self, say: Callable[[str], None] = print):
        self._say = say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the previous job and starts this one, even if the previous one
        failed; its error is raised after that."""
        try:
            self.wait()
        finally:
            # A daemon: where a job never ends, the interpreter can still end.
            self._thread = threading.Thread(
                target=self._run, args=[job], name="background", daemon=True
            )
            self._thread.start()

    def check(self) -> None:
        """Raises the error of a finished job; does not wait."""
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
            self._say(str(late))  # the run ends because of an error already
