"""A synchronous step: the gradients of the towers, their mean, and the update."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.optim.losses import WeightDecay
from towers.optim.phases import Phase
from towers.optim.update import Update
from towers.optim.vector import Layout
from towers.parallel.compilation import Compilation
from towers.parallel.devices import device_of
from towers.parallel.finite import FiniteGuard
from towers.parallel.micro_batches import MicroBatches
from towers.parallel.reduce import on_each, squared_norm, tower_weights, weighted_mean
from towers.parallel.sharding.network import SplitTowers
from towers.parallel.strategies.strategy import Reduced, Strategy
from towers.parallel.towers import TowerResult, Towers

Batch = Mapping[str, tf.Tensor]
Metrics = list[tf.Tensor]

# Sums of losses are counted in this unit: exact, however calls divide the steps.
LOSS_UNIT = 2.0**-20


class ReducedGradients(NamedTuple):
    """Mean gradients with weight decay, and what they were computed from."""

    results: list[TowerResult]  # One per device.
    mean: Reduced  # Over the towers.
    per_copy: list[list[tf.Tensor]]  # [copy] vectors of the mean with weight decay.
    norm: tf.Tensor  # Global norm on the first copy, a scalar.
    decay_loss: tf.Tensor  # Loss of the weight decay, a scalar.


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The step of a run; a call in the graph makes one update."""

    strategy: Strategy
    sizes: Sequence[int]  # Images of a micro-batch per tower, over all processes.
    towers: Towers | SplitTowers | MicroBatches
    update_fn: Update
    trainable_variables: Sequence[keras.Variable]  # They have the regularizers.
    phases: Sequence[Phase]
    guard: FiniteGuard
    compilation: Compilation
    accumulate_steps: int  # Micro-batches of a step.
    read_rate_factor: Callable[[], tf.Tensor | None]

    def __call__(
        self, phase: int, batches: Sequence[Batch], previous: Metrics
    ) -> tuple[tf.Tensor, Metrics]:
        """Take a step of a phase of the run, with a batch per tower of this process.

        Returns:
            Whether the step was taken, with or without an update, a bool scalar; its
            metrics, see `read_metrics`, or the previous ones.
        """
        fetched, scale = self.strategy.fetch(), self.guard.read_scale()
        results = self.towers.gradients(phase, fetched, batches, scale)
        mean = self.strategy.mean_fn(results)
        gradients = self.add_weight_decay(phase, results, mean)
        return self.update(gradients, previous)

    def add_weight_decay(
        self, phase: int, results: list[TowerResult], mean: Reduced
    ) -> ReducedGradients:
        """Add the weight decay to the mean; gradients of frozen parameters are 0."""
        strategy = self.strategy
        frozen = self.phases[phase].frozen
        decays, gradients = [], []
        for copy, vectors in zip(strategy.copies, mean.gradients, strict=True):
            with tf.device(copy.device):
                layout = copy.layout.params
                add_decay = WeightDecay(self.trainable_variables, layout)
                decay, decayed = add_decay(copy.read(copy.params), vectors)
                decays.append(decay)
                gradients.append(zero_frozen(decayed, layout, frozen))
        # Norms come from the first copy: sums may round differently on other devices.
        shard_devices = [copy.device for copy in strategy.shards]
        norms = on_each(squared_norm, shard_devices, gradients[: strategy.num_shards])
        with tf.device(strategy.primary_device):
            norm = tf.sqrt(_sum(norms))
            decay = _sum(decays[: strategy.num_shards])
        return ReducedGradients(results, mean, gradients, norm, decay)

    def update(
        self, gradients: ReducedGradients, previous: Metrics
    ) -> tuple[tf.Tensor, Metrics]:
        """Update all copies, unless the guard refuses the step or skips its update."""
        mean, norm = gradients.mean, gradients.norm
        waits_for_host = self.compilation.device.waits_for_host
        with tf.device(self.strategy.primary_device):
            running = self.guard.is_running()
            loss = weighted_mean(tf.unstack(mean.losses), tower_weights(self.sizes))
            total_loss = loss + tf.cast(gradients.decay_loss, loss.dtype)
            # If a tower is not finite, the mean is not.
            is_finite = tf.math.is_finite(norm + total_loss)
            metrics = self._metrics(loss, total_loss, norm, mean)
            sums = _add_to_sums(loss, mean, is_finite & running, previous)
            if not waits_for_host:
                metrics = tf.where(running, metrics, previous[-1])
            makes_update, is_taken = self.guard.decide(is_finite, running)
            rate_factor = self.read_rate_factor()
        squares = self._squares(gradients)

        def apply(condition=None):
            self._apply_gradients(gradients, _sum(squares), rate_factor, condition)
            return tf.constant(0)

        if waits_for_host:
            tf.cond(makes_update, apply, lambda: tf.constant(0))
        else:
            apply(makes_update)
        for copy in self.strategy.copies:
            with tf.device(copy.device):
                copy.step.assign_add(tf.cast(is_taken, tf.int64), read_value=False)
        return is_taken, [*sums, metrics]

    def _apply_gradients(self, gradients, squares, rate_factor, condition):
        """Assign to every copy its values after the step, except the number of steps.

        If `condition`, a bool scalar, is False, the old values stay.
        """
        updated, readers = None, list(self.strategy.readers)
        for index, copy in enumerate(self.strategy.copies):
            state, variables = gradients.mean.states[index], copy.variables()[:-1]
            with tf.device(copy.device):
                if updated is None or self.update_fn.optimizer.elementwise:
                    layout, *values = copy.update_arguments()
                    on_gpu = device_of(copy.device).stacks_updates
                    compute = functools.partial(self.update_fn, layout, on_gpu=on_gpu)
                    compilation = self.compilation
                    if compilation.xla and compilation.device.updates_by_xla:
                        compute = tf.function(
                            compute, autograph=False, jit_compile=True
                        )
                    updated = compute(
                        *values,
                        gradients.per_copy[index],
                        gradients.norm,
                        squares,
                        rate_factor,
                    )
                else:  # Sums of this optimizer may round differently on this device.
                    updated = tf.nest.map_structure(tf.identity, updated)
                params, slots = updated
                ema_decay = self.update_fn.ema_decay
                averages = copy.moved_averages([*params, *state], ema_decay)
                result = gradients.results[readers.index(index)]
                integers = map(tf.identity, result.integers)
                vectors = itertools.chain(*slots.values())
                values = [*params, *state, *integers, *vectors, *averages]
                olds = copy.read(variables)
                for variable, old, new in zip(variables, olds, values, strict=True):
                    kept = new if condition is None else tf.where(condition, new, old)
                    variable.assign(kept, read_value=False)

    def _squares(self, gradients):
        """Return the sums of squares per parameter of each shard, if they are used."""
        if not self.update_fn.optimizer.needs_norms:
            return [None]
        shards = self.strategy.shards
        return on_each(
            lambda copy, vectors: self.update_fn.squares(
                *copy.update_arguments(), vectors, gradients.norm
            ),
            [copy.device for copy in shards],
            shards,
            gradients.per_copy[: len(shards)],
        )

    def _metrics(self, loss, total_loss, norm, mean):
        scale = self.guard.read_scale()
        scale = tf.zeros([]) if scale is None else scale
        values = loss, mean.correct, total_loss, norm, scale
        values = [tf.cast(x, loss.dtype) for x in values]
        return tf.concat([tf.stack(values), mean.losses], 0)

    def zero_metrics(self) -> Metrics:
        """Return metrics of the same form, with which a loop begins."""
        dtype = tf.as_dtype(self.trainable_variables[0].dtype)
        dtype = dtype if dtype.size > 2 else tf.float32
        with tf.device(self.strategy.primary_device):
            sums = tf.zeros([], tf.float64), tf.zeros([2], dtype)
            return [*sums, tf.zeros([5 + len(self.sizes)], dtype)]

    def read_metrics(self, metrics: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the metrics of a step by name, except its learning rate.

        "sums" are over all steps of the loop, see `Trainer.train`.
        """
        loss_units, (correct_sum, num_summed), values = metrics
        loss, correct, *others = values
        total_loss, norm, scale, *losses = others
        num_images = sum(self.sizes) * self.accumulate_steps
        return {
            "loss": loss,
            "total_loss": total_loss,
            "tower_losses": np.array(losses, values.dtype),
            "accuracy": correct / num_images,
            "gradient_norm": norm,
            **({"loss_scale": scale} if self.guard.scale_loss else {}),
            "sums": (loss_units * LOSS_UNIT, correct_sum, num_summed),
        }


def _add_to_sums(loss, mean, is_counted, previous):
    units = tf.round(tf.cast(loss, tf.float64) / LOSS_UNIT)
    counts = tf.stack([tf.cast(mean.correct, previous[1].dtype), 1.0])
    return [
        total + tf.where(is_counted, x, 0.0)
        for total, x in zip(previous, (units, counts), strict=False)
    ]


def zero_frozen(
    vectors: list[tf.Tensor], layout: Layout, frozen: frozenset[str]
) -> list[tf.Tensor]:
    """Set gradients of frozen parameters to 0, also if weight decay was added."""
    if not frozen:
        return vectors
    masks = layout.columns([float(name not in frozen) for name in layout.places])
    return [
        vector
        if isinstance(mask, float) and mask == 1
        else vector * tf.constant(mask, vector.dtype)
        for vector, mask in zip(vectors, masks, strict=True)
    ]


def _sum(values):
    """Add tensors up; a single value, or None, is returned unchanged."""
    return values[0] if len(values) == 1 or values[0] is None else tf.add_n(values)
