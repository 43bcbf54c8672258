"""Strategy `towers`: one set of variables, fetched by every tower in every step.

The variables are pinned to the parameter device, by default the CPU. In each step every
tower fetches them to its own device and computes the gradients of its share of the
batch; the parameter device averages the gradients and updates the variables once.

Elsewhere: TensorFlow's CIFAR-10 multi-GPU tutorial, CentralStorageStrategy,
tf_cnn_benchmarks' `parameter_server`, tensorpack's SyncMultiGPUTrainerParameterServer.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.optim.update import Update
from towers.parallel.devices import HOST, share_memory
from towers.parallel.gradients import (
    all_average_states,
    average_gradients,
    shares,
    tower_weights,
)
from towers.parallel.strategy import Mean
from towers.parallel.variables import Initial, Variables, named_shards


class Towers:
    """Implements the protocol `Strategy`.

    Args:
        initial, update_fn, devices, micro_batch_size: as in the protocol.
        parameter_device: where the variables live and the gradients are averaged: cpu,
            gpu (the first tower's) or the name of a device.
    """

    num_shards = 1

    def __init__(
        self,
        initial: Initial,
        update_fn: Update,
        devices: Sequence[str],
        micro_batch_size: int,
        *,
        parameter_device: str = "cpu",
    ):
        self._update_fn, self._devices = update_fn, devices
        self.sizes = shares(micro_batch_size, len(devices))
        self._weights = tower_weights(self.sizes)
        named = {"cpu": HOST, "gpu": devices[0]}
        self.parameter_device = named.get(parameter_device, parameter_device)
        self.variables = [Variables(initial, update_fn, self.parameter_device)]
        self.description = [f"variables on {self.parameter_device}"]

    def fetch(self, use_averages=False):
        fetched, home = self.variables[0].fetch(use_averages), self.parameter_device
        return [
            fetched if share_memory(device, home) else fetched.copied_to(device)
            for device in self._devices
        ]

    def average(self, results):
        with tf.device(self.parameter_device):
            gradients = average_gradients([r.gradients for r in results], self._weights)
        states = all_average_states(
            [r.state for r in results],
            self._devices,
            self._weights,
            targets=[self.parameter_device],
        )
        return Mean([gradients], states)

    def update(self, step, mean):
        [variables], [gradients], [state] = self.variables, mean.gradients, mean.states
        with tf.device(self.parameter_device):
            updated = self._update_fn(
                step, mean.norm, *variables.read(), gradients, mean.squares
            )
            return variables.assign(*updated, state)

    def named_variables(self):
        return named_shards(self.variables)

    def load(self, state):
        self.variables[0].load(state)
