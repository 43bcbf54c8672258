"""Batches made by the devices that hold the images.

For data sets that fit a device: no image is copied to it in a step. The batches equal
those of the stream.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from towers.data.batches import Batch, EvalBatches, TrainBatches
from towers.data.sources import DeviceSource


class Resident:
    """Implements the protocol `towers.parallel.feed.Feed`.

    The host draws the order of an epoch when the epoch begins, and sends it. In a step
    it sends the step's number and the keys of the random numbers alone.

    Args:
        batches: per tower; their source is in memory.
        devices: per tower, holds the images and makes the batches. Those of a CPU share
            its memory.
    """

    def __init__(
        self, batches: Sequence[TrainBatches | EvalBatches], devices: Sequence[str]
    ):
        self._devices = devices
        sources = {
            home: DeviceSource(batches[0].source, home)
            for home in dict.fromkeys(map(_memory, devices))
        }
        self._batches = [
            dataclasses.replace(own, source=sources[_memory(device)])
            for own, device in zip(batches, devices, strict=True)
        ]
        self._orders = {}
        if isinstance(batches[0], TrainBatches):
            with tf.device("CPU:0"):
                self._epoch = _variable(tf.constant(-1, tf.int64))
                orders = batches[0].orders(tf.constant(0, tf.int64))
            for home in sources:
                with tf.device(home):
                    self._orders[home] = _variable(tf.zeros_like(orders))

    def spec(self) -> None:
        """There is no iterator."""

    def start(self, step: int) -> None:
        """There is no iterator."""

    def wait(self, iterators: None, step: tf.Tensor) -> Batch:
        """Has the orders on the devices that the batches of a step take their images
        from.

        Variables keep them, because drawing one costs more than a batch.
        """
        with tf.device("CPU:0"):
            if not self._orders:
                return {"step": tf.identity(step)}
            epoch = self._batches[0].first_epoch(step)
            drawn = tf.cond(
                epoch == self._epoch, lambda: epoch, lambda: self._draw(epoch)
            )
            return {"epoch": drawn}

    def _draw(self, epoch):
        orders, sent = self._batches[0].orders(epoch), []
        for home, variable in self._orders.items():
            with tf.device(home):
                sent.append(variable.assign(orders, read_value=False))
        with tf.control_dependencies(sent):
            assigned = self._epoch.assign(epoch, read_value=False)
        with tf.control_dependencies([assigned]):
            return tf.identity(epoch)

    def batches(self, awaited: Batch, step: tf.Tensor) -> list[Batch]:
        """Per tower its batch; labels that are not mixed are int64."""
        batches = []
        with tf.control_dependencies(list(awaited.values())):
            for own, device in zip(self._batches, self._devices, strict=True):
                with tf.device(device):
                    orders = self._orders.get(_memory(device))
                    more = [] if orders is None else [orders.read_value()]
                    batches.append(own(step, *more))
        return batches

    def restart(self) -> None:
        """Nothing to do: the orders are functions of the epoch."""

    def batches_of(self, step: int) -> list[Batch]:
        """Those of one step, not in a graph."""
        number = tf.constant(step, tf.int64)
        return self.batches(self.wait(None, number), number)


def _memory(device):
    """The device whose memory another one computes in."""
    return "/CPU:0" if "CPU" in device else device


def _variable(value):
    return tf.Variable(value, trainable=False)
