"""A tower: a pure function of (params, model state, batch), run on one device.

It creates no variable and knows no other tower. Call `tower_gradients` inside the
`tf.device` of the tower: the gradient operations then land there too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers import losses
from towers.parallel.gradients import squared_norm

# (logits [n, num_classes], labels int32 [n]) -> loss of each image [n].
LossFn = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class TowerResult(NamedTuple):
    """What a tower computes from its share of a batch.

    Attributes:
        gradients: of the total loss, in the order of the parameters; None where the
            loss does not depend on a parameter.
        state: the new model state.
        loss: mean cross-entropy over the share, a scalar.
        total_loss: the loss and the weight decay.
        correct: number of images whose largest logit is the label's, float scalar.
        finite: whether loss and gradients are all finite, a bool scalar.
    """

    gradients: list[tf.Tensor | None]
    state: list[tf.Tensor]
    loss: tf.Tensor
    total_loss: tf.Tensor
    correct: tf.Tensor
    finite: tf.Tensor


def tower_loss(
    model: keras.Model,
    loss_fn: LossFn,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    batch: Mapping[str, tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
    """The loss of one tower's share.

    Args:
        model: gives the structure only; its own variables are not read.
        loss_fn: the loss of each image.
        params, state: what to compute with, in the model's order of trainable and
            non-trainable variables.
        batch: the model's inputs by name, and "labels".

    Returns:
        (total loss, loss, correct, new state).
    """
    logits, new_state = model.stateless_call(
        params, state, _inputs(model, batch), training=True
    )
    loss = tf.reduce_mean(loss_fn(logits, batch["labels"]))
    decay = losses.weight_decay(model.trainable_variables, params)
    total_loss = loss if decay is None else loss + tf.cast(decay, loss.dtype)
    correct = tf.reduce_sum(_is_correct(logits, batch["labels"]))
    return total_loss, loss, correct, [tf.convert_to_tensor(s) for s in new_state]


def tower_gradients(
    model: keras.Model,
    loss_fn: LossFn,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    batch: Mapping[str, tf.Tensor],
) -> TowerResult:
    """The loss of one tower's share and its gradients; arguments as in `tower_loss`."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(params)
        total_loss, loss, correct, new_state = tower_loss(
            model, loss_fn, params, state, batch
        )
    gradients = tape.gradient(total_loss, params)
    gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
    norm = squared_norm([gradient for gradient in gradients if gradient is not None])
    finite = tf.math.is_finite(total_loss) & tf.math.is_finite(norm)
    return TowerResult(gradients, new_state, loss, total_loss, correct, finite)


def accumulated_gradients(
    model: keras.Model,
    loss_fn: LossFn,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    batch: Mapping[str, tf.Tensor],
    accumulate_steps: int,
) -> TowerResult:
    """`tower_gradients` over several micro-batches, one after the other.

    The memory of activations is that of one micro-batch. Gradients and losses are means
    over all of them; the model state goes from each to the next.

    Args:
        batch: as in `tower_gradients`, with a leading axis of `accumulate_steps`,
            unless that is 1.
        accumulate_steps: number of micro-batches.
    """
    if accumulate_steps == 1:
        return tower_gradients(model, loss_fn, params, state, batch)
    zeros = TowerResult(
        gradients=[tf.zeros_like(param) for param in params],
        state=list(state),
        loss=tf.zeros([], params[0].dtype),
        total_loss=tf.zeros([], params[0].dtype),
        correct=tf.zeros([]),
        finite=tf.constant(True),
    )

    def add(place, so_far):
        micro_batch = {name: tensor[place] for name, tensor in batch.items()}
        result = tower_gradients(model, loss_fn, params, so_far.state, micro_batch)
        return place + 1, TowerResult(
            gradients=[
                a + b for a, b in zip(so_far.gradients, result.gradients, strict=True)
            ],
            state=result.state,
            loss=so_far.loss + result.loss,
            total_loss=so_far.total_loss + result.total_loss,
            correct=so_far.correct + result.correct,
            finite=so_far.finite & result.finite,
        )

    _, total = tf.while_loop(
        lambda place, _: place < accumulate_steps,
        add,
        (tf.constant(0), zeros),
        parallel_iterations=1,
    )
    return total._replace(
        gradients=[gradient / accumulate_steps for gradient in total.gradients],
        loss=total.loss / accumulate_steps,
        total_loss=total.total_loss / accumulate_steps,
    )


def tower_counts(
    model: keras.Model,
    loss_fn: LossFn,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    batch: Mapping[str, tf.Tensor],
) -> dict[str, tf.Tensor]:
    """What an evaluation counts on one tower's share; images of weight 0 do not count.

    Returns:
        float64 scalars "correct", "images" and "loss", the sum over the images.
    """
    logits, _ = model.stateless_call(
        params, state, _inputs(model, batch), training=False
    )
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


def _is_correct(logits, labels):
    predictions = tf.argmax(logits, axis=1, output_type=labels.dtype)
    return tf.cast(predictions == labels, tf.float32)
