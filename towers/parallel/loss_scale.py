"""Dynamic loss scaling, for gradients in float16.

Gradients below 6e-8 vanish in float16. The loss is therefore multiplied with a factor
before it is differentiated, and the gradients, float32 again, are divided by it. Where
one of them is not finite in any tower, no tower updates anything and the factor is
halved; after many good steps in a row it is doubled (Micikevicius et al. 2018,
arXiv:1710.03740, section 3.2; the numbers are those of Keras' LossScaleOptimizer).
"""

import tensorflow as tf

INITIAL = 2.0**15
LARGEST = 2.0**24  # a loss of 1 times that still leaves room for float32 sums
GROWTH_STEPS = 2000


class LossScale:
    """The factor and how many steps in a row were good, on the device in scope."""

    def __init__(self):
        with tf.name_scope("loss_scale"):
            self._scale = tf.Variable(INITIAL, trainable=False, name="scale")
            self._good_steps = tf.Variable(
                0, trainable=False, name="good_steps", dtype=tf.int64
            )

    def read(self) -> tf.Tensor:
        """The factor, a float32 scalar."""
        return self._scale.read_value()

    def named(self) -> dict[str, tf.Variable]:
        """Canonical name -> variable."""
        return {
            "loss_scale/scale": self._scale,
            "loss_scale/good_steps": self._good_steps,
        }

    def after_good_step(self) -> list[tf.Operation]:
        """Counts one, and doubles the factor when it is time."""
        good_steps = self._good_steps.read_value() + 1
        is_time = good_steps >= GROWTH_STEPS
        scale = self.read()
        grown = tf.minimum(2 * scale, LARGEST)
        return [
            self._scale.assign(tf.where(is_time, grown, scale), read_value=False),
            self._good_steps.assign(
                tf.where(is_time, tf.zeros_like(good_steps), good_steps),
                read_value=False,
            ),
        ]

    def can_fall(self) -> tf.Tensor:
        """A bool scalar: a smaller factor could still help."""
        return self.read() > 1

    def after_bad_step(self) -> list[tf.Operation]:
        """Halves the factor."""
        return [
            self._scale.assign(tf.maximum(self.read() / 2, 1), read_value=False),
            self._good_steps.assign(0, read_value=False),
        ]
