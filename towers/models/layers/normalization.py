"""Normalization, and the moving averages of batch normalization in a step."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.models.layers.cpu_kernels import (
    layer_normalization,
    local_response_normalization,
)
from towers.models.layers.device import OnDevice


class LocalResponseNormalization(keras.layers.Layer):
    """`tf.nn.lrn` (Krizhevsky et al. 2012), within groups of channels."""

    def __init__(
        self,
        depth_radius: int = 5,
        bias: float = 1.0,
        alpha: float = 1.0,
        beta: float = 0.5,
        groups: int = 1,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.depth_radius, self.groups = depth_radius, groups
        self.bias, self.alpha, self.beta = bias, alpha, beta

    def call(self, inputs):
        return local_response_normalization(
            inputs, self.depth_radius, self.bias, self.alpha, self.beta, self.groups
        )


class FusedLayerNormalization(OnDevice, keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` over the last axis, fused by XLA on CPUs."""

    def call(self, inputs):
        if self.device_kind == "GPU":
            return super().call(inputs)
        scale, offset = map(tf.convert_to_tensor, (self.gamma, self.beta))
        return layer_normalization(inputs, scale, offset, self.epsilon)


class GlobalResponseNormalization(keras.layers.Layer):
    """Factors for channels by their norm over the image (arXiv:2301.00808)."""

    def build(self, input_shape):
        shape = (input_shape[-1],)
        self.gamma = self.add_weight(shape=shape, initializer="zeros", name="gamma")
        self.beta = self.add_weight(shape=shape, initializer="zeros", name="beta")

    def call(self, inputs):
        gamma, beta = map(tf.convert_to_tensor, (self.gamma, self.beta))
        return inputs + response(inputs) * gamma + beta


def response(images: tf.Tensor) -> tf.Tensor:
    """Return images times their norms in a channel over the mean of all channels."""
    exact = keras.ops.cast(images, keras.backend.result_type(images.dtype, "float32"))
    squares = keras.ops.sum(keras.ops.square(exact), (1, 2), keepdims=True)
    norms = keras.ops.sqrt(squares + 1e-12)  # whose derivative is finite at 0
    means = keras.ops.mean(norms, axis=-1, keepdims=True)
    return images * keras.ops.cast(norms / (means + 1e-6), images.dtype)


class BatchNormalization(OnDevice, keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with TensorFlow's fused kernel.

    The kernel applies to images in float32 or 16 bits, when training and, on a GPU,
    when evaluating. Variables have the values of Keras' layer. With `is_frozen`
    training normalizes with the moving averages and keeps them.
    """

    def __init__(self, is_frozen: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.is_frozen = is_frozen

    @property
    def momentum(self) -> float | tf.Tensor:
        """Momentum of the moving averages, see `ramped`."""
        return self._moving_weights()[0]

    @momentum.setter
    def momentum(self, value: float):
        self._momentum = value

    def get_config(self):
        return super().get_config() | {"is_frozen": self.is_frozen}

    def call(self, inputs, training=None, mask=None):
        evaluates, training = not training, training and not self.is_frozen
        # The kernel silently raises an epsilon that is smaller than cuDNN's.
        is_fused = (
            ((training and self.trainable) or (evaluates and self.device_kind == "GPU"))
            and mask is None
            and not (self.synchronized or self.renorm)
            and len(inputs.shape) == 4
            and self.axis in (-1, 3)
            and inputs.dtype in (tf.float32, tf.bfloat16, tf.float16)
            and self.variable_dtype == "float32"
            and self.epsilon >= 1.001e-5
        )
        if not is_fused:
            return super().call(inputs, training=training, mask=mask)
        shape, moving = inputs.shape[-1:], (self.moving_mean, self.moving_variance)
        outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            inputs,
            tf.convert_to_tensor(self.gamma) if self.scale else tf.ones(shape),
            tf.convert_to_tensor(self.beta) if self.center else tf.zeros(shape),
            *map(tf.convert_to_tensor, moving if evaluates else ()),
            epsilon=self.epsilon,
            is_training=not evaluates,
        )
        if evaluates:
            return outputs
        count = inputs.shape[:-1].num_elements()
        if count is None:
            count = tf.cast(tf.reduce_prod(tf.shape(inputs)[:-1]), variance.dtype)
        self._move(self.moving_mean, mean, 1.0)
        self._move(self.moving_variance, variance, (count - 1) / count)
        return outputs

    def _moving_weights(self):
        ramp = getattr(_local, "ramp", None)
        return ramped(self._momentum, ramp, self.variable_dtype)

    def _move(self, moving, moment, factor):
        moment = tf.stop_gradient(moment)
        taken = getattr(_local, "taken", None)
        if taken is None or isinstance(factor, tf.Tensor):
            moment = self._moved(moving, moment * factor)
        elif moving.path not in taken:
            average = tf.convert_to_tensor(moving)
            taken[moving.path] = Moment(self._momentum, factor, average)
        else:  # called again: the average moves here, once for each call
            before = taken[moving.path]
            average = tf.convert_to_tensor(moving)
            if before.average is not None:
                average = self._moved(before.average, average * before.factor)
            moment = self._moved(average, moment * factor)
            taken[moving.path] = Moment()
        moving.assign(moment)

    def _moved(self, average, moment):
        stays, rest = self._moving_weights()
        return average * stays + moment * rest


def ramped(
    momentum: float | np.ndarray, ramp: tf.Tensor | None, dtype: tf.DType | str
) -> tuple:
    """Return the weights of the moving averages and of the new moments in a step.

    They are the momentum of a layer, or of several as a column, and 1 - momentum. A
    momentum in (0.9, 1), as in Keras' networks, is at most the ramp of the step (see
    `optim.update.ramp`), so the initial 0 and 1 are soon forgotten.
    """
    stays, rest = momentum, 1.0 - momentum
    is_ramped = (momentum > 0.9) & (momentum < 1)
    if ramp is None or not np.any(is_ramped):
        return stays, rest
    limit, least = tf.cast(ramp, dtype), tf.cast(1 - ramp, dtype)
    stays, rest = tf.constant(stays, dtype), tf.constant(rest, dtype)
    return (
        tf.where(is_ramped, tf.minimum(stays, limit), stays),
        tf.where(is_ramped, tf.maximum(rest, least), rest),
    )


class Normalization(keras.layers.Normalization):
    """Keras' layer, but it reads its moments at each call, not copies of them."""

    def call(self, inputs):
        rank, axes = len(inputs.shape), self.axis
        axes = sorted((axis % rank for axis in axes), reverse=True)

        def aligned(values):  # their last axis belongs to the last of `axes`
            values, shape = keras.ops.cast(values, inputs.dtype), [1] * rank
            for axis, size in zip(axes, reversed(values.shape), strict=False):
                shape[axis] = size
            return keras.ops.reshape(values, shape)

        moments = self.input_mean, self.input_variance
        if self.input_mean is None:
            moments = self.adapt_mean, self.adapt_variance
        mean, variance = map(aligned, moments)
        std = keras.ops.maximum(keras.ops.sqrt(variance), keras.config.epsilon())
        if self.invert:
            return inputs * std + mean
        return (inputs - mean) / std


def is_frozen(layer: keras.layers.Layer) -> bool:
    """Return whether training leaves a layer unchanged."""
    return getattr(layer, "is_frozen", False) or not layer.trainable


class Moment(NamedTuple):
    """A moment that has not moved its average yet; by default a new average."""

    momentum: float = 0.0  # before the ramp
    factor: float = 1.0  # multiplies the moment
    average: tf.Tensor | None = None  # before the move


# `taken`: path of a moving average -> Moment; `ramp`: as in `ramped`.
_local = threading.local()


@contextlib.contextmanager
def ramping(ramp: tf.Tensor | None) -> Iterator[None]:
    """Limit the momentum of `BatchNormalization` by the step, see `ramped`."""
    _local.ramp = ramp
    try:
        yield
    finally:
        _local.ramp = None


@contextlib.contextmanager
def taking_moments() -> Iterator[dict[str, Moment]]:
    """Collect moments of batches by path, to move all averages of a network at once."""
    _local.taken = {}
    try:
        yield _local.taken
    finally:
        _local.taken = None
