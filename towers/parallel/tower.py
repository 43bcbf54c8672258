"""A tower: a pure function of (params, model state, batch), run on one device.

It creates no variable and knows no other tower. Call `tower_gradients` inside the
`tf.device` of the tower: the gradient operations then land there too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.parallel.gradients import in_dtype, squared_norm

# (logits [n, num_classes], labels) -> loss of each image [n]. Labels are int32 [n], or
# of mixed images floats [n, num_classes].
LossFn = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class TowerResult(NamedTuple):
    """What a tower computes from its share of a batch.

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
        """Whether the loss and all gradients are finite, a bool scalar."""
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
        params, state: what to compute with, in the model's order of trainable and
            non-trainable variables.
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

    With a loss_scale the loss is differentiated times that, and the gradients are
    divided by it.
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
    """The gradients divided by the factor of the loss."""
    return [g if g is None else g / in_dtype(loss_scale, g.dtype) for g in gradients]


def accumulated(
    compute: Callable[[list, list], list[TowerResult]],
    states: Sequence[Sequence[tf.Tensor]],
    batches: Sequence[Mapping[str, tf.Tensor]],
    accumulate_steps: int,
) -> list[TowerResult]:
    """Gradients over several micro-batches, one after the other.

    The memory of activations is that of one micro-batch. Gradients and losses are means
    over all of them; each tower's model state goes from one to the next.

    Args:
        compute: (the towers' states, their shares of a micro-batch) -> results.
        states: per tower its model state.
        batches: per tower its share of the batch, with a leading axis of
            `accumulate_steps`, unless that is 1.
        accumulate_steps: number of micro-batches.
    """
    if accumulate_steps == 1:
        return compute(list(states), list(batches))

    def micro_batch(place):
        return [{name: x[place] for name, x in batch.items()} for batch in batches]

    def add(place, so_far):
        results = compute([r.state for r in so_far], micro_batch(place))
        return place + 1, [
            TowerResult(
                gradients=[
                    x + y for x, y in zip(a.gradients, b.gradients, strict=True)
                ],
                state=b.state,
                loss=a.loss + b.loss,
                correct=a.correct + b.correct,
            )
            for a, b in zip(so_far, results, strict=True)
        ]

    first = compute(list(states), micro_batch(0))
    _, totals = tf.while_loop(
        lambda place, _: place < accumulate_steps,
        add,
        (tf.constant(1), first),
        parallel_iterations=1,
    )
    return [
        total._replace(
            gradients=[gradient / accumulate_steps for gradient in total.gradients],
            loss=total.loss / accumulate_steps,
        )
        for total in totals
    ]


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
    """What an evaluation counts on one tower's share; images of weight 0 do not count.

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
    """How many images' largest logit is the label's; a float32 scalar.

    The label of a mixed image is that which has the largest share.
    """
    return tf.reduce_sum(_is_correct(logits, labels))


def _is_correct(logits, labels):
    if len(labels.shape) > 1:
        labels = tf.argmax(labels, axis=1, output_type=tf.int32)
    predictions = tf.argmax(logits, axis=1, output_type=labels.dtype)
    return tf.cast(predictions == labels, tf.float32)
