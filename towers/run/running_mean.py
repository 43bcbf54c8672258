"""Running means of the loss and accuracy of training batches over an epoch."""

import dataclasses


@dataclasses.dataclass
class RunningMean:
    """Sums over the steps of an epoch so far; a checkpoint stores them.

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
        number; those of another epoch than before begin anew."""
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
