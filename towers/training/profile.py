"""A trace of some steps for TensorBoard's profile plugin."""

import pathlib
from collections.abc import Sequence

import tensorflow as tf

from towers import console
from towers.errors import ConfigError


class Profile:
    """A context manager that traces the steps between two numbers of steps, if any."""

    def __init__(self, steps: Sequence[int], folder: pathlib.Path):
        if steps and not (len(steps) == 2 and 0 <= steps[0] < steps[1]):
            way = "give two numbers of steps, the smaller one first, such as 100,110"
            raise ConfigError(f"profile_steps={','.join(map(str, steps))}: {way}")
        self._steps, self._folder = tuple(steps), folder
        self._is_tracing = self._is_done = False

    def steps_until_trace_event(self, step: int) -> float:
        """Return the steps after `step` until the trace begins, or ends."""
        return min((x - step for x in self._steps if x > step), default=float("inf"))

    def at(self, step: int) -> None:
        """Begin or end the trace if it is due."""
        if self._is_tracing and step >= self._steps[1]:
            self._end()
        elif not (self._is_tracing or self._is_done) and step in self._steps[:1]:
            tf.profiler.experimental.start(str(self._folder))
            self._is_tracing = True

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_tracing:
            self._end()
        elif self._steps and not self._is_done:
            first, last = self._steps
            why = f"the run was not at step {first} since its last start"
            console.warn(f"profile_steps={first},{last}: {why}")

    def _end(self):
        self._is_tracing, self._is_done = False, True
        tf.profiler.experimental.stop()
        console.line(f"profile: tensorboard --logdir={self._folder} (tab Profile)")
