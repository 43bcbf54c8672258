"""A thread that calls one function after the other."""

import queue
import threading
from collections.abc import Callable


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
