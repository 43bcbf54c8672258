"""The batches of a training run, made inside the compiled step.

For data sets that fit a device: the images are stored there, and nothing is copied to
it in a step. The batches equal those of the stream.
"""

import dataclasses

import tensorflow as tf

from towers.data.batches import Batch, TrainBatches

# An epoch, and the orders of it and of those after it that a batch may reach.
Orders = tuple[tf.Tensor, tf.Tensor]


class ResidentBatches:
    """Batches made by a device that holds all images.

    Args:
        batches: the batches; their source is in memory.
        device: holds the images and makes the batches.
    """

    def __init__(self, batches: TrainBatches, device: str):
        self._device = device
        source = batches.source.copied_to(device)
        self._batches = dataclasses.replace(batches, source=source)

    def start(self, step: tf.Tensor) -> Orders:
        """The orders that the batch of a step takes its images from.

        They are carried from step to step, because drawing one costs more than a batch.
        """
        with tf.device(self._device):
            epoch = self._batches.first_epoch(step)
            return epoch, self._batches.orders(epoch)

    def __call__(self, step: tf.Tensor, orders: Orders) -> tuple[Batch, Orders]:
        """The batch of a step, int64, and the orders for the next one."""
        with tf.device(self._device):
            epoch, drawn = orders
            first = self._batches.first_epoch(step)
            drawn = tf.cond(
                first == epoch, lambda: drawn, lambda: self._batches.orders(first)
            )
            return self._batches(step, drawn), (first, drawn)
