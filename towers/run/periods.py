"""What is due after which step: a function of the step alone, not of when a run began.

So a run that was stopped and continued logs and evaluates at the same steps as one that
was not.
"""

import dataclasses
import math
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Rhythm:
    """The periods of a run; a period of 0 is never due.

    Attributes:
        total_steps: steps of the whole run; its last step is logged and evaluated.
        images_per_step: images of a step.
        images_per_eval: images between evaluations.
    """

    total_steps: int
    images_per_step: int
    log_every_steps: int
    summary_every_steps: int
    checkpoint_every_steps: int
    images_per_eval: float

    def logs(self, step: int) -> bool:
        every = self.log_every_steps
        return step in (1, self.total_steps) or step == _next(step - 1, every)

    def summarizes(self, step: int) -> bool:
        return step == _next(step - 1, self.summary_every_steps)

    def saves(self, step: int) -> bool:
        return step == _next(step - 1, self.checkpoint_every_steps)

    def evaluates(self, step: int) -> bool:
        return step == self._next_evaluation(step - 1)

    def next_due(self, step: int) -> int:
        """The first step after `step` after which anything is due."""
        return min(
            1 if step < 1 else self.total_steps,
            _next(step, self.log_every_steps),
            _next(step, self.summary_every_steps),
            _next(step, self.checkpoint_every_steps),
            self._next_evaluation(step),
        )

    def _next_evaluation(self, step):
        """The first step after `step` that completes a multiple of images_per_eval."""
        if self.images_per_eval == 0:
            return math.inf
        done = math.floor(step * self.images_per_step / self.images_per_eval)
        due = math.ceil((done + 1) * self.images_per_eval / self.images_per_step)
        return max(step + 1, min(due, self.total_steps))


def _next(step, every):
    return (step // every + 1) * every if every else math.inf


class Lap(NamedTuple):
    """Steps per second, and in how much of their time they waited for batches."""

    steps_per_sec: float
    input_wait_percent: float


@dataclasses.dataclass
class Stopwatch:
    """Time spent in training steps.

    Attributes:
        train_secs: all of it, over every start of the run.
        timed_steps, timed_secs: the steps whose speed counts, and their time. The first
            call of each start, and of each stage, does not: it compiles the step.
        start_secs: time of those first calls.
    """

    train_secs: float = 0.0
    timed_steps: int = 0
    timed_secs: float = 0.0
    start_secs: float = 0.0

    def __post_init__(self):
        self._is_warm = False
        self._recent_steps, self._recent_secs = 0, 0.0  # timed, of this stage
        self.last_start_secs = 0.0
        self._lap_steps, self._lap_secs, self._lap_wait_secs = 0, 0.0, 0.0
        self._lap: Lap | None = None

    def add(self, num_steps: int, secs: float, input_wait_secs: float = 0.0) -> None:
        """Counts a call of `num_steps` steps that took `secs`, those of waiting for
        batches included."""
        self.train_secs += secs
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
            self.last_start_secs = secs
        self._is_warm = True

    def begin_phase(self) -> None:
        """The next steps are others, at another pace, and not compiled yet."""
        self._is_warm = False
        self._recent_steps, self._recent_secs = 0, 0.0

    def lap(self) -> Lap | None:
        """What was timed since the last lap; None while nothing was."""
        if self._lap_secs:
            # The wait is told by another clock, which may be set meanwhile.
            waited = min(max(self._lap_wait_secs / self._lap_secs, 0.0), 1.0)
            self._lap = Lap(self._lap_steps / self._lap_secs, 100 * waited)
            self._lap_steps, self._lap_secs, self._lap_wait_secs = 0, 0.0, 0.0
        return self._lap

    def steps_in(self, secs: float) -> int:
        """How many steps fill so much time; at least 1, and 1 until the pace of this
        start and stage is known."""
        if not (self._recent_secs and self._is_warm):
            return 1
        return max(1, int(secs * self._recent_steps / self._recent_secs))
