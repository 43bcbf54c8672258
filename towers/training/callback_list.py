"""The callbacks of a run, called together."""

import functools
from collections.abc import Sequence
from typing import Any

from towers import console
from towers.callbacks import Callback, Tracker
from towers.messages import one_line
from towers.training.outputs import Outputs


class CallbackError(BaseException):
    """Carries an error of a user's callback past the handlers of the run's own."""

    def __init__(self, error: BaseException):
        super().__init__(error)
        self.error = error


class CallbackList:
    """The callbacks of the user; `is_calling` is True while one is called."""

    def __init__(self, callbacks: Sequence[Callback], outputs: Outputs):
        self._callbacks, self._outputs = callbacks, outputs
        self.is_calling = False

    def call(self, method: str, *args: Any) -> None:
        """Call a method of all callbacks; their errors are CallbackErrors."""
        self.is_calling = True
        try:
            for callback in self._callbacks:
                bound = functools.partial(getattr(callback, method), *args)
                if isinstance(callback, Tracker) and method != "on_start":
                    name = f"{type(callback).__name__}.{method}"
                    self._outputs.reports.attempt(name, bound, Exception)
                else:
                    bound()
        except BaseException as error:
            raise CallbackError(error) from error
        finally:
            self.is_calling = False

    def notify_checkpoints(self) -> None:
        """Call `on_checkpoint` for the checkpoints that were committed."""
        while committed := self._outputs.committed:
            self.call("on_checkpoint", *committed.pop(0))

    def end(self, step: int) -> None:
        """Call `on_end`."""
        self.notify_checkpoints()
        self.call("on_end", step)

    def notify_exception(self, step: int, error: BaseException) -> None:
        """Call `on_exception` of all callbacks."""
        for callback in self._callbacks:
            try:
                callback.on_exception(step, error)
            except BaseException as other:
                reason = one_line(f"{type(other).__name__}: {other}")
                console.warn(f"{type(callback).__name__}: {reason}")
