"""The towers: each computes, on its own device, the loss and gradients of its share.

`Towers.gradients` is the loop over the towers; for each of them `tower_gradients`
differentiates `tower_loss`. A tower is a pure function of (vectors, batch): it creates
no variable and does not depend on other towers.
"""

import collections
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.models.layers.normalization import ramping, taking_moments
from towers.optim.losses import LossFn, mean_loss
from towers.optim.phases import Phase, resize_to_phase
from towers.parallel import compilation
from towers.parallel.compilation import Compilation, TracedOnce, optimized_for_cpu
from towers.parallel.copies import NetworkLayout, Values, copies_on, num_bytes
from towers.parallel.recompute import RecomputedNetwork
from towers.parallel.reduce import in_dtype, squared_norm


class TowerResult(NamedTuple):
    """The result of a tower on its share of a batch, or of one device of the tower."""

    gradients: list[tf.Tensor]  # Vectors; without weight decay.
    state: list[tf.Tensor]  # Vectors of the new model state.
    integers: list[tf.Tensor]  # Its entries that are not floats.
    loss: tf.Tensor  # Mean over the share, a scalar.
    correct: tf.Tensor  # Number of correct predictions, a float scalar.

    def is_finite(self) -> tf.Tensor:
        """Return whether the loss and all gradients are finite, a bool scalar."""
        norm = squared_norm(self.gradients)
        return tf.math.is_finite(self.loss) & tf.math.is_finite(norm)


class Towers:
    """The full network on the device of each tower.

    The networks need `stateless_call` and `inputs`. `sharding.network.SplitTowers` has
    the same interface. With `recompute`, activations are computed again in the backward
    pass.
    """

    transferred_bytes = 0  # Bytes of activations and gradients that cross devices.

    def __init__(
        self,
        phases: Sequence[Phase],
        loss_fn: LossFn,
        layout: NetworkLayout,
        devices: Sequence[str],
        compilation: Compilation,
        teacher: "Teacher | None" = None,
        recompute: bool = False,
    ):
        self._devices, self._teacher = devices, teacher
        networks = {phase.model: phase.model for phase in phases}
        if recompute:
            networks = {x: RecomputedNetwork(x, compilation.xla) for x in networks}
        # Phases that differ only in their ends share a trace.
        self._phases = [
            phase._replace(end_step=0, model=networks[phase.model]) for phase in phases
        ]
        # Towers with equally many images share a trace.
        optimize = optimized_for_cpu if compilation.optimizes_towers else None
        self._gradient_fns = {}
        for phase in self._phases:
            compute = functools.partial(
                tower_gradients, phase, loss_fn=loss_fn, layout=layout
            )
            if compilation.xla:
                compute = tf.function(compute, autograph=False, jit_compile=True)
            self._gradient_fns[phase] = TracedOnce(compute, optimize)
        self._logits_fn = TracedOnce(
            functools.partial(tower_logits, phases[-1].model, layout), optimize
        )

    def gradients(
        self,
        phase_index: int,
        fetched: Sequence[Values],
        batches: Sequence[Mapping[str, tf.Tensor]],
        loss_scale: tf.Tensor | None = None,
        first_tower: int = 0,
    ) -> list[TowerResult]:
        """Return the result of each tower on its share of a batch, on its device.

        `fetched` and `batches` have an entry for each tower from `first_tower` on; see
        `tower_gradients`.
        """
        phase, results = self._phases[phase_index], []
        gradient_fn = self._gradient_fns[phase]
        per_tower = zip(self._devices[first_tower:], fetched, batches, strict=False)
        for tower, (device, values, batch) in enumerate(per_tower, start=first_tower):
            with tf.device(device):
                taught = self._teacher(batch, tower) if self._teacher else batch
                inputs = resize_to_phase(taught, phase.model)
                # Calls `tower_gradients`, which differentiates `tower_loss`.
                scope = f"tower_{tower}"
                results.append(gradient_fn(values, inputs, loss_scale, name=scope))
        return results

    def logits(
        self, fetched: Sequence[Values], batches: Sequence[Mapping[str, tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Return the logits of each tower's share in inference, in the last phase."""
        names = {x.name for x in self._phases[-1].model.inputs}
        logits = []
        for tower, batch in enumerate(batches):
            with tf.device(self._devices[tower]):
                inputs = {name: x for name, x in batch.items() if name in names}
                logits.append(
                    self._logits_fn(fetched[tower], inputs, name=f"tower_{tower}")
                )
        return logits


def tower_gradients(
    phase: Phase,
    values: Values,
    batch: Mapping[str, tf.Tensor],
    loss_scale: tf.Tensor | None = None,
    *,
    loss_fn: LossFn,
    layout: NetworkLayout,
) -> TowerResult:
    """Return the loss of one tower's share of a batch, and its gradients.

    Call it inside the `tf.device` of the tower, which places gradient operations there.

    Args:
        phase: the network, whose own variables are not read, and frozen parameters,
            whose gradient is zero.
        values: parameters and model state, vectors.
        batch: the model's inputs by name, "labels", and "sample_weights" and
            "teacher_logits" if there are any.
        loss_scale: factor on the loss during differentiation.
        loss_fn: (logits, labels[, teacher logits]) -> loss of each image.
        layout: of the vectors.

    Raises:
        ValueError: the loss does not depend on a parameter that is not frozen.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values.params)
        views = layout.params.views(values.params)
        params = [
            tf.stop_gradient(view) if name in phase.frozen else view
            for name, view in zip(layout.params.places, views, strict=True)
        ]
        limit, state = values.ramp(), layout.state_views(values)
        with ramping(limit), taking_moments() as moments:
            loss, correct, new_state = tower_loss(
                phase.model, params, state, batch, loss_fn
            )
        scaled = loss if loss_scale is None else loss * tf.cast(loss_scale, loss.dtype)
    # Gradients of the views are parts of the gradients of the vectors, at no cost.
    gradients, view_gradients = tape.gradient(scaled, (values.params, views))
    check_complete(view_gradients, layout, phase.frozen)
    gradients = [
        tf.zeros_like(vector) if gradient is None else gradient
        for vector, gradient in zip(values.params, gradients, strict=True)
    ]
    if loss_scale is not None:
        gradients = unscaled(gradients, loss_scale)
    state, integers = layout.pack_state(new_state)
    state = layout.move(values.state, state, moments, limit)
    return TowerResult(gradients, state, integers, loss, correct)


def tower_loss(
    model: keras.Model,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    batch: Mapping[str, tf.Tensor],
    loss_fn: LossFn,
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
    """Return mean loss, number of correct predictions and new state of a share."""
    inputs = model_inputs(model, batch)
    logits, state = model.stateless_call(params, state, inputs, training=True)
    losses = loss_fn(logits, *loss_targets(batch))
    loss = mean_loss(losses, logits, batch.get("sample_weights"))
    correct = count_correct(loss_fn, logits, batch["labels"])
    return loss, correct, [tf.convert_to_tensor(x) for x in state]


def loss_targets(batch: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
    """Return the arguments of the loss after the logits: labels, teacher logits."""
    return [batch[name] for name in ("labels", "teacher_logits") if name in batch]


def check_complete(
    gradients: Sequence[tf.Tensor | None], layout: NetworkLayout, frozen: frozenset[str]
) -> None:
    """Raise ValueError if a parameter that is not frozen has no gradient."""
    for name, gradient in zip(layout.params.places, gradients, strict=True):
        if gradient is None and name not in frozen:
            raise ValueError(f"{name} has no gradient: the loss does not depend on it")


def unscaled(
    gradients: Sequence[tf.Tensor], loss_scale: tf.Tensor | float
) -> list[tf.Tensor]:
    """Divide gradients by the factor on their loss."""
    return [g / in_dtype(loss_scale, g.dtype) for g in gradients]


def tower_logits(
    model: keras.Model,
    layout: NetworkLayout,
    values: Values,
    batch: Mapping[str, tf.Tensor],
) -> tf.Tensor:
    """Return the logits of one tower's share in inference."""
    params, state = layout.params.views(values.params), layout.state_views(values)
    return model.stateless_call(
        params, state, model_inputs(model, batch), training=False
    )[0]


def tower_counts(
    loss_fn: LossFn, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Return float64 sums over a share; images whose mask is 0 do not count."""
    mask = tf.cast(batch["mask"], tf.float64)

    def count(values):
        return tf.reduce_sum(mask * tf.cast(values, tf.float64))

    return {
        "correct": count(_is_correct(loss_fn, logits, batch["labels"])),
        "images": tf.reduce_sum(mask),
        "loss": count(loss_fn(logits, batch["labels"])),
    }


def model_input(batch: Mapping[str, tf.Tensor], x: keras.KerasTensor) -> tf.Tensor:
    """Return an input of a model; noise, which evaluations do not have, is zero."""
    value = batch.get(x.name)
    if value is None:
        value = tf.zeros([tf.shape(batch["images"])[0], *x.shape[1:]], x.dtype)
    return value


def model_inputs(
    model: keras.Model, batch: Mapping[str, tf.Tensor]
) -> list[tf.Tensor] | tf.Tensor:
    """Return all inputs of a model, or the only one; see `model_input`."""
    inputs = [model_input(batch, x) for x in model.inputs]
    return inputs if len(inputs) > 1 else inputs[0]


def count_correct(loss_fn: LossFn, logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return the number of correct predictions, a float32 scalar.

    A prediction is correct if the largest logit is that of the label, or of the largest
    share of a mixed image. With several labels per image, the logits of exactly the
    labels (shares above 1/2) must be at least 0. With a NaN logit none is correct.
    """
    return tf.reduce_sum(_is_correct(loss_fn, logits, labels))


def _is_correct(loss_fn, logits, labels):
    if getattr(loss_fn, "multi_label", False):
        is_right = ((logits >= 0) == (labels > 0.5)) & ~tf.math.is_nan(logits)
        return tf.cast(tf.reduce_all(is_right, axis=1), tf.float32)
    if len(labels.shape) > 1:
        labels = tf.argmax(labels, axis=1)
    # GPUs compare int64; int32 is compared on the host.
    return tf.cast(top_class(logits) == tf.cast(labels, tf.int64), tf.float32)


def top_class(logits: tf.Tensor) -> tf.Tensor:
    """Return the class of the largest logit, int64 [n]; -1 if a logit is NaN."""
    is_nan = tf.reduce_any(tf.math.is_nan(logits), axis=1)
    return tf.where(is_nan, tf.constant(-1, tf.int64), tf.argmax(logits, axis=1))


class Teacher:
    """Adds the logits of a trained network to the batches of towers (distillation).

    The network takes only images, and has a copy on the device of every tower.
    """

    def __init__(self, model: keras.Model, devices: Sequence[str]):
        layout, self._copies = copies_on(model, devices)
        self._devices = devices
        optimizes = compilation.choose(devices, [model]).optimizes_towers
        self._logits_fn = TracedOnce(
            functools.partial(tower_logits, model, layout),
            optimized_for_cpu if optimizes else None,
        )

    def __call__(
        self, batch: Mapping[str, tf.Tensor], tower: int
    ) -> dict[str, tf.Tensor]:
        """Return the batch of a tower with "teacher_logits", on the device in scope."""
        values, images = self._copies[tower].read(), {"images": batch["images"]}
        logits = self._logits_fn(values, images, name=f"teacher_{tower}")
        return {**batch, "teacher_logits": logits}

    def variable_bytes(self) -> collections.Counter[str]:
        """Return device -> bytes of the copies there."""
        sizes: collections.Counter[str] = collections.Counter()
        for device, copy in zip(self._devices, self._copies, strict=True):
            sizes[device] += num_bytes(itertools.chain(*copy))
        return sizes
