"""Differentiation over several devices, with control over every operation's device.

A `tf.GradientTape` over operations on several devices leaves the device of the backward
operations to TensorFlow, and sums of gradients wherever they fall. Here each recorded
function has its own tape inside its device, and what crosses devices is explicit: a
value moves to a device at most once, and its gradient comes back at most once.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf


class Value:
    """A tensor on a device, as one `DeviceTape` knows it."""

    def __init__(self, tensor: tf.Tensor, device: str, differentiable: bool = False):
        self.tensor, self.device = tensor, device
        self.differentiable = differentiable  # whether it may have a gradient
        self.copies: dict[str, Value] = {}  # by other devices
        self.gradients: list[tf.Tensor] = []  # received so far, on its device

    def gradient(self) -> tf.Tensor | None:
        """The sum of all gradients, on the value's device; None where there is none."""
        if len(self.gradients) > 1:
            with tf.device(self.device):
                self.gradients = [tf.add_n(self.gradients)]
        return self.gradients[0] if self.gradients else None


class DeviceTape:
    """Records functions applied on devices, and moves between devices."""

    def __init__(self):
        self._backward: list[Callable[[], None]] = []
        self.moved: list[tf.Tensor] = []  # of every move, forward and back

    def apply(
        self,
        device: str,
        function: Callable[..., tf.Tensor | Sequence[tf.Tensor]],
        inputs: Sequence[Value],
    ) -> list[Value]:
        """Calls `function` with the inputs' tensors, which are on that device."""
        # Each once: the tape gives the whole gradient for every mention of a source.
        sources = list(dict.fromkeys(v for v in inputs if v.differentiable))
        with tf.device(device):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
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
        """Has `backward` called in the backward pass, when it gets there."""
        self._backward.append(backward)

    def move(self, value: Value, device: str) -> Value:
        """The value on another device; the same copy each time."""
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
        """Leaves in every value the gradient of the weighted sum of scalar targets; to
        be called once.
        """
        for target, weight in targets:
            with tf.device(target.device):
                target.gradients.append(tf.identity(weight))
        for step in reversed(self._backward):
            step()
