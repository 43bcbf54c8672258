"""One synchronous step, from the batches of the towers to the assignments."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.optim.losses import WeightDecay
from towers.optim.phases import Phase
from towers.optim.update import Update
from towers.parallel.compilation import Compilation
from towers.parallel.copies import Values
from towers.parallel.finite import FiniteGuard
from towers.parallel.loop import around_loop, inside_of_loop
from towers.parallel.reduce import on_each, squared_norm, tower_weights, weighted_mean
from towers.parallel.sharding.network import SplitTowers
from towers.parallel.strategies.strategy import Mean, Strategy
from towers.parallel.towers import TowerResult, Towers

Batch = Mapping[str, tf.Tensor]
Metrics = list[tf.Tensor]

# Losses are summed up as multiples of it.
LOSS_UNIT = 2.0**-20


class Gradients(NamedTuple):
    """The gradients of a step."""

    results: list[TowerResult]  # per device, of its tower
    mean: Mean  # over the towers
    # [copy] vectors of the mean with the weight decay; 0 of frozen parameters.
    per_copy: list[list[tf.Tensor]]
    norm: tf.Tensor  # of the first copy's gradient, a scalar
    decay: tf.Tensor  # the loss of the weight decay, a scalar


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The step of a run; called with batches in the graph, it makes one update."""

    strategy: Strategy
    sizes: Sequence[int]  # images of a (micro-)batch per tower, over all processes
    towers: Towers | SplitTowers
    update_fn: Update
    trainable_variables: Sequence[keras.Variable]  # they have the regularizers
    phases: Sequence[Phase]
    guard: FiniteGuard
    compilation: Compilation
    accumulate_steps: int  # micro-batches of a step
    read_rate_factor: Callable[[], tf.Tensor | None]

    def __call__(
        self, phase: int, batches: Sequence[Batch], previous: Metrics
    ) -> tuple[tf.Tensor, Metrics]:
        """Take one step with a batch per tower of this process, in a phase of the run;
        return whether it was taken, and its metrics, see `update`.
        """
        return self.update(self.gradients(phase, batches), previous)

    def gradients(self, phase: int, batches: Sequence[Batch]) -> Gradients:
        """Return the mean gradient over the batches; no variable changes."""
        compute = functools.partial(
            self.towers.gradients, phase, loss_scale=self.guard.read_scale()
        )
        fetched = self.strategy.fetch()
        results = accumulate(compute, fetched, batches, self.accumulate_steps)
        mean = self.strategy.mean_fn(results)
        return self._with_weight_decay(phase, results, mean)

    def _with_weight_decay(self, phase, results, mean):
        """Add the weight decay to the mean gradient, once; nothing of frozen
        parameters.
        """
        strategy = self.strategy
        decays, gradients = [], []
        for copy, vectors in zip(strategy.copies, mean.gradients, strict=True):
            with tf.device(copy.device):
                layout = copy.layout.params
                add_decay = WeightDecay(self.trainable_variables, layout)
                decay, vectors = add_decay(copy.read(copy.params), vectors)
                decays.append(decay)
                frozen = self.phases[phase].frozen
                gradients.append(zero_frozen(vectors, layout, frozen))
        # Norms come from the first copy: sums may round differently on other devices.
        shard_devices = [copy.device for copy in strategy.shards]
        norms = on_each(squared_norm, shard_devices, gradients[: strategy.num_shards])
        with tf.device(strategy.home):
            norm = tf.sqrt(_sum(norms))
            decay = _sum(decays[: strategy.num_shards])
        return Gradients(results, mean, gradients, norm, decay)

    def update(
        self, gradients: Gradients, previous: Metrics
    ) -> tuple[tf.Tensor, Metrics]:
        """Update all copies, unless the guard refuses the step or skips its update.
        Return whether the step was taken, with or without an update, a bool scalar;
        and its metrics, see `read_metrics`, or the previous ones.
        """
        strategy, home = self.strategy, self.strategy.home
        mean, norm = gradients.mean, gradients.norm
        with tf.device(home):
            running = self.guard.is_running()
            loss = weighted_mean(tf.unstack(mean.losses), tower_weights(self.sizes))
            total_loss = loss + tf.cast(gradients.decay, loss.dtype)
            # A tower that is not finite makes the mean so.
            is_finite = tf.math.is_finite(norm + total_loss)
            metrics = self._metrics(loss, total_loss, norm, mean)
            sums = self._sums(loss, mean, is_finite & running, previous)
            if not self.compilation.on_cpus:
                metrics = tf.where(running, metrics, previous[-1])
            makes_update, is_taken = self.guard.decide(is_finite, running)
            factor = self.read_rate_factor()
        squares = [None]
        if self.update_fn.optimizer.needs_norms:
            squares = on_each(
                lambda copy, vectors: self.update_fn.squares(
                    *copy.update_arguments(), vectors, norm
                ),
                [copy.device for copy in strategy.shards],
                strategy.shards,
                gradients.per_copy[: strategy.num_shards],
            )

        # The update of every copy.
        def update(condition=None):
            self._update_copies(gradients, _sum(squares), factor, condition)
            return tf.constant(0)

        if self.compilation.on_cpus:
            tf.cond(makes_update, update, lambda: tf.constant(0))
        else:
            update(makes_update)
        for copy in strategy.copies:
            with tf.device(copy.device):
                copy.step.assign_add(tf.cast(is_taken, tf.int64), read_value=False)
        return is_taken, [*sums, metrics]

    def _metrics(self, loss, total_loss, norm, mean):
        scale = self.guard.read_scale()
        scale = tf.zeros([]) if scale is None else scale
        values = loss, mean.correct, total_loss, norm, scale
        values = [tf.cast(x, loss.dtype) for x in values]
        return tf.concat([tf.stack(values), mean.losses], 0)

    def _sums(self, loss, mean, is_counted, previous):
        """Sums of integers over the steps: exact, however calls divide the steps."""
        units = tf.round(tf.cast(loss, tf.float64) / LOSS_UNIT)
        counts = tf.stack([tf.cast(mean.correct, previous[1].dtype), 1.0])
        return [
            total + tf.where(is_counted, x, 0.0)
            for total, x in zip(previous, (units, counts), strict=False)
        ]

    def zero_metrics(self) -> Metrics:
        """Metrics of the same form, for a loop to begin with."""
        dtype = tf.as_dtype(self.trainable_variables[0].dtype)
        dtype = dtype if dtype.size > 2 else tf.float32
        with tf.device(self.strategy.home):
            sums = tf.zeros([], tf.float64), tf.zeros([2], dtype)
            return [*sums, tf.zeros([5 + len(self.sizes)], dtype)]

    def read_metrics(self, metrics: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The metrics of a step by name, but for its learning rate; "sums" of all steps
        of the loop, see `Trainer.train`.
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

    def _update_copies(self, gradients, squares, rate_factor, condition):
        """Assigns to every copy its values after the step, except the number of steps;
        where `condition`, a bool scalar, is False the old values.
        """
        updated, readers = None, list(self.strategy.readers)
        for index, copy in enumerate(self.strategy.copies):
            state, variables = gradients.mean.states[index], copy.variables()[:-1]
            with tf.device(copy.device):
                if updated is None or self.update_fn.optimizer.elementwise:
                    layout, *values = copy.update_arguments()
                    on_gpu = "GPU" in copy.device
                    update = functools.partial(self.update_fn, layout, on_gpu=on_gpu)
                    if self.compilation.xla and not self.compilation.on_cpus:
                        update = tf.function(update, autograph=False, jit_compile=True)
                    updated = update(
                        *values,
                        gradients.per_copy[index],
                        gradients.norm,
                        squares,
                        rate_factor,
                    )
                else:  # its sums may round differently here
                    updated = tf.nest.map_structure(tf.identity, updated)
                params, slots = updated
                ema_decay = self.update_fn.ema_decay
                averages = copy.moved_averages([*params, *state], ema_decay)
                result = gradients.results[readers.index(index)]
                integers = map(tf.identity, result.integers)
                slots = sum(slots.values(), [])
                values = [*params, *state, *integers, *slots, *averages]
                olds = copy.read(variables)
                for variable, old, new in zip(variables, olds, values, strict=True):
                    if condition is not None:
                        new = tf.where(condition, new, old)
                    variable.assign(new, read_value=False)


def zero_frozen(vectors, layout, frozen):
    """The gradients, 0 for frozen parameters also where weight decay was added."""
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
    """The sum; a single value, or None, is returned unchanged."""
    return values[0] if len(values) == 1 or values[0] is None else tf.add_n(values)


def accumulate(
    compute: Callable[[list, list], list[TowerResult]],
    fetched: Sequence[Values],
    batches: Sequence[Batch],
    accumulate_steps: int,
) -> list[TowerResult]:
    """Return the gradients over several micro-batches, one after the other.

    Only the activations of one micro-batch are in memory. Gradients and losses are
    means over all of them; the model state of each device goes from one to the next.
    `compute` takes values per device and a micro-batch per tower.
    """
    if accumulate_steps == 1:
        return compute(fetched, batches)
    batches = [
        {name: _in_micro_batches(x, accumulate_steps) for name, x in batch.items()}
        for batch in batches
    ]

    def part_of(micro_batch):
        return [
            {name: _next_to(x, lambda x=x: x[micro_batch]) for name, x in batch.items()}
            for batch in batches
        ]

    # Results of a loop and its variables have no device. What is computed of them alone
    # would go to the first GPU, so it is put next to the results of the first turn.
    def add(micro_batch, totals):
        current = [
            values._replace(state=total.state, integers=total.integers)
            for values, total in zip(fetched, totals, strict=True)
        ]
        with inside_of_loop():
            results = compute(current, part_of(micro_batch))
            return micro_batch + 1, [
                TowerResult(
                    gradients=_each(tf.add, begun.gradients, a.gradients, b.gradients),
                    # An unchanged entry is a read variable, which names no device.
                    state=_each(tf.identity, begun.state, b.state),
                    integers=[_next_to(begun.loss, tf.identity, x) for x in b.integers],
                    loss=_next_to(begun.loss, tf.add, a.loss, b.loss),
                    correct=_next_to(begun.loss, tf.add, a.correct, b.correct),
                )
                for begun, a, b in zip(first, totals, results, strict=True)
            ]

    def is_wanted(micro_batch, _):
        return micro_batch < accumulate_steps

    def divide(total):
        return total / accumulate_steps

    first = compute(list(fetched), part_of(0))
    begin = tf.constant(1), first
    with around_loop():
        _, totals = tf.while_loop(is_wanted, add, begin, parallel_iterations=1)
    return [
        total._replace(
            gradients=_each(divide, begun.gradients, total.gradients),
            loss=_next_to(begun.loss, divide, total.loss),
        )
        for begun, total in zip(first, totals, strict=True)
    ]


def _in_micro_batches(x, count):
    size = x.shape[0] // count
    return _next_to(x, tf.reshape, x, [count, size, *x.shape[1:]])


def _each(function, neighbors, *lists):
    """The function of elements of some lists, each on the device of its neighbor."""
    return [
        _next_to(neighbor, function, *values)
        for neighbor, *values in zip(neighbors, *lists, strict=True)
    ]


def _next_to(neighbor, function, *values):
    """The function of some tensors, on the device of the tensor `neighbor`."""
    with tf.device(neighbor.device):
        return function(*values)
