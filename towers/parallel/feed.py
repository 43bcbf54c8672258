"""The feed of the compiled loop: per tower its part of the batch of a step."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from towers.parallel.devices import HOST

Batch = dict[str, tf.Tensor]
# first step -> the batches of all steps from there on
Stream = Callable[[int], tf.data.Dataset]


class Feed(Protocol):
    """The batches of the compiled loop, made for each tower.

    In the graph of a step `wait` comes first, while no update is under way: it alone
    may take long or fail. Then the step computes on what `batches` gives.

    Attributes:
        devices: per tower, makes its batches.
    """

    devices: Sequence[str]

    def spec(self) -> Any:
        """The types of the iterators, for tracing."""

    def start(self, step: int, num_steps: int) -> Any:
        """Called before the loop of some steps; its iterators, if it has any."""

    def wait(self, iterators: Any) -> list:
        """Returns, in the graph, the tensors per tower that a step has to wait for.
        `iterators` are the result of `start`."""

    def batch(self, tower: int, awaited: Any, step: tf.Tensor) -> Batch:
        """Returns, in the graph, a tower's images of the batch of a step.

        Args:
            awaited: the tower's entry of `wait`.
            step: int64 scalar, on the device of the tower.
        """

    def restart(self) -> None:
        """Forgets what is held; the next `start` may be at any step."""

    def batches_of(self, step: int) -> list[Batch]:
        """Returns the batches of one step, per tower, outside of a graph."""


class Streams:
    """Batches that arrive one after the other.

    Args:
        streams: per tower; or a single one whose elements are tuples, an entry for each
            tower.
        devices: of the towers; batches of a GPU are copied there two steps ahead.
        processes: per tower a function (step, elements of the stream) -> batch, on the
            device; by default the stream has whole batches.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        devices: Sequence[str],
        processes: Sequence[Callable[[tf.Tensor, Batch], Batch]] | None = None,
    ):
        self._streams, self.devices = streams, devices
        self._processes = processes or [lambda _, batch: batch for _ in devices]
        self._on_gpus = "GPU" in devices[0]
        self._iterators = self._specs = None
        self._step, self._kept = None, []

    def _datasets(self, step):
        """Kept, as TensorFlow never frees all of the functions of one."""
        if step != self._step:
            datasets = [stream(step) for stream in self._streams]
            if self._on_gpus:
                datasets = [
                    dataset.map(_without_int32).apply(
                        tf.data.experimental.prefetch_to_device(device, 2)
                    )
                    for dataset, device in zip(datasets, self.devices, strict=True)
                ]
            elif isinstance(datasets[0].element_spec, dict):
                datasets = [tf.data.Dataset.zip(tuple(datasets))]
            self._step, self._kept = step, datasets
        return self._kept

    def spec(self):
        if self._specs is None:
            datasets = self._iterators or self._datasets(0)
            self._specs = [tf.data.IteratorSpec(x.element_spec) for x in datasets]
        return self._specs

    def start(self, step, num_steps):
        if self._iterators is None:
            self._iterators = [iter(dataset) for dataset in self._datasets(step)]
        return self._iterators

    def wait(self, iterators):
        if not self._on_gpus:
            with tf.device(HOST):
                return list(next(iterators[0]))
        elements = []
        for iterator, device in zip(iterators, self.devices, strict=True):
            # The next elements have the iterator's device, which no name tells.
            with tf.device(device):
                elements.append(tf.nest.map_structure(tf.identity, next(iterator)))
        return elements

    def batch(self, tower, awaited, step):
        with tf.device(self.devices[tower]):
            return self._processes[tower](step, awaited)

    def restart(self):
        self._iterators = None

    def batches_of(self, step):
        iterators = [iter(dataset) for dataset in self._datasets(step)]
        steps = [tf.constant(step, tf.int64)] * len(self.devices)
        return make_batches(self, self.wait(iterators), steps)


def make_batches(feed: Feed, awaited: list, steps: Sequence[tf.Tensor]) -> list[Batch]:
    """Returns each tower's images of the batch of a step; arguments per tower as of
    `Feed.batch`."""
    towers = range(len(feed.devices))
    return [feed.batch(*x) for x in zip(towers, awaited, steps, strict=True)]


def add_on_each(
    devices: Sequence[str], numbers: Sequence[tf.Tensor], addend: int
) -> list[tf.Tensor]:
    """Returns the number of each device, an int64 scalar, and the addend, on it."""
    sums = []
    for device, number in zip(devices, numbers, strict=True):
        with tf.device(device):
            sums.append(number + tf.constant(addend, tf.int64))
    return sums


def _without_int32(elements):
    """int32 tensors of a GPU are in host memory."""
    return {
        name: tf.cast(x, tf.int64) if x.dtype == tf.int32 else x
        for name, x in elements.items()
    }
