"""The progress of a run, which a checkpoint stores besides the tensors."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from towers.run.stopwatch import Stopwatch


@dataclasses.dataclass
class RunningMean:
    """Sums of the loss and accuracy of training batches over the steps of an epoch.

    Attributes:
        epoch: number of the epoch.
        num_steps: of it, those with a finite loss; of asynchronous towers also parts.
        loss_sum, correct_sum: of their losses and correct predictions.
    """

    epoch: int = 0
    num_steps: float = 0.0
    loss_sum: float = 0.0
    correct_sum: float = 0.0

    def add(self, epoch: int, sums: tuple[float, float, float]) -> None:
        """Adds steps, by their sums of losses and of correct predictions and their
        number; a new epoch starts from zero."""
        if epoch != self.epoch:
            self.epoch, self.num_steps = epoch, 0.0
            self.loss_sum = self.correct_sum = 0.0
        loss_sum, correct_sum, num_steps = map(float, sums)
        self.num_steps += num_steps
        self.loss_sum += loss_sum
        self.correct_sum += correct_sum

    def means(self, images_per_step: int) -> tuple[float, float] | None:
        """Loss and accuracy; None of no step."""
        if not self.num_steps:
            return None
        num_images = self.num_steps * images_per_step
        return self.loss_sum / self.num_steps, self.correct_sum / num_images


@dataclasses.dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: steps taken.
        best: "step", "accuracy", "loss", "score" and "best_by" of the best evaluation
            on held-out images, see `add_evaluation`.
        improved_score: of the last evaluation that was better than one before by more
            than `min_delta`.
        num_worse: evaluations since then.
        num_plateaus: how often the plateau schedule has lowered the rate.
        open_record: metrics of the last step until it is evaluated and written. A run
            that was stopped before that begins with the evaluation.
        accuracy: of the last evaluation; None before the first one.
        means: of the loss and accuracy over the epoch.
        stopwatch: of the training steps.
    """

    step: int = 0
    best: dict[str, Any] | None = None
    improved_score: float | None = None
    num_worse: int = 0
    num_plateaus: int = 0
    open_record: dict[str, Any] | None = None
    accuracy: float | None = None
    means: RunningMean = dataclasses.field(default_factory=RunningMean)
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)

    def add_evaluation(
        self,
        accuracy: float,
        loss: float,
        score: float,
        best_by: str = "accuracy",
        min_delta: float = 0.0,
    ) -> bool:
        """Adds an evaluation on held-out images; returns whether it is the best so far,
        see `is_better`.

        Args:
            accuracy, loss: of the evaluation.
            score: by which it is compared, the higher the better.
            best_by: name of the metric that the score is. Where it was another one
                before, accuracy and loss are compared with the best evaluation's, and
                of other metrics this evaluation is the first.
            min_delta: improvement of the score above which `num_worse` begins anew.
        """
        loss, score = (x if abs(x) < 2**63 else None for x in (loss, score))
        figures = {"accuracy": accuracy, "loss": loss, "score": score}
        evaluation = {"step": self.step, **figures, "best_by": best_by}
        if self.best is not None and self.best["best_by"] != best_by:
            lowest = self.best["loss"]
            scores = {"accuracy": self.best["accuracy"], "loss": lowest and -lowest}
            before = {**self.best, "score": scores.get(best_by), "best_by": best_by}
            self.best = before if best_by in scores else None
            self.improved_score = self.best and self.best["score"]
        is_best = is_better(evaluation, self.best)
        is_improved = is_best
        if min_delta and None not in (score, self.improved_score):
            is_improved = score > self.improved_score + min_delta
        if is_best:
            self.best = evaluation
        if is_improved:
            self.num_worse, self.improved_score = 0, score
        else:
            self.num_worse += 1
        return is_best

    def to_json(self) -> dict[str, Any]:
        """The values as JSON holds them; floats keep all their bits."""
        values = dataclasses.asdict(self)
        return values | {"open_record": self.open_record and as_lists(self.open_record)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Progress":
        """The progress of `to_json`; other values are ignored. Where it is none, raises
        what `validate` does, or KeyError, TypeError, AttributeError or OverflowError.
        """
        own = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        means, stopwatch = RunningMean(**own["means"]), Stopwatch(**own["stopwatch"])
        progress = cls(**own | {"means": means, "stopwatch": stopwatch})
        progress.validate()
        return progress

    def validate(self) -> None:
        """Raises ValueError where a value is no number that a run can calculate with:
        JSON also has numbers beyond any type, NaN and infinity."""
        steps = [self.step, self.num_worse, self.num_plateaus]
        numbers = [*dataclasses.asdict(self.stopwatch).values()]
        optional = [self.accuracy, self.improved_score]
        if (best := self.best) is not None:
            steps.append(best["step"])
            numbers.append(best["accuracy"])
            optional += [best["loss"], best["score"]]
        numbers += [x for x in optional if x is not None]
        if self.open_record:
            steps.append(self.open_record["step"])
            for value in self.open_record.values():
                np.asarray(value, np.float64)
        if not all(type(step) is int and 0 <= step < 2**63 for step in steps):
            raise ValueError(f"not all of {steps} are steps")
        validate_numbers(numbers)
        if not all(map(math.isfinite, vars(self.means).values())):
            raise ValueError("the running means are not finite")


def is_better(evaluation: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """True if an evaluation is better than the best one so far.

    Args:
        evaluation, best: with "score", of equal ones "loss", then "accuracy"; a number
            that is not finite is None, and worse than any other.
    """

    def key(x):
        score = -math.inf if x["score"] is None else x["score"]
        loss = -math.inf if x["loss"] is None else -x["loss"]
        return score, loss, x["accuracy"]

    return best is None or key(evaluation) > key(best)


def validate_numbers(numbers: list[Any]) -> None:
    """Raises ValueError where one is no number, not finite, or 2**63 or larger."""
    if not all(type(x) in (int, float) and abs(x) < 2**63 for x in numbers):
        raise ValueError(f"not all of {numbers} are finite numbers")


def as_lists(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as JSON takes it; floats keep all their bits."""
    return {name: np.asarray(value).tolist() for name, value in record.items()}
