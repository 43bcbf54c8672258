"""Running means of the loss and accuracy of training batches over an epoch."""

import dataclasses
import math


@dataclasses.dataclass
class RunningMean:
    """Sums over the steps of an epoch so far; a checkpoint stores them.

    Attributes:
        epoch: number of the epoch.
        num_steps: of it.
        loss_sum, accuracy_sum: of their batches.
    """

    epoch: int = 0
    num_steps: int = 0
    loss_sum: float = 0.0
    accuracy_sum: float = 0.0

    def add(
        self, epoch: int, num_steps: int, loss_sum: float, accuracy_sum: float
    ) -> None:
        """Adds steps; those of another epoch than before begin anew. Where one of them
        was skipped, as its loss is not finite, none is added."""
        if epoch != self.epoch:
            self.epoch, self.num_steps = epoch, 0
            self.loss_sum = self.accuracy_sum = 0.0
        if not math.isfinite(loss_sum):
            return
        self.num_steps += num_steps
        self.loss_sum += float(loss_sum)
        self.accuracy_sum += float(accuracy_sum)

    @property
    def loss(self) -> float | None:
        """The mean; None of no step."""
        return self.loss_sum / self.num_steps if self.num_steps else None

    @property
    def accuracy(self) -> float | None:
        """The mean; None of no step."""
        return self.accuracy_sum / self.num_steps if self.num_steps else None
