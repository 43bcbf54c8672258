"""The step of one asynchronous tower: compiled calls to fetch, compute and apply."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.optim.losses import WeightDecay
from towers.optim.phases import Phase
from towers.optim.update import Update, moving_averages
from towers.parallel.copies import Copy, Values
from towers.parallel.finite import FiniteGuard
from towers.parallel.reduce import squared_norm
from towers.parallel.step import zero_frozen
from towers.parallel.tower import WholeNetwork


class Calls(NamedTuple):
    """Traced functions.

    Attributes:
        fetch: per tower, () -> parameters and model state, on its device.
        compute: per phase and tower, (parameters and model state, batch of the tower)
            -> (gradients, model state, metrics); the first two on the parameter device.
        apply: whether the update ends a step -> (tower, norm, gradients, model state)
            -> nothing.
        skip: whether the update ends a step -> () -> nothing; empty where no update is
            skipped.
    """

    fetch: list[Callable]
    compute: list[list[Callable]]
    apply: list[Callable]
    skip: list[Callable]


@dataclasses.dataclass(frozen=True, eq=False)
class AsynchronousStep:
    """The step of asynchronous towers.

    Attributes:
        copy: the variables that all towers share.
        network: computes the gradients.
        update_fn: from a gradient to the next parameters.
        trainable_variables: of the model; they have the regularizers.
        phases: of the run.
        devices: of the towers.
        scales: per tower the factor on its gradients.
        guard: counts the updates that are skipped, if any are.
    """

    copy: Copy
    network: WholeNetwork
    update_fn: Update
    trainable_variables: Sequence[keras.Variable]
    phases: Sequence[Phase]
    devices: Sequence[str]
    scales: Sequence[float]
    guard: FiniteGuard

    def fetch(self, tower: int) -> Values:
        """Parameters and model state on the device of a tower."""
        return self.copy.fetch().copied_to(self.devices[tower])

    def compute(
        self, phase: int, tower: int, values: Values, batch: Mapping[str, tf.Tensor]
    ) -> tuple[list[tf.Tensor], tuple[list, list], dict[str, tf.Tensor]]:
        """A tower's gradients with those of the weight decay, new state and metrics."""
        [result] = self.network.gradients(phase, [values], [batch], first_tower=tower)
        layout = self.copy.layout.params
        with tf.device(self.devices[tower]):
            add_decay = WeightDecay(self.trainable_variables, layout)
            decay, gradients = add_decay(values.params, result.gradients)
            gradients = zero_frozen(gradients, layout, self.phases[phase].frozen)
            total_loss = result.loss + tf.cast(decay, result.loss.dtype)
            norm = tf.sqrt(squared_norm(gradients))
            finite = tf.math.is_finite(total_loss + norm)
        with tf.device(self.copy.device):
            # They are copied here, and not while the lock is held.
            gradients = [tf.identity(gradient) for gradient in gradients]
            state = tf.nest.map_structure(tf.identity, (result.state, result.counts))
        metrics = {
            "loss": result.loss,
            "total_loss": total_loss,
            "correct": result.correct,
            "gradient_norm": norm,
            "finite": finite,
        }
        return gradients, state, metrics

    def apply(
        self,
        ends_step: bool,
        tower: tf.Tensor,
        norm: tf.Tensor,
        gradients: list[tf.Tensor],
        state: tuple[list[tf.Tensor], list[tf.Tensor]],
    ) -> None:
        """One update of the shared variables."""
        copy, (state, counts) = self.copy, state
        layout = copy.layout.params
        with tf.device(copy.device):
            [step] = copy.read([copy.step])
            # The norm, and so the clipping, is that before the scaling.
            scale = tf.gather(tf.constant(self.scales, tf.float64), tower)
            scaled = [g * tf.cast(scale, g.dtype) for g in gradients]
            params = copy.read(copy.params)
            squares = self.update_fn.squares(layout, params, scaled)
            slots = {name: copy.read(own) for name, own in copy.slots.items()}
            params, slots = self.update_fn(
                layout, step, params, slots, scaled, norm, squares
            )
            old = copy.read(copy.counts)
            counts = [
                tf.where(tower == 0, *pair) for pair in zip(counts, old, strict=True)
            ]
            variables = [*copy.params, *copy.state, *copy.counts]
            values = [*params, *state, *counts]
            for name, own in copy.slots.items():
                variables += own
                values += slots[name]
            if ends_step and copy.averages:
                variables += copy.averages
                values += moving_averages(
                    copy.read(copy.averages),
                    [*params, *state],
                    step,
                    self.update_fn.ema_decay,
                )
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value, read_value=False)
        self._count(True, ends_step)

    def skip(self, ends_step: bool) -> None:
        """In place of an update that is not finite: it is only counted."""
        self._count(False, ends_step)

    def _count(self, is_finite, ends_step):
        with tf.device(self.guard.device):
            self.guard.decide(tf.constant(is_finite), self.guard.is_running())
        if ends_step:
            self.copy.step.assign_add(1)

    def trace(
        self, batch_specs: Sequence[Mapping[str, tf.TensorSpec]], skips: bool
    ) -> Calls:
        """Traces all calls.

        Args:
            batch_specs: per tower, of its batches.
            skips: whether updates may be skipped.
        """
        copy = self.copy
        params, state, counts = map(_specs, (copy.params, copy.state, copy.counts))
        values = Values(params, state, counts)
        calls = Calls([], [[] for _ in self.phases], [], [])
        for tower, spec in enumerate(batch_specs):
            calls.fetch.append(_traced(functools.partial(self.fetch, tower)))
            for phase, of_phase in enumerate(calls.compute):
                compute = functools.partial(self.compute, phase, tower)
                of_phase.append(_traced(compute, values, spec))
        index, norm = tf.TensorSpec([], tf.int32), tf.TensorSpec([], params[0].dtype)
        for ends_step in (False, True):
            apply = functools.partial(self.apply, ends_step)
            calls.apply.append(_traced(apply, index, norm, params, (state, counts)))
            if skips:
                calls.skip.append(_traced(functools.partial(self.skip, ends_step)))
        return calls


def _traced(call, *specs):
    return tf.function(call, autograph=False).get_concrete_function(*specs)


def _specs(variables):
    return [tf.TensorSpec(v.shape, v.dtype) for v in variables]
