"""The towers: one after the other computes, on its own device, the loss of its share of
a batch and the gradients.

`Towers.gradients` has the loop, `tower_gradients` and `tower_loss` are what it calls. A
tower is a pure function of (vectors, batch): it creates no variable and knows no other
tower.
"""

import collections
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.models.layers.normalization import ramping, taking_moments
from towers.optim.losses import LossFn, mean_loss
from towers.optim.phases import Phase, resize_to_phase
from towers.parallel import compilation
from towers.parallel.compilation import Compilation, TracedOnce, optimized_for_cpu
from towers.parallel.copies import NetworkLayout, Values, copies_on
from towers.parallel.recompute import RecomputedNetwork
from towers.parallel.reduce import in_dtype, squared_norm


class TowerResult(NamedTuple):
    """The result of a tower on its share of a batch, or the part of one of its devices.
    Weight decay does not depend on the images: it is added to the mean over the towers.
    """

    gradients: list[tf.Tensor]  # of the loss, vectors
    state: list[tf.Tensor]  # vectors of the new model state
    integers: list[tf.Tensor]  # its entries that are not floats
    loss: tf.Tensor  # mean over the share, a scalar
    correct: tf.Tensor  # number of images that are predicted correctly, float scalar

    def is_finite(self) -> tf.Tensor:
        """A bool scalar: the loss and all gradients are finite."""
        norm = squared_norm(self.gradients)
        return tf.math.is_finite(self.loss) & tf.math.is_finite(norm)


class Towers:
    """The whole network on every tower's device; only its `stateless_call` is needed.

    `sharding.network.SplitTowers` has the same functions and attribute. With
    `recompute` activations are computed again in the backward pass.
    """

    transferred_bytes = 0  # of activations and their gradients that cross devices

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
        # Phases that are alike but for their end share a trace.
        self._phases = [
            phase._replace(end_step=0, model=networks[phase.model]) for phase in phases
        ]

        plain = functools.partial(tower_gradients, loss_fn=loss_fn, layout=layout)

        def compiled(phase, *args):
            call = functools.partial(plain, phase)
            return tf.function(call, autograph=False, jit_compile=True)(*args)

        def logits(_, *args):
            return tower_logits(phases[-1].model, layout, *args)

        # Traced once for all towers with as many images, and copied to their devices.
        optimize = optimized_for_cpu if compilation.optimizes_towers else None
        self._tower_gradients = TracedOnce(
            compiled if compilation.xla else plain, optimize
        )
        self._tower_logits = TracedOnce(logits, optimize)

    def gradients(
        self,
        phase: int,
        fetched: Sequence[Values],
        batches: Sequence[Mapping[str, tf.Tensor]],
        loss_scale: tf.Tensor | None = None,
        first_tower: int = 0,
    ) -> list[TowerResult]:
        """Return the result of each tower on its share of a batch, on its device.

        Args:
            phase: number of the phase of the run.
            fetched: parameters and model state on each tower's device.
            batches: share of each tower: inputs by name, "labels", and "sample_weights"
                if there are any.
            loss_scale: see `tower_gradients`.
            first_tower: number of the tower of the first entries.
        """
        phase, results = self._phases[phase], []
        for tower, (values, batch) in enumerate(
            zip(fetched, batches, strict=True), start=first_tower
        ):
            with tf.device(self._devices[tower]):
                if self._teacher:
                    batch = self._teacher(batch, tower)
                batch = resize_to_phase(batch, phase.model)
                result = self._tower_gradients(
                    phase, values, batch, loss_scale, name=f"tower_{tower}"
                )
                results.append(result)
        return results

    def logits(
        self, fetched: Sequence[Values], batches: Sequence[Mapping[str, tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Return the logits of each tower's share in inference, in the last phase; a
        small batch may be cut into fewer shares than there are towers.
        """
        names = {x.name for x in self._phases[-1].model.inputs}
        logits = []
        for tower, batch in enumerate(batches):
            with tf.device(self._devices[tower]):
                inputs = {name: x for name, x in batch.items() if name in names}
                name = f"tower_{tower}"
                logits.append(
                    self._tower_logits(None, fetched[tower], inputs, name=name)
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
    """Return the loss of one tower's share and its gradients.

    Call it inside the `tf.device` of the tower: the gradient operations then land there
    too.

    Args:
        phase: of the run: the network, whose own variables are not read, and the
            parameters whose gradient is zero.
        values: parameters and model state, vectors.
        batch: the model's inputs by name, "labels", and "sample_weights" and
            "teacher_logits" if there are any.
        loss_scale: the loss is multiplied by it before it is differentiated, and the
            gradients are divided by it.

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
    # Gradients of the views are parts of the vectors' gradients, and cost nothing.
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
    """Return the mean loss of one tower's share, a scalar; the number of its images
    that are predicted correctly, a float scalar; and the new model state.
    """
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
    """Raises ValueError where a parameter that is not frozen has no gradient."""
    for name, gradient in zip(layout.params.places, gradients, strict=True):
        if gradient is None and name not in frozen:
            raise ValueError(
                f"there is no gradient for {name}: the loss does not depend on it"
            )


def unscaled(
    gradients: Sequence[tf.Tensor], loss_scale: tf.Tensor | float
) -> list[tf.Tensor]:
    """The gradients over the factor by which their loss was multiplied."""
    return [g / in_dtype(loss_scale, g.dtype) for g in gradients]


def tower_logits(
    model: keras.Model,
    layout: NetworkLayout,
    values: Values,
    batch: Mapping[str, tf.Tensor],
) -> tf.Tensor:
    """The logits of one tower's share in inference."""
    params, state = layout.params.views(values.params), layout.state_views(values)
    return model.stateless_call(
        params, state, model_inputs(model, batch), training=False
    )[0]


def tower_counts(
    loss_fn: LossFn, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """The float64 scalars "correct", "images" and "loss", the sum over the images of
    one tower's share; images whose mask is 0 do not count.
    """
    mask = tf.cast(batch["mask"], tf.float64)

    def count(values):
        return tf.reduce_sum(mask * tf.cast(values, tf.float64))

    return {
        "correct": count(_is_correct(loss_fn, logits, batch["labels"])),
        "images": tf.reduce_sum(mask),
        "loss": count(loss_fn(logits, batch["labels"])),
    }


def model_input(batch: Mapping[str, tf.Tensor], x: keras.KerasTensor) -> tf.Tensor:
    """An input of a model; an evaluation has no noise, and needs none."""
    value = batch.get(x.name)
    if value is None:
        value = tf.zeros([tf.shape(batch["images"])[0], *x.shape[1:]], x.dtype)
    return value


def model_inputs(
    model: keras.Model, batch: Mapping[str, tf.Tensor]
) -> list[tf.Tensor] | tf.Tensor:
    """All inputs of a model, or the only one; see `model_input`."""
    inputs = [model_input(batch, x) for x in model.inputs]
    return inputs if len(inputs) > 1 else inputs[0]


def count_correct(loss_fn: LossFn, logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Number of correct predictions, a float32 scalar.

    The largest logit is the label's, of a mixed image the label with the largest share.
    With a loss of several labels an image: the logits of all labels, or shares above
    1/2, are at least 0 and others are not.
    """
    return tf.reduce_sum(_is_correct(loss_fn, logits, labels))


def _is_correct(loss_fn, logits, labels):
    if getattr(loss_fn, "multi_label", False):
        is_right = (logits >= 0) == (labels > 0.5)
        return tf.cast(tf.reduce_all(is_right, axis=1), tf.float32)
    if len(labels.shape) > 1:
        labels = tf.argmax(labels, axis=1)
    # int64, because a GPU has int32 compared by the host.
    return tf.cast(tf.argmax(logits, axis=1) == tf.cast(labels, tf.int64), tf.float32)


class Teacher:
    """Adds the logits of a trained network in inference, which takes images alone and
    has a copy on every tower's device, to the batches of the towers (distillation).
    """

    def __init__(self, model: keras.Model, devices: Sequence[str]):
        layout, self._copies = copies_on(model, devices)
        self._devices, self.checksum = devices, 0  # a CRC-32 of the values
        for variable in model.weights:
            self.checksum = zlib.crc32(variable.numpy().tobytes(), self.checksum)
        on_cpus = compilation.choose(devices, [model]).optimizes_towers

        def logits(_, values, batch):
            return tower_logits(model, layout, values, batch)

        self._logits = TracedOnce(logits, optimized_for_cpu if on_cpus else None)

    def __call__(
        self, batch: Mapping[str, tf.Tensor], tower: int
    ) -> dict[str, tf.Tensor]:
        """The batch of a tower with "teacher_logits", on the device in scope."""
        values, images = self._copies[tower].read(), {"images": batch["images"]}
        logits = self._logits(None, values, images, name=f"teacher_{tower}")
        return {**batch, "teacher_logits": logits}

    def variable_bytes(self) -> collections.Counter[str]:
        """Device -> bytes of the copies there."""
        sizes = collections.Counter()
        for device, copy in zip(self._devices, self._copies, strict=True):
            for variable in sum(copy, []):
                sizes[device] += variable.shape.num_elements() * variable.dtype.size
        return sizes
