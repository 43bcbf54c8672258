"""One synchronous step, from the batch to the assignments."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.models.variables import variable_names
from towers.optim import losses
from towers.optim.phases import Phase, zero_frozen
from towers.optim.update import Update
from towers.parallel.devices import HOST
from towers.parallel.gradients import (
    split_batch,
    squared_norm,
    tower_weights,
    weighted_mean,
)
from towers.parallel.graphs import while_loop
from towers.parallel.loss_scale import LossScale
from towers.parallel.network import Network
from towers.parallel.not_finite import SkippedSteps
from towers.parallel.strategy import Mean, Strategy
from towers.parallel.tower import TowerResult
from towers.parallel.variables import Fetched


class Reduced(NamedTuple):
    """Everything of a step that comes before the update.

    Attributes:
        results: per device.
        mean: gradients with those of the weight decay, and their norm and squares.
        decay: the L2 penalty, a scalar that is part of the total loss.
    """

    results: list[TowerResult]
    mean: Mean
    decay: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The step of a run; called with a batch in the graph, it makes one update.

    Attributes:
        strategy: where variables live and when towers meet.
        sizes: images of a (micro-)batch per tower, those of other processes included.
        network: computes the gradients.
        update_fn: from the mean gradient to the next parameters.
        trainable_variables: of the model; they have the regularizers.
        phases: of the run.
        global_step: int64 variable, the steps taken.
        accumulate_steps: micro-batches of a step.
        loss_scale: scales the loss dynamically. A step whose gradients are not finite
            then makes no update, and still increments global_step.
        skipped: counts the steps that make no update although no smaller loss scale
            could help; without it they are not taken.
    """

    strategy: Strategy
    sizes: Sequence[int]
    network: Network
    update_fn: Update
    trainable_variables: Sequence[keras.Variable]
    phases: Sequence[Phase]
    global_step: tf.Variable
    accumulate_steps: int = 1
    loss_scale: LossScale | None = None
    skipped: SkippedSteps | None = None

    def __call__(
        self, phase: int, batch: Mapping[str, tf.Tensor]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """One step: (whether it was counted, its metrics)."""
        reduced = self.reduce(phase, batch)
        with tf.device(HOST):
            metrics = self._metrics(reduced)
            # A tower that is not finite makes the mean so. Decided before any update.
            is_finite = tf.math.is_finite(reduced.mean.norm + metrics["total_loss"])
            is_taken = tf.cond(
                is_finite, lambda: self._update(reduced.mean), self._without_update
            )
            return is_taken, metrics

    def reduce(self, phase: int, batch: Mapping[str, tf.Tensor]) -> Reduced:
        """Gradients on all devices, and their mean."""
        compute = functools.partial(
            self.network.gradients, phase, loss_scale=self._read_loss_scale()
        )
        fetched = self.strategy.fetch()
        with tf.device(batch["images"].device or HOST):
            batches = split_batch(batch, self.strategy.sizes, self.accumulate_steps)
        results = accumulate(compute, fetched, batches, self.accumulate_steps)
        mean = self._with_metrics(self.strategy.average(results), results)
        decay, mean = self._add_weight_decay(phase, mean)
        return Reduced(results, self._with_norms(mean), decay)

    def _with_metrics(self, mean, results):
        """Those of the towers at hand, where there are no others."""
        if mean.losses is not None:
            return mean
        # The devices of one tower report the same loss and count.
        results = results[:: self.strategy.num_shards]
        with tf.device(HOST):
            return mean._replace(
                losses=tf.stack([result.loss for result in results]),
                correct=tf.add_n([result.correct for result in results]),
            )

    def _add_weight_decay(self, phase, mean):
        """Adds its gradient to the mean, on each copy of the variables."""
        names = variable_names(self.trainable_variables)
        decays, gradients = [], []
        for variables, means in zip(
            self.strategy.variables, mean.gradients, strict=True
        ):
            with tf.device(variables.device):
                decay, means = losses.add_weight_decay(
                    self.trainable_variables, variables.params, means
                )
            decays.append(decay)
            gradients.append(zero_frozen(means, names, self.phases[phase].frozen))
        return _sum_of_shards(decays[: self.strategy.num_shards]), mean._replace(
            gradients=gradients
        )

    def _with_norms(self, mean):
        """The norm and the squares from the first copy: sums may round differently on
        other devices."""
        norms, squares = [], []
        shards = self.strategy.variables[: self.strategy.num_shards]
        for variables, gradients in zip(shards, mean.gradients, strict=False):  # copy 0
            with tf.device(variables.device):
                norms.append(squared_norm(gradients))
                squares.append(self.update_fn.squares(variables.params, gradients))
        with tf.device(shards[0].device):
            norm = tf.sqrt(_sum_of_shards(norms))
        return mean._replace(norm=norm, squares=_sum_of_shards(squares))

    def _update(self, mean):
        assignments = self.strategy.update(self.global_step.read_value(), mean)
        with tf.device(HOST):
            if self.loss_scale is not None:
                assignments += self.loss_scale.after_good_step()
            if self.skipped is not None:
                assignments += self.skipped.after_good_step()
            return self._count(assignments)

    def _without_update(self):
        """Halves the loss scale, or skips the step, and counts it; False where neither
        can be."""
        if self.loss_scale is None:
            return self._skip()
        return tf.cond(
            self.loss_scale.can_fall(),
            lambda: self._count(self.loss_scale.after_bad_step()),
            self._skip,
        )

    def _skip(self):
        if self.skipped is None:
            return False
        return tf.cond(
            self.skipped.can_skip(),
            lambda: self._count(self.skipped.after_bad_step()),
            lambda: False,
        )

    def _count(self, assignments):
        with tf.control_dependencies(assignments):
            counted = self.global_step.assign_add(1, read_value=False)
        with tf.control_dependencies([counted]):
            return tf.constant(True)

    def _metrics(self, reduced):
        losses, correct = reduced.mean.losses, reduced.mean.correct
        loss = weighted_mean(tf.unstack(losses), tower_weights(self.sizes))
        scale = self._read_loss_scale()
        return {
            "loss": loss,
            "total_loss": loss + tf.cast(reduced.decay, loss.dtype),
            "tower_losses": losses,
            "accuracy": correct / (sum(self.sizes) * self.accumulate_steps),
            "learning_rate": self.update_fn.learning_rate_fn(
                self.global_step.read_value()
            ),
            "gradient_norm": reduced.mean.norm,
            **({} if scale is None else {"loss_scale": scale}),
        }

    def zero_metrics(self) -> dict[str, tf.Tensor]:
        """Metrics of the same form, for a loop to begin with."""
        dtype = self.trainable_variables[0].dtype
        return {
            "loss": tf.zeros([], dtype),
            "total_loss": tf.zeros([], dtype),
            "tower_losses": tf.zeros([len(self.sizes)], dtype),
            "accuracy": tf.zeros([]),
            "learning_rate": tf.zeros([], tf.float64),
            "gradient_norm": tf.zeros([], dtype),
            **({} if self.loss_scale is None else {"loss_scale": tf.zeros([])}),
        }

    def _read_loss_scale(self):
        return None if self.loss_scale is None else self.loss_scale.read()


def accumulate(
    compute: Callable[[list, list], list[TowerResult]],
    fetched: Sequence[Fetched],
    batches: Sequence[Mapping[str, tf.Tensor]],
    accumulate_steps: int,
) -> list[TowerResult]:
    """Gradients over several micro-batches, one after the other.

    The memory of activations is that of one micro-batch. Gradients and losses are means
    over all of them; the model state of each device goes from one to the next.

    Args:
        compute: (per device parameters and state, per tower a micro-batch) -> results.
        fetched: per device.
        batches: per tower its share of the batch, with a leading axis of
            `accumulate_steps`, unless that is 1.
        accumulate_steps: number of micro-batches.
    """
    if accumulate_steps == 1:
        return compute(list(fetched), list(batches))

    def micro_batch(place):
        return [
            {name: _next_to(x, lambda x=x: x[place]) for name, x in batch.items()}
            for batch in batches
        ]

    def is_left(place, _):
        with tf.device(HOST):
            return place < accumulate_steps

    # Results of a loop and its variables have no device. What is computed of them alone
    # would go to the first GPU, so it is put next to the results of the first turn.
    def add(place, totals):
        current = [
            Fetched(params, total.state)
            for (params, _), total in zip(fetched, totals, strict=True)
        ]
        results = compute(current, micro_batch(place))
        return place + 1, [
            TowerResult(
                gradients=_each(tf.add, begun.gradients, a.gradients, b.gradients),
                # An unchanged entry is a read variable, which names no device.
                state=[_next_to(begun.gradients[0], tf.identity, x) for x in b.state],
                loss=_next_to(begun.loss, tf.add, a.loss, b.loss),
                correct=_next_to(begun.correct, tf.add, a.correct, b.correct),
            )
            for begun, a, b in zip(first, totals, results, strict=True)
        ]

    def mean(total):
        return total / accumulate_steps

    first = compute(list(fetched), micro_batch(0))
    _, totals = while_loop(is_left, add, (tf.constant(1), first))
    return [
        total._replace(
            gradients=_each(mean, begun.gradients, total.gradients),
            loss=_next_to(begun.loss, mean, total.loss),
        )
        for begun, total in zip(first, totals, strict=True)
    ]


def _each(function, places, *lists):
    """The function of the elements of some lists, each next to a tensor of `places`."""
    return [
        _next_to(place, function, *values)
        for place, *values in zip(places, *lists, strict=True)
    ]


def _next_to(place, function, *values):
    """The function of some tensors, computed on the device of the tensor `place`."""
    with tf.device(place.device):
        return function(*values)


def _sum_of_shards(values):
    """The sum on the host; a single value, or None, comes back as it is."""
    if len(values) == 1 or values[0] is None:
        return values[0]
    with tf.device(HOST):
        return tf.add_n(values)
