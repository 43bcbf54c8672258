"""The interface to the other workers of a run, and a run of one process."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Workers:
    """All workers of a run, as one of them sees them; here a single one.

    All workers call the same functions in the same order;
    `towers.cluster.workers.ClusterWorkers` connects several.

    Attributes:
        addresses: host:port of each worker; empty for a single one.
        index: number of this worker; 0 is the chief.
        devices: where this worker's tensors are summed with the other workers': its
            GPUs, or its host.
    """

    devices: Sequence[str] = ("/CPU:0",)

    def __init__(self, addresses: Sequence[str] = (), index: int = 0):
        self.addresses, self.index = tuple(addresses), index
        self.size, self.is_chief = max(len(addresses), 1), index == 0

    # In a graph.

    def sums(
        self,
        tensors: Sequence[Sequence[tf.Tensor]],
        options: tf.distribute.experimental.CommunicationOptions | None = None,
    ) -> list[list[tf.Tensor]]:
        """Return the sums over all workers and devices, equal bit for bit everywhere.

        For each of `devices` there is a list; shapes and types are the same in all.
        """
        return [list(own) for own in tensors]

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return sums over workers; gradients are those of the sum of all losses."""
        return list(tensors)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenate the tensors of all workers along the first axis."""
        return tensor

    # Between compiled calls.

    def add(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array, int64 or float64, over all workers."""
        return values

    def agree(
        self, num_steps: int, save: bool, summarize: bool, stop: bool
    ) -> tuple[int, bool, bool]:
        """Return the chief's arguments, but 0 steps if any worker stops."""
        return 0 if stop else num_steps, save, summarize

    def broadcast(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the chief's arrays, bit for bit, in place of this worker's."""
        return dict(state)

    def exchange(self, own: Any) -> list[Any]:
        """Gather a JSON value from each worker, in their order."""
        return [own]

    def raising_worker_lost(self) -> contextlib.AbstractContextManager[None]:
        """Raise WorkerLostError if an error of TensorFlow names a lost worker."""
        return contextlib.nullcontext()


SINGLE_WORKER = Workers()
