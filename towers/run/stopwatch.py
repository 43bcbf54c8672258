"""Time spent in training steps, and their speed."""

import dataclasses
from typing import NamedTuple


class Lap(NamedTuple):
    """Steps per second, and the share of their time spent waiting for batches."""

    steps_per_sec: float
    input_wait_percent: float


@dataclasses.dataclass
class Stopwatch:
    """Time spent in training steps.

    Attributes:
        train_secs: total time, over every start of the run.
        timed_steps, timed_secs: the steps that count for the speed, and their time. The
            first call of each start, and of each phase, does not: it compiles the step.
        start_secs: time of those first calls.
    """

    train_secs: float = 0.0
    timed_steps: int = 0
    timed_secs: float = 0.0
    start_secs: float = 0.0

    def __post_init__(self):
        self._is_warm = False
        self._recent_steps, self._recent_secs = 0, 0.0  # timed, of this phase
        self._lap_steps, self._lap_secs, self._lap_wait_secs = 0, 0.0, 0.0
        self._lap: Lap | None = None
        # Of this start; for the time left.
        self._num_evaluations, self._evaluation_secs = 0, 0.0
        self._paused_steps, self._paused_secs = 0, 0.0
        self._evaluation_secs_since_add = 0.0

    def add(self, num_steps: int, secs: float, input_wait_secs: float = 0.0) -> None:
        """Adds a call of `num_steps` steps that took `secs`, including the time spent
        waiting for batches."""
        self.train_secs += secs
        self._evaluation_secs_since_add = 0.0
        if self._is_warm and num_steps:
            self.timed_steps += num_steps
            self.timed_secs += secs
            self._recent_steps += num_steps
            self._recent_secs += secs
            self._lap_steps += num_steps
            self._lap_secs += secs
            self._lap_wait_secs += input_wait_secs
        if not self._is_warm:
            self.start_secs += secs
        self._is_warm = True

    def add_pause(self, num_steps: int, secs: float) -> None:
        """Adds the time from the end of a call of `num_steps` to the next call;
        evaluations in it are counted apart."""
        self._paused_steps += num_steps
        self._paused_secs += secs - self._evaluation_secs_since_add

    def add_evaluation(self, secs: float) -> None:
        """Adds the time of an evaluation."""
        self._num_evaluations += 1
        self._evaluation_secs += secs
        self._evaluation_secs_since_add += secs

    def secs_left(self, num_steps: int, num_evaluations: int) -> float | None:
        """Estimated seconds of the remaining steps and evaluations, with what is
        written between them; None until the speed of this start and phase is known.

        Before the first evaluation none is counted.
        """
        if not self._recent_secs:
            return None
        secs_per_step = self._recent_secs / self._recent_steps
        secs_per_step += self._paused_secs / max(self._paused_steps, 1)
        secs_per_evaluation = self._evaluation_secs / max(self._num_evaluations, 1)
        return num_steps * secs_per_step + num_evaluations * secs_per_evaluation

    def begin_phase(self) -> None:
        """The next steps are compiled apart and have another speed."""
        self._is_warm = False
        self._recent_steps, self._recent_secs = 0, 0.0

    def lap(self) -> Lap | None:
        """The speed since the last lap; None until a step was timed."""
        self._lap = self.speed()
        self._lap_steps, self._lap_secs, self._lap_wait_secs = 0, 0.0, 0.0
        return self._lap

    def speed(self) -> Lap | None:
        """The same, and no lap ends."""
        if not self._lap_secs:
            return self._lap
        # The wait is measured by another clock, which may be adjusted meanwhile.
        waited = min(max(self._lap_wait_secs / self._lap_secs, 0.0), 1.0)
        return Lap(self._lap_steps / self._lap_secs, 100 * waited)

    def steps_in(self, secs: float) -> int:
        """The number of steps that fill so much time; at least 1, and 1 until the speed
        of this start and phase is known."""
        if not (self._recent_secs and self._is_warm):
            return 1
        return max(1, int(secs * self._recent_steps / self._recent_secs))
