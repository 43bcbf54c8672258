"""Strategy `model_parallel`: a group of devices holds one network, split by channels.

Every device of a worker group owns a share of the output channels of each convolution
and dense layer: their parameters, slots and update. Where a layer needs all its inputs,
a transfer brings the slices of the other devices next to the compute. Groups are
data-parallel to each other: each takes its share of the batch, and shard by shard the
gradients are averaged over the groups.

Elsewhere: the worker groups of Tencent's multi-GPU framework (Mariana, Zou et al.
2014), the two columns of AlexNet (Krizhevsky et al. 2012).
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.errors import ConfigError
from towers.optim.phases import Phase, phases_of
from towers.parallel.all_reduce import all_average_states, all_reduce
from towers.parallel.devices import HOST
from towers.parallel.gradients import squared_norm
from towers.parallel.sharding.walker import walkers_of
from towers.parallel.synchronous import Met, Synchronous
from towers.parallel.variables import Variables


class ModelParallel(Synchronous):
    """Worker groups, each holding one network on `group_size` devices.

    Args:
        devices: neighbours make a group; their number is a multiple of group_size.
        group_size: devices that hold one network.
        The other arguments are those of `Synchronous`; a "tower" is a group.

    Raises:
        ConfigError: the devices do not divide, a layer cannot be split, or the update
            needs whole parameters.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        devices,
        group_size: int,
        loss_fn,
        update,
        stages: Sequence[Phase] = (),
        sync_batch_norm: bool = False,
        **kwargs,
    ):
        if len(devices) % group_size:
            raise ConfigError(
                f"num_towers={len(devices)} with group_size={group_size}: the groups "
                "do not divide the towers"
            )
        if not update.optimizer.elementwise:
            raise ConfigError(
                f"group_size={group_size}: the optimizer's update needs whole "
                "parameters, which no device holds"
            )
        self._grid = [
            list(devices[first : first + group_size])
            for first in range(0, len(devices), group_size)
        ]
        self._grid_walkers = walkers_of(
            phases_of(stages, model), loss_fn, self._grid, sync_batch_norm
        )
        self._grid_walker = self._grid_walkers[-1]
        super().__init__(
            model,
            stages=stages,
            devices=[group[0] for group in self._grid],
            loss_fn=loss_fn,
            update=update,
            **kwargs,
        )

    def _create_variables(self):
        shards = self._grid_walker.shards
        params, state = self._initial_values()
        self._variables = []
        for group in self._grid:
            self._variables.append([])
            for shard, device in enumerate(group):
                with tf.device(device):
                    slices = [
                        {n: shards.slice(v, shard) for n, v in values.items()}
                        for values in (params, state)
                    ]
                    # No step reads the averages: the first group's are enough.
                    keeps_averages = group == self._grid[0]
                    self._variables[-1].append(
                        Variables(*slices, self._update, keeps_averages)
                    )

    def _variable_sets(self):
        return [variables for of_group in self._variables for variables in of_group]

    def _fetch(self, use_averages=False):
        """[group][shard] parameters and model state, where they are."""
        fetched = []
        for group, own in zip(self._grid, self._variables, strict=True):
            fetched.append([])
            variables = self._variables[0] if use_averages else own
            for device, of_shard in zip(group, variables, strict=True):
                with tf.device(device):
                    fetched[-1].append(of_shard.fetch(use_averages))
        return fetched

    def _compute(self, stage, variables, batches):
        """Results of all groups, shard after shard, as the variables come."""
        found = self._grid_walkers[stage].gradients(
            self._by_group(variables), batches, self._weights, self._read_loss_scale()
        )
        return [self._checked(stage, x) for of_group in found for x in of_group]

    def _by_group(self, values):
        size = len(self._grid[0])
        return [values[i : i + size] for i in range(0, len(values), size)]

    def _logits(self, batches, use_averages):
        return self._grid_walker.logits(self._fetch(use_averages), batches)

    def _meet(self, stage, batch):
        # Every group computes on its share, with the slices that its devices own.
        fetched = [values for of_group in self._fetch() for values in of_group]
        results = self._by_group(self._results(stage, fetched, batch))

        # Weight decay does not depend on the images: the first group adds it for all,
        # each device that of its shard.
        gradients = [[result.gradients for result in group] for group in results]
        decays = []
        for shard, device in enumerate(self._grid[0]):
            params, _ = fetched[shard]
            with tf.device(device):
                decay, gradients[0][shard] = self._add_weight_decay(
                    stage, params, gradients[0][shard], self._weights[0]
                )
            decays.append(decay)

        # Groups meet shard by shard.
        gradients = self._over_groups(all_reduce, gradients)
        states = self._over_groups(
            all_average_states, [[r.state for r in g] for g in results]
        )
        squares = []
        for shard, device in enumerate(self._grid[0]):
            with tf.device(device):
                squares.append(squared_norm(gradients[0][shard]))
        with tf.device(HOST):
            norm = tf.sqrt(tf.add_n(squares))
            decay = tf.add_n(decays)
        return Met(results, decay, norm, gradients, states, gradients[0])

    def _over_groups(self, mean, values):
        """The image-weighted mean of each shard's tensors, [group][shard]."""
        means = [[] for _ in self._grid]
        for shard in range(len(self._grid[0])):
            devices = [group[shard] for group in self._grid]
            tensors = [of_group[shard] for of_group in values]
            reduced = mean(tensors, devices, weights=self._weights)
            for of_group, tensors in zip(means, reduced, strict=True):
                of_group.append(tensors)
        return means

    def _apply(self, step, met):
        # Every device updates what it owns.
        squares = self._squares(met)
        assignments = []
        for group, devices in enumerate(self._grid):
            for shard, device in enumerate(devices):
                variables = self._variables[group][shard]
                with tf.device(device):
                    updated = self._update(
                        step,
                        met.norm,
                        *variables.read(),
                        met.gradients[group][shard],
                        squares,
                    )
                    assignments += variables.assign(*updated, met.states[group][shard])
        return assignments

    def _squares(self, met):
        """The sums of squares that the update needs, added up over the shards."""
        of_shards = []
        for shard, device in enumerate(self._grid[0]):
            with tf.device(device):
                params = self._variables[0][shard].params
                of_shards.append(self._update.squares(params, met.gradients[0][shard]))
        with tf.device(HOST):
            return None if of_shards[0] is None else tf.add_n(of_shards)

    # The canonical state: whole tensors.

    def _named_variables(self):
        """Canonical name -> the variables of all shards, of the first group."""
        named = [variables.named() for variables in self._variables[0]]
        return {name: [shard[name] for shard in named] for name in named[0]}

    def state(self):
        state = {
            name: np.concatenate([shard.numpy() for shard in shards], axis=-1)
            for name, shards in self._named_variables().items()
        }
        progress = self._progress_variables()
        return state | {name: v.numpy() for name, v in progress.items()}

    def load(self, state):
        for of_group in self._variables:
            for shard, variables in enumerate(of_group):
                for name, variable in variables.named().items():
                    variable.assign(self._grid_walker.shards.slice(state[name], shard))
        for name, variable in self._progress_variables().items():
            variable.assign(state[name])
        self._begin_anew()

    def describe(self):
        self.trace()  # only then is it known what crosses devices
        groups = "; ".join(", ".join(group) for group in self._grid)
        owned = ", ".join(f"{count:,}" for count in self.param_bytes)
        return [
            f"worker groups: {groups}",
            f"bytes of parameters on a group's devices: {owned}",
            f"bytes of activations that cross devices per step: {self.moved_bytes:,}",
            *super().describe(),
        ]

    @property
    def moved_bytes(self) -> int:
        """Bytes of activations, and of their gradients, that cross devices per step of
        the stage where most do; gradients that frozen parameters spare are counted."""
        most = max(walker.moved_bytes for walker in self._grid_walkers)
        return most * self._accumulate_steps

    @property
    def param_bytes(self) -> list[int]:
        """Bytes of the parameters on each device of a group."""
        return [
            sum(p.shape.num_elements() * p.dtype.size for p in variables.params)
            for variables in self._variables[0]
        ]
