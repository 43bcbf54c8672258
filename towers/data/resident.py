"""The batches of a training run, made by the device that holds the images.

For data sets that fit a device: no image is copied to it in a step. The batches equal
those of the stream.
"""

import dataclasses

import tensorflow as tf

from towers.data.batches import Batch, TrainBatches
from towers.data.sources import DeviceSource


class ResidentBatches:
    """Implements the protocol `towers.parallel.feed.Feed`.

    The host draws the order of an epoch when the epoch begins, and sends it. In a step
    it sends the step's number alone.

    Args:
        batches: the batches; their source is in memory.
        device: holds the images and makes the batches.
    """

    def __init__(self, batches: TrainBatches, device: str):
        self._device = device
        source = DeviceSource(batches.source, device)
        self._batches = dataclasses.replace(batches, source=source)
        with tf.device("CPU:0"):
            self._epoch = tf.Variable(-1, dtype=tf.int64, trainable=False, name="epoch")
            orders = tf.zeros_like(self._batches.orders(tf.constant(0, tf.int64)))
        with tf.device(device):
            self._orders = tf.Variable(orders, trainable=False, name="orders")

    def spec(self) -> None:
        """There is no iterator."""

    def start(self, step: int) -> None:
        """There is no iterator."""

    def wait(self, iterator: None, step: tf.Tensor) -> Batch:
        """Has the orders on the device that the batch of a step takes its images from.

        A variable keeps them, because drawing one costs more than a batch.
        """
        with tf.device("CPU:0"):
            epoch = self._batches.first_epoch(step)
            drawn = tf.cond(
                epoch == self._epoch, lambda: epoch, lambda: self._draw(epoch)
            )
            return {"epoch": drawn}

    def _draw(self, epoch):
        orders = self._batches.orders(epoch)
        with tf.device(self._device):
            sent = self._orders.assign(orders, read_value=False)
        with tf.control_dependencies([sent]):
            assigned = self._epoch.assign(epoch, read_value=False)
        with tf.control_dependencies([assigned]):
            return tf.identity(epoch)

    def batch(self, awaited: Batch, step: tf.Tensor) -> Batch:
        """The batch of a step; its labels, where they are not mixed, are int64."""
        with tf.control_dependencies([awaited["epoch"]]), tf.device(self._device):
            return self._batches(step, self._orders.read_value())

    def restart(self) -> None:
        """Nothing to do: the orders are functions of the epoch."""

    def variables(self) -> list[tuple[str, tf.Variable]]:
        """The orders, images and labels, each with its device."""
        return [
            (self._device, variable)
            for variable in (self._orders, *self._batches.source.variables)
        ]
