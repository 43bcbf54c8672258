"""Batches made by the devices that hold the images, for data sets that fit a device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.data.batches import Batch, EvalBatches, Orders, TrainBatches
from towers.data.sources import DeviceSource


class Resident:
    """A `towers.parallel.loop.Feed` of batches from memory, made by a device per tower.

    The host draws the orders of the epochs before the loop that needs them, and sends
    nothing in a step.
    """

    def __init__(
        self, batches: Sequence[TrainBatches | EvalBatches], devices: Sequence[str]
    ):
        self.devices = devices
        source = batches[0].source
        sources = {
            home: source if "CPU" in home else DeviceSource(source, home)
            for home in dict.fromkeys(map(_memory, devices))
        }
        self._batches: list[Any] = [
            dataclasses.replace(own, source=sources[_memory(device)])
            for own, device in zip(batches, devices, strict=True)
        ]
        self._orders, self._epochs = {}, range(0)
        if isinstance(batches[0], TrainBatches):
            for home in sources:
                with tf.device(home):
                    self._orders[home] = Orders(_variable([None]), _variable([]))

    def spec(self) -> None:
        """Return None, as no iterator is needed."""

    def start(self, step: int, num_steps: int) -> None:
        """Copy the orders of the epochs of these steps to the devices, unless there."""
        if not self._orders:
            return
        epochs = self._batches[0].epochs(step, num_steps)
        if epochs[0] in self._epochs and epochs[-1] in self._epochs:
            return
        with tf.device("CPU:0"):
            first = tf.constant(epochs[0], tf.int64)
            orders = self._batches[0].orders(first, len(epochs))
        for variables in self._orders.values():
            for variable, value in zip(variables, orders, strict=True):
                variable.assign(value)
        self._epochs = epochs

    def wait(self, iterators: None, steps: Sequence[tf.Tensor]) -> list:
        """Return the indices of each tower's images, in training.

        They are not part of `batch`, which XLA would compile again for orders of
        another length.
        """
        awaited: list[tuple] = [() for _ in self.devices]
        for tower, device in enumerate(self.devices if self._orders else ()):
            with tf.device(device):
                orders = Orders(*map(tf.identity, self._orders[_memory(device)]))
                awaited[tower] = (self._batches[tower].indices(steps[tower], orders),)
        return awaited

    def batch(self, tower: int, awaited: tuple, step: tf.Tensor) -> Batch:
        """Return the batch of a tower; on GPUs labels that are not mixed are int64."""
        with tf.device(self.devices[tower]):
            return self._batches[tower](step, *awaited)

    def restart(self) -> None:
        """Do nothing: the orders are functions of the epoch."""

    def batches_of(self, step: int) -> list[Batch]:
        """Return the batches of one step, per tower, outside of a graph."""
        self.start(step, 1)
        steps = [tf.constant(step, tf.int64)] * len(self.devices)
        numbered = enumerate(zip(self.wait(None, steps), steps, strict=True))
        return [self.batch(tower, *x) for tower, x in numbered]


def _memory(device):
    """Return the device whose memory another one computes in."""
    return "/CPU:0" if "CPU" in device else device


def _variable(shape):
    value = tf.zeros([0] * len(shape), tf.int64)
    return tf.Variable(value, trainable=False, shape=shape)
