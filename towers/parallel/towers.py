"""Strategy `towers`: one set of variables, fetched by every tower in every step.

The variables are pinned to the parameter device, by default the CPU. In each step every
tower fetches them to its own device and computes the gradients of its share of the
batch; the parameter device averages the gradients and updates the variables once.

Elsewhere: TensorFlow's CIFAR-10 multi-GPU tutorial, CentralStorageStrategy,
tf_cnn_benchmarks' `parameter_server`, tensorpack's SyncMultiGPUTrainerParameterServer.
"""

import tensorflow as tf

from towers.parallel.devices import HOST
from towers.parallel.gradients import (
    average_gradients,
    average_states,
    squared_norm,
)
from towers.parallel.synchronous import Met, Synchronous
from towers.parallel.variables import Variables


class Towers(Synchronous):
    """Synchronous towers around one set of variables.

    Args:
        parameter_device: where the variables live and the gradients are averaged; the
            other arguments are those of `Synchronous`.
    """

    def __init__(self, *args, parameter_device: str = HOST, **kwargs):
        self._parameter_device = parameter_device
        super().__init__(*args, **kwargs)

    def _create_variables(self):
        with tf.device(self._parameter_device):
            self._variables = Variables(*self._initial_values(), self._update)

    def describe(self):
        return [f"variables on {self._parameter_device}", *super().describe()]

    def _named_variables(self):
        return self._variables.named()

    def _variable_sets(self):
        return [self._variables]

    def _logits(self, batches, use_averages):
        return self._logits_of_whole(
            batches, lambda tower: self._variables.fetch(use_averages)
        )

    def _fetch(self):
        """Per tower parameters and model state, on its device."""
        fetched = []
        for device in self._devices:
            with tf.device(device):
                fetched.append(self._variables.fetch())
        return fetched

    def _meet(self, stage, batch):
        # Every tower fetches the variables and computes its gradients.
        results = self._results(stage, self._fetch(), batch)

        # The towers meet on the parameter device.
        with tf.device(self._parameter_device):
            tower_grads = [zip(r.gradients, self._names, strict=True) for r in results]
            gradients = [g for g, _ in average_gradients(tower_grads, self._weights)]
            params = [p.read_value() for p in self._variables.params]
            decay, gradients = self._add_weight_decay(stage, params, gradients)
            norm = tf.sqrt(squared_norm(gradients))
            states = average_states([r.state for r in results], self._weights)
        return Met([[r] for r in results], decay, norm, gradients, states, [gradients])

    def _apply(self, step, met):
        # One update.
        with tf.device(self._parameter_device):
            updated = self._update(
                step, met.norm, *self._variables.read(), met.gradients
            )
            return self._variables.assign(*updated, met.states)
