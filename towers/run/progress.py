"""The progress and speed of a run; checkpoints store them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Lap(NamedTuple):
    """Steps per second, and the percentage of time spent waiting for batches."""

    steps_per_sec: float
    input_wait_percent: float


@dataclasses.dataclass
class _Total:
    """A number of steps or evaluations, and their seconds."""

    count: int = 0
    secs: float = 0.0

    def add(self, count: int, secs: float) -> None:
        self.count += count
        self.secs += secs

    def mean(self) -> float:
        return self.secs / max(self.count, 1)


@dataclasses.dataclass
class Stopwatch:
    """Time of the training steps over all starts of a run."""

    train_secs: float = 0.0
    timed_steps: int = 0
    timed_secs: float = 0.0
    start_secs: float = 0.0  # of first calls, which compile the step

    def __post_init__(self) -> None:
        self._is_warm = False
        self._phase = _Total()  # timed steps of this phase
        self._since_lap, self._wait_secs_since_lap = _Total(), 0.0
        self._last_lap: Lap | None = None
        # Evaluations and pauses of this start, to estimate the time left.
        self._evaluations, self._pauses = _Total(), _Total()
        self._evaluation_secs_since_add = 0.0

    def add(self, num_steps: int, secs: float, input_wait_secs: float = 0.0) -> None:
        """Add a call; its time includes the wait for batches."""
        self.train_secs += secs
        self._evaluation_secs_since_add = 0.0
        if not self._is_warm:
            self.start_secs += secs
        elif num_steps:
            self.timed_steps += num_steps
            self.timed_secs += secs
            self._phase.add(num_steps, secs)
            self._since_lap.add(num_steps, secs)
            self._wait_secs_since_lap += input_wait_secs
        self._is_warm = True

    def add_pause(self, num_steps: int, secs: float) -> None:
        """Add the time between two calls, without evaluations."""
        self._pauses.add(num_steps, secs - self._evaluation_secs_since_add)

    def add_evaluation(self, secs: float) -> None:
        """Add the time of an evaluation."""
        self._evaluations.add(1, secs)
        self._evaluation_secs_since_add += secs

    def secs_left(self, num_steps: int, num_evaluations: int) -> float | None:
        """Return the estimated seconds of the rest of the run, if known."""
        if not self._phase.secs:
            return None
        secs_per_step = self._phase.mean() + self._pauses.mean()
        return num_steps * secs_per_step + num_evaluations * self._evaluations.mean()

    def begin_phase(self) -> None:
        """Begin a phase, which is compiled separately and has another speed."""
        self._is_warm = False
        self._phase = _Total()

    def lap(self) -> Lap | None:
        """End a lap; return its speed, or None before the first timed step."""
        self._last_lap = self.speed()
        self._since_lap, self._wait_secs_since_lap = _Total(), 0.0
        return self._last_lap

    def speed(self) -> Lap | None:
        """Return the speed since the last lap, or None before the first timed step."""
        lap = self._since_lap
        if not lap.secs:
            return self._last_lap
        # The wait is measured by another clock, which may be adjusted in between.
        waited = min(max(self._wait_secs_since_lap / lap.secs, 0.0), 1.0)
        return Lap(lap.count / lap.secs, 100 * waited)

    def steps_in(self, secs: float) -> int:
        """Return the number of steps that take `secs`, if known, or else 1."""
        if not (self._phase.secs and self._is_warm):
            return 1
        return max(1, int(secs * self._phase.count / self._phase.secs))


@dataclasses.dataclass
class RunningMean:
    """Sums over the steps of an epoch with a finite loss."""

    epoch: int = 0
    num_steps: float = 0.0
    loss_sum: float = 0.0
    correct_sum: float = 0.0

    def add(self, epoch: int, sums: tuple[float, float, float]) -> None:
        """Add an epoch's sums of losses and correct predictions and number of steps."""
        if epoch != self.epoch:
            self.epoch, self.num_steps = epoch, 0.0
            self.loss_sum = self.correct_sum = 0.0
        loss_sum, correct_sum, num_steps = map(float, sums)
        self.num_steps += num_steps
        self.loss_sum += loss_sum
        self.correct_sum += correct_sum

    def means(self, images_per_step: int) -> tuple[float, float] | None:
        """Return loss and accuracy; None before the first step of the epoch."""
        if not self.num_steps:
            return None
        num_images = self.num_steps * images_per_step
        return self.loss_sum / self.num_steps, self.correct_sum / num_images


@dataclasses.dataclass
class Progress:
    """The progress of a run."""

    step: int = 0
    # Step, accuracy, loss, score and best_by of the best evaluation on held-out images.
    best: dict[str, Any] | None = None
    improved_score: float | None = None  # of the last improvement beyond `min_delta`
    num_worse: int = 0  # evaluations since then
    num_plateaus: int = 0  # how often the plateau schedule has lowered the rate
    # Metrics of the last step until it is evaluated and written. A run that was stopped
    # before that begins with the evaluation.
    open_record: dict[str, Any] | None = None
    accuracy: float | None = None  # of the last evaluation
    weights: dict[str, str] | None = None  # revision and SHA-256, see `hub.fetch`
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
        """Add an evaluation on held-out images; return whether it is the best."""
        evaluation: dict[str, Any] = {
            "step": self.step,
            "accuracy": accuracy,
            "loss": loss if abs(loss) < 2**63 else None,
            "score": score if abs(score) < 2**63 else None,
            "best_by": best_by,
        }
        # After a change of `best_by` only accuracy and loss are comparable.
        if self.best is not None and self.best["best_by"] != best_by:
            lowest = self.best["loss"]
            scores = {"accuracy": self.best["accuracy"], "loss": lowest and -lowest}
            before = {**self.best, "score": scores.get(best_by), "best_by": best_by}
            self.best = before if best_by in scores else None
            self.improved_score = before["score"] if best_by in scores else None
        is_best = is_improved = is_better(evaluation, self.best)
        former = self.improved_score
        if min_delta and None not in (evaluation["score"], former):
            is_improved = score > (former or 0.0) + min_delta
        if is_best:
            self.best = evaluation
        if is_improved:
            self.num_worse, self.improved_score = 0, evaluation["score"]
        else:
            self.num_worse += 1
        return is_best

    def to_json(self) -> dict[str, Any]:
        """Return the values for JSON; floats keep all their bits."""
        values = dataclasses.asdict(self)
        return values | {"open_record": self.open_record and as_lists(self.open_record)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Progress":
        """Read the values of `to_json`; others are ignored."""
        values = {"weights": None, **values}  # older checkpoints lack it
        own = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        means, stopwatch = RunningMean(**own["means"]), Stopwatch(**own["stopwatch"])
        return cls(**own | {"means": means, "stopwatch": stopwatch})


def is_better(evaluation: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """Return whether an evaluation is better, by score, then loss, then accuracy."""

    def key(x):
        score = -math.inf if x["score"] is None else x["score"]
        loss = -math.inf if x["loss"] is None else -x["loss"]
        return score, loss, x["accuracy"]

    return best is None or key(evaluation) > key(best)


def as_lists(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record for JSON; floats keep all their bits."""
    return {name: np.asarray(value).tolist() for name, value in record.items()}
