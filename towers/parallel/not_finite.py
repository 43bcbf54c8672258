"""Steps whose loss or gradients are not finite: those skipped, and the error.

Such a step makes no update. Either the run ends with the error, or the step is skipped:
it is counted, and the next batch is another one. A single batch may cause that; where
it happens in many steps in a row, no other batch helps, and the run ends after all.
"""

import numpy as np
import tensorflow as tf

from towers.errors import NumericError

# So many in a row end the run: the last of them is not skipped.
TOO_MANY_IN_A_ROW = 10


class SkippedSteps:
    """How many steps were skipped, in all and in a row, on the device in scope."""

    def __init__(self):
        with tf.name_scope("skipped"):
            self._total, self._in_a_row = (
                tf.Variable(0, trainable=False, name=name, dtype=tf.int64)
                for name in ("total", "in_a_row")
            )

    def named(self) -> dict[str, tf.Variable]:
        """Canonical name -> variable."""
        return {"skipped/total": self._total, "skipped/in_a_row": self._in_a_row}

    def total(self) -> int:
        """The steps skipped since the run began."""
        return int(self._total)

    def can_skip(self) -> tf.Tensor:
        """A bool scalar: one more step may be skipped."""
        return self._in_a_row.read_value() + 1 < TOO_MANY_IN_A_ROW

    def after_good_step(self) -> list[tf.Operation]:
        """Ends the row."""
        return [self._in_a_row.assign(0, read_value=False)]

    def after_bad_step(self) -> list[tf.Operation]:
        """Counts one."""
        return [
            count.assign_add(1, read_value=False)
            for count in (self._total, self._in_a_row)
        ]


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
    """The error that names the towers and the step where something was not finite.

    Args:
        step: the number of the step that was not taken, counted from 1.
        finite: bool [num_towers]; if all are True, their mean overflowed.
        losses: [num_towers].
        learning_rate: of the step.
        gradient_norm: of its mean gradient (of an asynchronous tower, its gradient).
        skips: whether such steps are skipped, so that this is the last of too many.
        consequence: what the message says of the parameters.
    """
    bad = [
        f"tower {tower} (loss {losses[tower]:g})" for tower in np.flatnonzero(~finite)
    ]
    culprit = f"the loss or a gradient of {', '.join(bad)}"
    if not bad:
        culprit = "the weight decay, or the mean gradient with it,"
    row = f", {TOO_MANY_IN_A_ROW} times in a row" if skips else ""
    way_out = "" if skips else "; --on_nonfinite=skip goes on without this step"
    return NumericError(
        f"step {step}: {culprit} is not finite{row}; {consequence}. The learning rate "
        f"is {learning_rate:g}, the norm of the gradient {gradient_norm:g}. A lower "
        f"--learning_rate or --clip_norm may help{way_out}"
    )
