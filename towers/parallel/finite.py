"""Steps whose loss or gradients are not finite: loss scaling, skipping, the error.

Such a step makes no update. Dynamic loss scaling halves the factor on the loss while
that may help; `--on_nonfinite=skip` counts the step and continues with the next batch;
otherwise the run ends with an error. The device of the first copy decides, and the host
need not wait for it: after a refused step nothing changes until the host reads
`stopped` and raises the error.

Dynamic loss scaling is for gradients in float16, which vanish below 6e-8. The loss is
multiplied by a factor before it is differentiated, and the gradients, float32 again,
are divided by it. After many good steps the factor is doubled (Micikevicius et al.
2018, arXiv:1710.03740, section 3.2; constants as in Keras' LossScaleOptimizer).
"""

import numpy as np
import tensorflow as tf

from towers.errors import NumericError
from towers.parallel.copies import variable

INITIAL_SCALE = 2.0**15
LARGEST_SCALE = 2.0**24  # Sums of losses of about 1 are still precise in float32.
GROWTH_STEPS = 2000

# Consecutive steps that are not finite after which a run ends, the last one included.
# A single batch may cause one such step; after many, no other batch helps.
TOO_MANY_IN_A_ROW = 10


class FiniteGuard:
    """Decides on a device whether a step makes its update, and whether it counts."""

    def __init__(self, device: str, *, scale_loss: bool = False, skips: bool = False):
        self.device, self.scale_loss, self.skips = device, scale_loss, skips
        with tf.device(device):
            self._stopped = variable(False, "stopped")
            if scale_loss:
                self._scale = variable(INITIAL_SCALE, "scale")
                self._good_steps = variable(np.int64(0), "good_steps")
            if skips:
                self._skipped = variable(np.int64(0), "skipped")
                self._in_a_row = variable(np.int64(0), "skipped_in_a_row")

    def named(self) -> dict[str, tf.Variable]:
        """Return canonical name -> variable."""
        named = {}
        if self.scale_loss:
            named["loss_scale/scale"] = self._scale
            named["loss_scale/good_steps"] = self._good_steps
        if self.skips:
            named["skipped/total"] = self._skipped
            named["skipped/in_a_row"] = self._in_a_row
        return named

    def read_scale(self) -> tf.Tensor | None:
        """Return the factor on the loss, a float32 scalar; None without scaling."""
        return self._read(self._scale) if self.scale_loss else None

    def is_running(self) -> tf.Tensor:
        """Return whether no step was refused yet, a bool scalar."""
        return ~self._read(self._stopped)

    def restart(self) -> None:
        """Forget a refused step."""
        self._stopped.assign(False)

    @property
    def stopped(self) -> bool:
        """Return whether a step was refused; the state is the one before that step."""
        return bool(self._stopped.numpy())

    def num_skipped(self) -> dict[str, int]:
        """Return the number of skipped steps as a metric, if steps may be skipped."""
        return {"skipped_steps": int(self._skipped.numpy())} if self.skips else {}

    def num_in_a_row(self) -> int:
        """Return the number of steps skipped since the last update."""
        return int(self._in_a_row.numpy()) if self.skips else 0

    def decide(
        self, is_finite: tf.Tensor, running: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Decide in the graph, once per step and on the guard's device.

        Returns whether the step makes its update, and whether it is taken, with or
        without one; `running` is the result of `is_running`. All are bool scalars.
        """
        is_taken = updates = running & is_finite
        falls = tf.constant(False)
        if self.scale_loss:
            falls = running & ~is_finite & (self._read(self._scale) > 1)
            self._scale_after(updates, falls)
            is_taken |= falls
        if self.skips:
            in_a_row = self._read(self._in_a_row) + 1
            skips = running & ~is_finite & ~falls & (in_a_row < TOO_MANY_IN_A_ROW)
            in_a_row = tf.where(skips, in_a_row, in_a_row - 1)
            in_a_row = tf.where(updates, tf.zeros_like(in_a_row), in_a_row)
            self._skipped.assign_add(tf.cast(skips, tf.int64), read_value=False)
            self._in_a_row.assign(in_a_row, read_value=False)
            is_taken |= skips
        self._stopped.assign(~is_taken, read_value=False)
        return updates, is_taken

    def _scale_after(self, updates, falls):
        scale, good_steps = self._read(self._scale), self._read(self._good_steps) + 1
        is_time = good_steps >= GROWTH_STEPS
        grown = tf.where(is_time, tf.minimum(2 * scale, LARGEST_SCALE), scale)
        scale = tf.where(falls, tf.maximum(scale / 2, 1), scale)
        self._scale.assign(tf.where(updates, grown, scale), read_value=False)
        zero = tf.zeros_like(good_steps)
        after_update = tf.where(is_time, zero, good_steps)
        others = tf.where(falls, zero, good_steps - 1)
        good_steps = tf.where(updates, after_update, others)
        self._good_steps.assign(good_steps, read_value=False)

    def _read(self, variable):
        with tf.device(self.device):
            return variable.value()


def not_finite_error(
    step: int,
    finite: np.ndarray,
    losses: np.ndarray,
    *,
    learning_rate: float,
    gradient_norm: float,
    skips: bool,
    consequence: str = "the parameters are those before this step",
) -> NumericError:
    """Return the error of a step, counted from 1, and of towers that are not `finite`.

    If all are, their mean overflowed. With `skips` too many steps were skipped.
    """
    bad = [
        f"tower {tower} (loss {losses[tower]:g})" for tower in np.flatnonzero(~finite)
    ]
    culprit = f"the loss or a gradient of {', '.join(bad)}"
    if not bad:
        culprit = "the weight decay, or the mean gradient with it,"
    row = f", {TOO_MANY_IN_A_ROW} times in a row" if skips else ""
    hint = "" if skips else "; --on_nonfinite=skip continues without this step"
    return NumericError(
        f"step {step}: {culprit} is not finite{row}; {consequence}. The learning rate "
        f"is {learning_rate:g}, the norm of the gradient {gradient_norm:g}. A lower "
        f"--learning_rate or --clip_norm may help{hint}"
    )
