"""The interface of synchronous strategies.

A strategy decides where copies of the vectors live, which copy a tower reads, and where
the mean goes. A step is the same for all: one update with the gradient of the mean loss
over the whole batch. A new strategy is a file in this folder and a row of
`config.choices.STRATEGIES`; docs/extending.md lists its tests and pages.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.optim.update import Update
from towers.parallel import reduce
from towers.parallel.copies import Copy, Initial, Values, Weights
from towers.parallel.devices import share_memory
from towers.parallel.sharding.split import channel_slice
from towers.parallel.towers import TowerResult


class Reduced(NamedTuple):
    """The mean over the towers."""

    gradients: list[list[tf.Tensor]]  # [copy] vectors, of the mean loss over the batch.
    states: list[list[tf.Tensor]]  # [copy] vectors of the new model state.
    losses: tf.Tensor  # [tower], of all processes.
    correct: tf.Tensor  # Number of correct predictions of these towers.


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """Copies of the variables, their readers and the mean over the towers.

    The function of a row of `choices.STRATEGIES` creates it, called as
    `function(initial, update_fn, devices, micro_batch_size, **options)`; `options` are
    the fields of Config with `strategy_option` that its signature names.
    """

    devices: Sequence[str]  # Devices of the towers.
    sizes: Sequence[int]  # Images of a micro-batch per tower of this process.
    copies: Sequence[Copy]  # Each copy of the variables has `num_shards` entries.
    readers: Sequence[int]  # Index of the copy that each device reads.
    # Results per device -> their mean, weighted by images.
    mean_fn: Callable[[Sequence[TowerResult]], Reduced]
    description: Sequence[str]  # Lines for the start banner.
    num_shards: int = 1  # Neighboring devices that hold one network together.

    def fetch(self, weights: Weights = Weights.RAW) -> list[Values]:
        """Return parameters and model state per device, in memory that it can read."""
        fetched = []
        for device, reader in zip(self.devices, self.readers, strict=True):
            is_ema = weights is Weights.EMA  # Only the first copy keeps them.
            copy = self.copies[reader % self.num_shards if is_ema else reader]
            values = copy.fetch(weights)
            is_near = share_memory(device, copy.device)
            fetched.append(values if is_near else values.copied_to(device))
        return fetched

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Assign a canonical state to all copies."""
        parts = [
            {
                name: channel_slice(array, shard, self.num_shards)
                for name, array in state.items()
                if name.startswith(("params/", "state/", "slots/", "averages/"))
            }
            for shard in range(self.num_shards)
        ]
        for index, copy in enumerate(self.copies):
            copy.load(parts[index % self.num_shards])
            copy.step.assign(state["step"])

    @property
    def shards(self) -> Sequence[Copy]:
        """Return the entries of the first copy."""
        return self.copies[: self.num_shards]

    @property
    def primary_device(self) -> str:
        """Return the device of the first copy, of metrics and of the guard."""
        return self.copies[0].device


def create_copies(
    initial: Initial, update_fn: Update, devices: Sequence[str], group_size: int = 1
) -> list[Copy]:
    """Return a copy on every group of devices; only the first one keeps averages."""
    copies = []
    for index, device in enumerate(devices):
        cut = functools.partial(
            channel_slice, shard=index % group_size, num_shards=group_size
        )
        keeps_averages = index < group_size
        copies.append(Copy(initial.map(cut), update_fn, device, keeps_averages))
    return copies


def all_reduced_mean(
    results: Sequence[TowerResult],
    devices: Sequence[str],
    weights: Sequence[float],
    algorithm: str = "star",
    dtype: tf.DType | None = None,
) -> Reduced:
    """Return the mean over the towers of this process, on each of their devices."""
    vectors = [result.gradients for result in results]
    gradients = reduce.all_reduce(vectors, devices, weights, algorithm, dtype)
    return complete_mean(results, gradients, weights, devices)


def complete_mean(
    results: Sequence[TowerResult],
    gradients: list[list[tf.Tensor]],
    weights: Sequence[float],
    targets: Sequence[str],
) -> Reduced:
    """Return the mean gradients on each of the targets, and the means of the rest."""
    states = reduce.average_states([x.state for x in results], weights, targets)
    with tf.device(targets[0]):
        losses = tf.stack([result.loss for result in results])
        correct = tf.add_n([result.correct for result in results])
    return Reduced(gradients, states, losses, correct)
