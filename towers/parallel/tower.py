"""A tower: a pure function of (params, model state, batch), run on one device.

It creates no variable and knows no other tower. Call `tower_gradients` inside the
`tf.device` of the tower: the gradient operations then land there too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.optim.phases import zero_frozen
from towers.parallel.gradients import in_dtype, squared_norm

# (logits [n, num_classes], labels) -> loss of each image [n]. Labels are int32 [n], or
# of mixed images floats [n, num_classes].
LossFn = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class TowerResult(NamedTuple):
    """The result of a tower on its share of a batch, or the part of one of its devices.

    Attributes:
        gradients: of the loss, in the order of the parameters; None where the loss does
            not depend on a parameter.
        state: the new model state.
        loss: mean cross-entropy over the share, a scalar. Weight decay does not depend
            on the images: it is added once, to the mean over the towers.
        correct: number of images whose largest logit is the label's, float scalar.
    """

    gradients: list[tf.Tensor | None]
    state: list[tf.Tensor]
    loss: tf.Tensor
    correct: tf.Tensor

    def is_finite(self) -> tf.Tensor:
        """A bool scalar: the loss and all gradients are finite."""
        norm = squared_norm(self.gradients)
        return tf.math.is_finite(self.loss) & tf.math.is_finite(norm)


def tower_loss(
    model: keras.Model,
    loss_fn: LossFn,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    batch: Mapping[str, tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
    """The loss of one tower's share.

    Args:
        model: gives the structure only; its own variables are not read.
        loss_fn: the loss of each image.
        params, state: values in the model's order of trainable and non-trainable
            variables.
        batch: the model's inputs by name, and "labels".

    Returns:
        (loss, correct, new state).
    """
    logits, new_state = model.stateless_call(
        params, state, _inputs(model, batch), training=True
    )
    loss = tf.reduce_mean(loss_fn(logits, batch["labels"]))
    correct = count_correct(logits, batch["labels"])
    return loss, correct, [tf.convert_to_tensor(s) for s in new_state]


def tower_gradients(
    model: keras.Model,
    loss_fn: LossFn,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    batch: Mapping[str, tf.Tensor],
    loss_scale: tf.Tensor | None = None,
) -> TowerResult:
    """The loss of one tower's share and its gradients; arguments as in `tower_loss`.

    With a loss_scale, loss_scale * loss is differentiated and the gradients are divided
    by it.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(params)
        loss, correct, new_state = tower_loss(model, loss_fn, params, state, batch)
        scaled = loss if loss_scale is None else loss * tf.cast(loss_scale, loss.dtype)
    gradients = tape.gradient(scaled, params)
    gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
    if loss_scale is not None:
        gradients = unscaled(gradients, loss_scale)
    return TowerResult(gradients, new_state, loss, correct)


def unscaled(
    gradients: Sequence[tf.Tensor | None], loss_scale: tf.Tensor | float
) -> list[tf.Tensor | None]:
    """The gradients divided by the factor on the loss."""
    return [g if g is None else g / in_dtype(loss_scale, g.dtype) for g in gradients]


def checked_gradients(
    gradients: Sequence[tf.Tensor | None], names: Sequence[str], frozen: frozenset[str]
) -> list[tf.Tensor]:
    """The gradients of a tower, zeros for those of frozen parameters.

    Raises:
        ValueError: the loss does not depend on a parameter.
    """
    for gradient, name in zip(gradients, names, strict=True):
        if gradient is None:
            raise ValueError(
                f"there is no gradient for {name}: the loss does not depend on it"
            )
    return zero_frozen(gradients, names, frozen)


def tower_logits(
    model: keras.Model,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    batch: Mapping[str, tf.Tensor],
) -> tf.Tensor:
    """The logits of one tower's share in inference; arguments as in `tower_loss`."""
    return model.stateless_call(params, state, _inputs(model, batch), training=False)[0]


def tower_counts(
    loss_fn: LossFn, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Counts of an evaluation on one tower's share; images of weight 0 do not count.

    Returns:
        float64 scalars "correct", "images" and "loss", the sum over the images.
    """
    weights = tf.cast(batch["weights"], tf.float64)

    def count(values):
        return tf.reduce_sum(weights * tf.cast(values, tf.float64))

    return {
        "correct": count(_is_correct(logits, batch["labels"])),
        "images": tf.reduce_sum(weights),
        "loss": count(loss_fn(logits, batch["labels"])),
    }


def _inputs(model, batch):
    """The model's inputs in its order; an evaluation has no noise, and needs none."""
    images = batch["images"]
    inputs = []
    for x in model.inputs:
        value = batch.get(x.name)
        if value is None:
            value = tf.zeros([tf.shape(images)[0], *x.shape[1:]], x.dtype)
        inputs.append(value)
    return inputs if len(inputs) > 1 else inputs[0]


def count_correct(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Number of correct predictions, a float32 scalar.

    The label of a mixed image is that which has the largest share.
    """
    return tf.reduce_sum(_is_correct(logits, labels))


def _is_correct(logits, labels):
    if len(labels.shape) > 1:
        labels = tf.argmax(labels, axis=1)
    # int64, because a GPU has int32 compared by the host.
    return tf.cast(tf.argmax(logits, axis=1) == tf.cast(labels, tf.int64), tf.float32)
