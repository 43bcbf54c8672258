"""The feed of the compiled loop: where it takes the batch of a step from."""

from collections.abc import Callable, Mapping
from typing import Protocol

import tensorflow as tf

from towers.parallel.devices import HOST
from towers.parallel.placement import without_kernel

Batch = dict[str, tf.Tensor]
Stream = Callable[[int], tf.data.Dataset]


class Feed(Protocol):
    """The batches of the compiled loop.

    In the graph of a step `wait` comes first, while no update is under way: it alone
    may take long or fail. Then the step computes on what `batch` gives.
    """

    def spec(self) -> tf.data.IteratorSpec | None:
        """The type of the iterator, for tracing."""

    def start(self, step: int) -> tf.data.Iterator | None:
        """Called before the loop, to go on at a step; its iterator, if it has one."""

    def wait(self, iterator: tf.data.Iterator | None, step: tf.Tensor) -> Batch:
        """In the graph: everything that a step has to wait for, not empty.

        Args:
            iterator: that of `start`.
            step: int64 scalar, on the host.
        """

    def batch(self, awaited: Batch, step: tf.Tensor) -> Batch:
        """In the graph: the batch of a step. It may assign variables next to the step,
        which ends once they are assigned.

        Args:
            awaited: what `wait` gave.
            step: int64 scalar, on the host.
        """

    def restart(self) -> None:
        """Forgets what is held; the next `start` may be at any step."""

    def variables(self) -> list[tuple[str, tf.Variable]]:
        """Its variables that are read in a step, each with its device."""


class HostStream:
    """Whole batches from a stream of the host.

    Args:
        stream: first step -> the batches of all steps from there on.
    """

    def __init__(self, stream: Stream):
        self._stream, self._iterator = stream, None

    def element_spec(self) -> dict[str, tf.TensorSpec]:
        """The types of the stream's elements."""
        batches = self._stream(0) if self._iterator is None else self._iterator
        return batches.element_spec

    def spec(self):
        return tf.data.IteratorSpec(self.element_spec())

    def start(self, step):
        if self._iterator is None:
            self._iterator = iter(self._stream(step))
        return self._iterator

    def wait(self, iterator, step):
        with tf.device(HOST):
            return next(iterator)

    def batch(self, awaited, step):
        return awaited

    def restart(self):
        self._iterator = None

    def variables(self):
        return []


class CopiedAhead:
    """Batches of a stream that a device gets one step before their use.

    While a step computes, the batch of the next one is copied into variables of the
    device. They keep it between two calls of the loop. So the stream is one batch ahead
    of the steps, and has to have one more.

    Args:
        stream: first step -> what the host makes of all steps from there on.
        device: gets it.
        process: (step, elements of the stream) -> batch, on the device.
    """

    def __init__(
        self,
        stream: Stream,
        device: str,
        process: Callable[[tf.Tensor, Batch], Batch] = lambda step, batch: batch,
    ):
        self._host, self._device, self._process = HostStream(stream), device, process
        self._held, self._is_holding = {}, False

    def spec(self):
        if not self._held:
            with tf.device(self._device):
                self._held = {
                    name: tf.Variable(
                        tf.zeros(x.shape, _dtype_on_device(x.dtype)),
                        trainable=False,
                        name=f"next_{name}",
                    )
                    for name, x in self._host.element_spec().items()
                }
        return self._host.spec()

    def start(self, step):
        iterator = self._host.start(step)
        if not self._is_holding:
            self.spec()
            self._copy(self.wait(iterator, step))
            self._is_holding = True
        return iterator

    def wait(self, iterator, step):
        with tf.device(HOST):
            return {
                name: tf.cast(x, _dtype_on_device(x.dtype))
                for name, x in self._host.wait(iterator, step).items()
            }

    def batch(self, awaited, step):
        with tf.control_dependencies([step]), tf.device(self._device):
            held = {name: x.read_value() for name, x in self._held.items()}
        with tf.control_dependencies(held.values()):
            self._copy(awaited)
        with tf.device(self._device):
            return self._process(step, held)

    def _copy(self, elements):
        with tf.device(self._device):
            for name, x in elements.items():
                self._held[name].assign(x, read_value=False)

    def restart(self):
        self._host.restart()
        self._is_holding = False

    def variables(self):
        self.spec()
        return [(self._device, variable) for variable in self._held.values()]


def _dtype_on_device(dtype):
    """int32 tensors of a GPU are in host memory."""
    return tf.int64 if dtype == tf.int32 else dtype


def has_gpu_kernels(
    process: Callable[[tf.Tensor, Batch], Batch], elements: Mapping[str, tf.TensorSpec]
) -> bool:
    """Whether a GPU has a kernel for every operation of `process`.

    Args:
        process: as in `CopiedAhead`.
        elements: those of the stream.
    """
    elements = {
        name: tf.TensorSpec(x.shape, _dtype_on_device(x.dtype))
        for name, x in elements.items()
    }
    traced = tf.function(process, autograph=False).get_concrete_function(
        tf.TensorSpec([], tf.int64), elements
    )
    return not without_kernel(traced.graph, "/GPU:0")
