"""Strategy `model_parallel`: a group of devices holds one network, split by channels.

Every device of a worker group owns a share of the output channels of each convolution
and dense layer: their parameters, slots and update. Where a layer needs all its inputs,
a transfer brings the slices of the other devices next to the compute. Groups are
data-parallel to each other: each takes its share of the batch, and shard by shard the
gradients are averaged over the groups.

Elsewhere: the worker groups of Tencent's multi-GPU framework (Mariana, Zou et al.
2014), the two columns of AlexNet (Krizhevsky et al. 2012).
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.errors import ConfigError
from towers.optim.update import Update
from towers.parallel.all_reduce import all_reduce
from towers.parallel.gradients import all_average_states, shares, tower_weights
from towers.parallel.sharding.split import channel_slice
from towers.parallel.strategy import Mean
from towers.parallel.variables import Initial, Variables, named_shards


class ModelParallel:
    """Implements the protocol `Strategy`; a tower is a group of devices.

    Args:
        initial, update_fn, devices, micro_batch_size: as in the protocol; neighbors
            make a group, and the devices are a multiple of group_size.
        group_size: devices that hold one network.

    Raises:
        ConfigError: the devices do not divide, or the update needs whole parameters.
    """

    def __init__(
        self,
        initial: Initial,
        update_fn: Update,
        devices: Sequence[str],
        micro_batch_size: int,
        *,
        group_size: int,
    ):
        if len(devices) % group_size:
            raise ConfigError(
                f"num_towers={len(devices)} with group_size={group_size}: the groups "
                "do not divide the towers"
            )
        if not update_fn.optimizer.elementwise:
            raise ConfigError(
                f"group_size={group_size}: the optimizer's update needs whole "
                "parameters, which no device holds"
            )
        self._update_fn, self._devices = update_fn, devices
        self.num_shards = group_size
        self.sizes = shares(micro_batch_size, len(devices) // group_size)
        self._weights = tower_weights(self.sizes)
        self.variables = []
        for place, device in enumerate(devices):
            group, shard = divmod(place, group_size)
            initial_slices = initial.map(self._slice_fn(shard))
            # No step reads the averages, so the first group's are enough.
            self.variables.append(
                Variables(initial_slices, update_fn, device, keeps_averages=group == 0)
            )
        self.description = self._describe()

    def fetch(self, use_averages=False):
        if not use_averages:
            return [variables.fetch() for variables in self.variables]
        size = self.num_shards
        averages = [
            variables.fetch(use_averages) for variables in self.variables[:size]
        ]
        return averages + [
            averages[place % size].copied_to(device)
            for place, device in enumerate(self._devices[size:])
        ]

    def average(self, results):
        gradients = self._over_groups(all_reduce, [r.gradients for r in results])
        states = self._over_groups(all_average_states, [r.state for r in results])
        return Mean(gradients, states)

    def update(self, step, mean):
        assignments = []
        for variables, gradients, state in zip(
            self.variables, mean.gradients, mean.states, strict=True
        ):
            with tf.device(variables.device):
                updated = self._update_fn(
                    step, mean.norm, *variables.read(), gradients, mean.squares
                )
                assignments += variables.assign(*updated, state)
        return assignments

    def named_variables(self):
        return named_shards(self.variables[: self.num_shards])

    def load(self, state):
        for place, variables in enumerate(self.variables):
            slice_fn = self._slice_fn(place % self.num_shards)
            variables.load({name: slice_fn(state[name]) for name in variables.named()})

    def _slice_fn(self, shard):
        return functools.partial(channel_slice, shard=shard, num_shards=self.num_shards)

    def _over_groups(self, mean_fn, tensors):
        """The image-weighted mean over the groups, shard by shard; per device."""
        means = [None] * len(self._devices)
        for shard in range(self.num_shards):
            peers = slice(shard, None, self.num_shards)
            means[peers] = mean_fn(
                tensors[peers], self._devices[peers], weights=self._weights
            )
        return means

    def _describe(self):
        size = self.num_shards
        groups = [
            self._devices[i : i + size] for i in range(0, len(self._devices), size)
        ]
        num_bytes = [
            sum(p.shape.num_elements() * p.dtype.size for p in variables.params)
            for variables in self.variables[:size]
        ]
        return [
            f"worker groups: {'; '.join(', '.join(group) for group in groups)}",
            "bytes of parameters on a group's devices: "
            + ", ".join(f"{count:,}" for count in num_bytes),
        ]
