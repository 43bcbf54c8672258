"""The contract of a synchronous strategy: where variables live, when towers meet.

A strategy is five functions. The step that calls them is in `step.py`, the loop, the
metrics and the evaluation around it are the trainer's.

    fetch               parameters and model state, next to the compute of every device
    average             the mean of the towers' gradients and states, wherever an update
                        needs it
    update              the assignments of one update
    named_variables     canonical name -> variable
    load                a canonical state
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from towers.parallel.tower import TowerResult
from towers.parallel.variables import Fetched, Variables


class Mean(NamedTuple):
    """The mean over the towers, once for each entry of `Strategy.variables`.

    Attributes:
        gradients: [entry][parameter], of the mean loss over the whole batch.
        states: [entry][variable], the new model state.
        norm: global norm of the mean gradient, that of the weight decay included; the
            step computes it once for all entries.
        squares: sums of squares that the optimizer needs, as `Update.squares`.
        losses: [tower], where other processes have towers, too; of those at hand alone
            the step takes them from the results.
        correct: number of correct predictions over these towers.
    """

    gradients: list[list[tf.Tensor]]
    states: list[list[tf.Tensor]]
    norm: tf.Tensor | None = None
    squares: tf.Tensor | None = None
    losses: tf.Tensor | None = None
    correct: tf.Tensor | None = None


class Strategy(Protocol):
    """Created as `Strategy(initial, update_fn, devices, micro_batch_size, **options)`.

    The keyword-only options are those of the run, by their names in Config.

    Attributes:
        sizes: images of a (micro-)batch per tower of this process.
        num_shards: devices that hold one network together, neighbors in `devices`.
        variables: all copies of the variables; a copy has `num_shards` entries.
        description: lines for the start banner.
    """

    sizes: list[int]
    num_shards: int
    variables: list[Variables]
    description: list[str]

    def fetch(self, use_averages: bool = False) -> list[Fetched]:
        """Per device parameters (or their moving averages) and model state, which it
        reads without a copy."""

    def average(self, results: Sequence[TowerResult]) -> Mean:
        """The image-weighted mean of the results of all devices."""

    def update(self, step: tf.Tensor, mean: Mean) -> list[tf.Operation]:
        """Assigns new parameters, slots, moving averages and model state.

        Args:
            step: int64, the steps taken before this one.
            mean: with its norm and squares.
        """

    def named_variables(self) -> dict[str, list[tf.Variable]]:
        """Canonical name -> the shards of a variable, along its last axis."""

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Assigns a canonical state to all copies."""
