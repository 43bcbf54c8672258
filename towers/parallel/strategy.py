"""The contract that every strategy meets, and the canonical names of a training state.

A strategy decides where variables live and when towers meet, and nothing else.
"""

import abc
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from towers.errors import NumericError
from towers.models.variables import variable_names  # noqa: F401 (its former place)
from towers.parallel.memory import Account

# What a strategy is busy with, as its phase variable holds it and `progress` says it.
IDLE, TRACING, WAITING, COMPUTING = range(4)
PHASES = ("idle", "tracing the step", "waiting for data", "computing")

# In these phases no update is under way, so `Strategy.state` is consistent.
CONSISTENT_PHASES = (PHASES[TRACING], PHASES[WAITING])


class Strategy(abc.ABC):
    """One way of training a model on several devices."""

    @abc.abstractmethod
    def train(self, num_steps: int) -> dict:
        """Takes up to `num_steps` steps; fewer where `request_stop` was called or a
        stage of the run ends.

        A step is one update with the gradient of the mean loss over the whole batch;
        of asynchronous towers, one update by each.

        Returns:
            The metrics of the last step taken; empty if none was. "step" is the number
            of steps taken since the run began; "loss" the mean cross-entropy over all
            images of the batch and "total_loss" with weight decay; "tower_losses" the
            loss of each tower; "accuracy" the share of the batch's images that were
            right; "learning_rate"; "gradient_norm" of the mean gradient before
            clipping; "loss_scale" where the loss is scaled. "input_wait_secs" alone is
            that of all steps of this call: how long they waited for their batches, in
            seconds; of asynchronous towers the mean over the towers.

        Raises:
            NumericError: a tower's loss or gradients are not finite. The parameters are
                those before that step (of an asynchronous tower, that update).
        """

    @abc.abstractmethod
    def gradients(self) -> dict[str, tf.Tensor]:
        """Name -> the mean gradient of the next step, which is not taken; for pictures.

        It is computed anew: to carry it out of every step would cost copies.
        Asynchronous towers have the gradient of the last update and give that.
        """

    @abc.abstractmethod
    def evaluate(
        self, batches: Iterable[Mapping[str, tf.Tensor]], use_averages: bool = False
    ) -> dict[str, float]:
        """Counts over batches with "weights", on all devices.

        Returns:
            "correct" and "images", whole numbers, and "loss", the sum over the images;
            "correct_tta" with test-time augmentation: by the mean of their
            logits.
        """

    @abc.abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """The canonical state: name -> host array, in a fixed order.

        `params/`, `state/`, `slots/` and `averages/`, each followed by the variable's
        path (and the slot's name), then `loss_scale/` where the loss is scaled, and
        `step`. It does not depend on the strategy or on the number of towers.
        """

    @abc.abstractmethod
    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from a canonical state, whichever strategy wrote it."""

    @abc.abstractmethod
    def memory(self) -> list[Account]:
        """What training takes on each device; traces the step where it was not yet."""

    @abc.abstractmethod
    def describe(self) -> list[str]:
        """Lines for the start banner: what lives where, and what each tower gets."""

    @abc.abstractmethod
    def request_stop(self) -> None:
        """Asks `train`, from another thread, to return after the step in hand."""

    @abc.abstractmethod
    def progress(self) -> tuple[int, str]:
        """(steps taken, one of PHASES), readable from another thread meanwhile.

        Asynchronous towers add to "computing" which of them is the last.
        """


def not_finite(
    step: int,
    finite: np.ndarray,
    losses: np.ndarray,
    remains: str = "the parameters are those before this step",
) -> NumericError:
    """The error that names the towers and the step where something was not finite.

    Args:
        step: the number of the step that was not taken, counted from 1.
        finite: bool [num_towers]; where all are, it was what they make together.
        losses: [num_towers].
        remains: what the message says of the parameters.
    """
    bad = [
        f"tower {tower} (loss {losses[tower]:g})" for tower in np.flatnonzero(~finite)
    ]
    what = f"the loss or a gradient of {', '.join(bad)}"
    if not bad:
        what = "the weight decay, or the mean gradient with it,"
    return NumericError(
        f"step {step}: {what} is not finite; {remains}. A lower --learning_rate or "
        "--clip_norm may help"
    )
