"""The step of one asynchronous tower: compiled calls to fetch, compute and apply."""

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
from towers.parallel.gradients import squared_norm
from towers.parallel.network import WholeNetwork
from towers.parallel.not_finite import SkippedSteps
from towers.parallel.variables import Fetched, Variables


class Calls(NamedTuple):
    """Traced functions.

    Attributes:
        fetch: per tower, () -> parameters and model state, on its device.
        compute: per phase and tower, (parameters, model state, share of the batch) ->
            (gradients, model state, metrics); the first two on the parameter device.
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
        variables: those that all towers share.
        network: computes the gradients.
        update_fn: from a gradient to the next parameters.
        trainable_variables: of the model; they have the regularizers.
        phases: of the run.
        devices: of the towers.
        scales: per tower the factor on its gradients.
        global_step: int64 variable, the steps taken.
        skipped: counts the updates that are skipped, if any are.
    """

    variables: Variables
    network: WholeNetwork
    update_fn: Update
    trainable_variables: Sequence[keras.Variable]
    phases: Sequence[Phase]
    devices: Sequence[str]
    scales: Sequence[float]
    global_step: tf.Variable
    skipped: SkippedSteps | None = None

    def fetch(self, tower: int) -> Fetched:
        """Parameters and model state on the device of a tower."""
        return self.variables.fetch().copied_to(self.devices[tower])

    def compute(
        self,
        phase: int,
        tower: int,
        params: list[tf.Tensor],
        state: list[tf.Tensor],
        share: Mapping[str, tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], dict[str, tf.Tensor]]:
        """A tower's gradients with those of the weight decay, new state and metrics."""
        [result] = self.network.gradients(
            phase, [(params, state)], [share], first_tower=tower
        )
        with tf.device(self.devices[tower]):
            decay, gradients = losses.add_weight_decay(
                self.trainable_variables, params, result.gradients
            )
            names = variable_names(self.trainable_variables)
            gradients = zero_frozen(gradients, names, self.phases[phase].frozen)
            total_loss = result.loss + tf.cast(decay, result.loss.dtype)
            norm = tf.sqrt(squared_norm(gradients))
            finite = tf.math.is_finite(total_loss + norm)
        with tf.device(self.variables.device):
            # They are copied here, and not while the lock is held.
            gradients = [tf.identity(gradient) for gradient in gradients]
            state = [tf.identity(entry) for entry in result.state]
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
        state: list[tf.Tensor],
    ) -> None:
        """One update of the shared variables."""
        step = self.global_step.read_value()
        with tf.device(self.variables.device):
            # The norm, and so the clipping, is that before the scaling.
            scale = tf.gather(tf.constant(self.scales, tf.float64), tower)
            scaled = [g * tf.cast(scale, g.dtype) for g in gradients]
            params, slots, averages = self.variables.read()
            moving = averages if ends_step else []
            params, slots, moved = self.update_fn(
                step, norm, params, slots, moving, scaled
            )
            state = [
                new if new.dtype.is_floating else tf.where(tower == 0, new, old)
                for new, old in zip(state, self.variables.state, strict=True)
            ]
            self.variables.assign(params, slots, moved or averages, state)
        if self.skipped is not None:
            with tf.device(HOST):
                self.skipped.after_good_step()
        if ends_step:
            self.global_step.assign_add(1)

    def skip(self, ends_step: bool) -> None:
        """In place of an update that is not finite: it is only counted."""
        with tf.device(HOST):
            self.skipped.after_bad_step()
        if ends_step:
            self.global_step.assign_add(1)

    def trace(
        self, batch_spec: Mapping[str, tf.TensorSpec], sizes: Sequence[int]
    ) -> Calls:
        """Traces all calls.

        Args:
            batch_spec: of a whole batch.
            sizes: images per tower.
        """
        params, state = _specs(self.variables.params), _specs(self.variables.state)
        calls = Calls([], [[] for _ in self.phases], [], [])
        for tower, size in enumerate(sizes):
            share = {
                name: tf.TensorSpec([size, *spec.shape[1:]], spec.dtype)
                for name, spec in batch_spec.items()
            }
            calls.fetch.append(_traced(functools.partial(self.fetch, tower)))
            for phase, of_phase in enumerate(calls.compute):
                compute = functools.partial(self.compute, phase, tower)
                of_phase.append(_traced(compute, params, state, share))
        index, norm = tf.TensorSpec([], tf.int32), tf.TensorSpec([], params[0].dtype)
        for ends_step in (False, True):
            apply = functools.partial(self.apply, ends_step)
            calls.apply.append(_traced(apply, index, norm, params, state))
            if self.skipped is not None:
                calls.skip.append(_traced(functools.partial(self.skip, ends_step)))
        return calls


def _traced(call, *specs):
    return tf.function(call, autograph=False).get_concrete_function(*specs)


def _specs(variables):
    return [tf.TensorSpec(v.shape, v.dtype) for v in variables]
