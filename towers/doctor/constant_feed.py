"""The input of steps that wait for no images."""

from collections.abc import Sequence

import tensorflow as tf

from towers.parallel.devices import HOST
from towers.parallel.feed import Batch


class ConstantFeed:
    """The same batch again and again, in the memory of the towers' devices; implements
    the protocol `towers.parallel.feed.Feed`.

    Args:
        batch: is repeated where it has too few images.
        sizes: images of each tower, in all micro-batches together.
        devices: per tower.
    """

    def __init__(self, batch: Batch, sizes: Sequence[int], devices: Sequence[str]):
        self.devices, self._batches = devices, []
        for size, device in zip(sizes, devices, strict=True):
            with tf.device(HOST):
                rows = tf.range(size) % batch["images"].shape[0]
                piece = {name: tf.gather(x, rows) for name, x in batch.items()}
                # int32 tensors of a GPU are in host memory.
                if "GPU" in device and piece["labels"].dtype == tf.int32:
                    piece["labels"] = tf.cast(piece["labels"], tf.int64)
            with tf.device(device):
                piece = {name: tf.identity(x) for name, x in piece.items()}
            self._batches.append(piece)

    def spec(self) -> None:
        """There is no iterator."""

    def start(self, step: int, num_steps: int) -> None:
        """There is no iterator."""

    def wait(self, iterators: None) -> list:
        """A step waits for nothing."""
        return [()] * len(self.devices)

    def batch(self, tower: int, awaited: tuple, step: tf.Tensor) -> Batch:
        """The batch of a tower; nothing is computed before the turn of the step."""
        with tf.device(self.devices[tower]), tf.control_dependencies([step]):
            return tf.nest.map_structure(tf.identity, self._batches[tower])

    def restart(self) -> None:
        """Nothing to do."""

    def batches_of(self, step: int) -> list[Batch]:
        """Returns the batches of one step, per tower, outside of a graph."""
        number = tf.constant(step, tf.int64)
        return [self.batch(tower, (), number) for tower in range(len(self.devices))]
