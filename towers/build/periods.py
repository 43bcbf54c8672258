"""Periods of logs, summaries, checkpoints and evaluations.

They depend on the step alone, not on when a process began, so a run that was stopped
and continued logs and evaluates at the same steps as one that was not. Checkpoints and
summaries by the clock come on top (`Run.plan_next_call`) and change no parameter.
"""

import dataclasses
import math
from fractions import Fraction


@dataclasses.dataclass(frozen=True)
class Periods:
    """The periods of a run; 0 is never due, and the last step is evaluated."""

    total_steps: int
    images_per_step: int
    log_every_steps: int
    summary_every_steps: int
    checkpoint_every_steps: int
    images_per_eval: Fraction
    images_per_epoch: int = 0

    def logs(self, step: int) -> bool:
        """Return whether the metrics of a step are written."""
        every = self.log_every_steps
        return step in (1, self.total_steps) or step == _next(step - 1, every)

    def summarizes(self, step: int) -> bool:
        """Return whether a summary is written after a step."""
        return step == _next(step - 1, self.summary_every_steps)

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is saved after a step."""
        return step == _next(step - 1, self.checkpoint_every_steps)

    def evaluates(self, step: int) -> bool:
        """Return whether the network is evaluated after a step."""
        return step == self._next_evaluation(step - 1)

    def num_evaluations(self, step: int, last_step: int) -> int:
        """Return the number of evaluations after `step`, up to `last_step`."""
        if not self.images_per_eval or step >= last_step:
            return 0

        def done(step):  # a step completes several of them where they are short
            return min(step, step * self.images_per_step // self.images_per_eval)

        ends_between = done(last_step) == done(last_step - 1)
        is_added = last_step == self.total_steps and ends_between
        return int(done(last_step) - done(step)) + is_added

    def next_due(self, step: int) -> float:
        """Return the next step after which anything is due, or an epoch ends."""
        return min(
            1 if step < 1 else self.total_steps,
            _next(step, self.log_every_steps),
            _next(step, self.summary_every_steps),
            _next(step, self.checkpoint_every_steps),
            self._next_evaluation(step),
            self._next_multiple(step, self.images_per_epoch),
        )

    def _next_evaluation(self, step):
        if self.images_per_eval == 0:
            return math.inf
        return min(self._next_multiple(step, self.images_per_eval), self.total_steps)

    def _next_multiple(self, step, images):
        """Return the next step that completes a multiple of `images`."""
        if images == 0:
            return math.inf
        done = step * self.images_per_step // images
        return math.ceil(Fraction((done + 1) * images) / self.images_per_step)


def _next(step, every):
    return (step // every + 1) * every if every else math.inf
