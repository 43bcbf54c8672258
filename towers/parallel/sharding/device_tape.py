"""Differentiation over several devices, with control over the device of each operation.

A `tf.GradientTape` over several devices leaves the placement of backward operations and
of sums of gradients to TensorFlow. Here each recorded function has its own tape on its
device, and transfers are explicit: a value moves to a device at most once, and its
gradient comes back at most once.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf


class Value:
    """A tensor on a device, recorded by a `DeviceTape`.

    `copies` are by other devices; `gradients` were received so far, on the device.
    """

    def __init__(self, tensor: tf.Tensor, device: str, differentiable: bool = False):
        self.tensor, self.device = tensor, device
        self.differentiable = differentiable
        self.copies: dict[str, Value] = {}
        self.gradients: list[tf.Tensor] = []

    def gradient(self) -> tf.Tensor | None:
        """Return the sum of all gradients, on the device of the value, or None."""
        if len(self.gradients) > 1:
            with tf.device(self.device):
                self.gradients = [tf.add_n(self.gradients)]
        return self.gradients[0] if self.gradients else None


class DeviceTape:
    """Records functions applied on devices, and moves between devices.

    `moved` has the tensors of all moves, forward and backward.
    """

    def __init__(self) -> None:
        self._backward: list[Callable[[], None]] = []
        self.moved: list[tf.Tensor] = []

    def apply(
        self,
        device: str,
        function: Callable[..., tf.Tensor | Sequence[tf.Tensor]],
        inputs: Sequence[Value],
    ) -> list[Value]:
        """Call `function` with the tensors of inputs, which are on that device."""
        # Each once: the tape returns the full gradient for every mention of a source.
        sources = list(dict.fromkeys(v for v in inputs if v.differentiable))
        with tf.device(device), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([value.tensor for value in sources])
            outputs = function(*[value.tensor for value in inputs])
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        results = [
            Value(tensor, device, bool(sources) and tensor.dtype.is_floating)
            for tensor in outputs
        ]

        def backward():
            reached = [result for result in results if result.gradients]
            if not reached:
                return
            with tf.device(device):
                gradients = tape.gradient(
                    [result.tensor for result in reached],
                    [value.tensor for value in sources],
                    output_gradients=[result.gradient() for result in reached],
                )
            for value, gradient in zip(sources, gradients, strict=True):
                if gradient is not None:
                    value.gradients.append(tf.convert_to_tensor(gradient))

        if sources:
            self._backward.append(backward)
        return results

    def record(self, backward: Callable[[], None]) -> None:
        """Let the backward pass call a function."""
        self._backward.append(backward)

    def move(self, value: Value, device: str) -> Value:
        """Return the value on another device, the same copy each time."""
        if value.device == device:
            return value
        if device in value.copies:
            return value.copies[device]
        with tf.device(device):
            copy = Value(tf.identity(value.tensor), device, value.differentiable)
        value.copies[device] = copy
        self.moved.append(value.tensor)

        def backward():
            gradient = copy.gradient()
            if gradient is None:
                return
            with tf.device(value.device):
                value.gradients.append(tf.identity(gradient))
            self.moved.append(gradient)

        if value.differentiable:
            self._backward.append(backward)
        return copy

    def backward(self, targets: Sequence[tuple[Value, tf.Tensor]]) -> None:
        """Store gradients of the weighted sum of scalar targets in all values, once."""
        for target, weight in targets:
            with tf.device(target.device):
                target.gradients.append(tf.identity(weight))
        for step in reversed(self._backward):
            step()
