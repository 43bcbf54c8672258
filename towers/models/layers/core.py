"""Layers that Keras lacks, computes slowly on a CPU, or lacks for some float types."""

import keras
import tensorflow as tf

from towers.models.layers.cpu_kernels import (
    FUSED_ACTIVATIONS,
    add_bias,
    gelu,
    strided_pixels,
)
from towers.models.layers.depthwise import depthwise_conv2d_cpu
from towers.models.layers.transformer_kernels import dense


class Gelu(keras.layers.Layer):
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016).

    Args:
        device_kind: CPU or GPU, for which it is computed; `set_device_kind` sets it for
            a whole network.
    """

    def __init__(self, device_kind: str = "CPU", **kwargs):
        super().__init__(**kwargs)
        self.device_kind = device_kind

    def call(self, inputs):
        return gelu(inputs, self.device_kind)

    def get_config(self):
        return super().get_config() | {"device_kind": self.device_kind}


class LayerScale(keras.layers.Layer):
    """A trained factor for each channel, initially `initial_value`, at the end of a
    residual branch (Touvron et al. 2021, arXiv:2103.17239)."""

    def __init__(self, initial_value: float = 1e-6, **kwargs):
        super().__init__(**kwargs)
        self.initial_value = initial_value

    def build(self, input_shape):
        initializer = keras.initializers.Constant(self.initial_value)
        self.gamma = self.add_weight(
            shape=(input_shape[-1],), initializer=initializer, name="gamma"
        )

    def call(self, inputs):
        return inputs * tf.convert_to_tensor(self.gamma)

    def get_config(self):
        return super().get_config() | {"initial_value": self.initial_value}


class Dropout(keras.layers.Layer):
    """Zeroes a share `rate` of the elements and scales the others by 1 / (1 - rate).

    Srivastava et al. 2014. The noise, uniform in [0, 1) and of the shape of the input,
    is a second input: it is drawn with the batch from (seed, step), so that masks do
    not depend on the number of towers and no generator's state has to be saved. An
    element is kept where its noise is at least `rate`.
    """

    def __init__(self, rate: float, **kwargs):
        # Noise rounded to a 16-bit type would keep other elements.
        super().__init__(autocast=False, **kwargs)
        self.rate = rate

    def call(self, inputs, training=False):
        x, noise = inputs
        return dropped(x, noise, self.rate) if training else x

    def get_config(self):
        return super().get_config() | {"rate": self.rate}


def dropped(x: tf.Tensor, noise: tf.Tensor, rate: float) -> tf.Tensor:
    """Dropout: x scaled by 1 / (1 - rate) where the noise is at least the rate, else
    0."""
    keep = tf.cast(noise >= rate, x.dtype)
    return x * keep * tf.constant(1 / (1 - rate), x.dtype)


class Dense(keras.layers.Dense):
    """`keras.layers.Dense` with a bias and the gradient of `add_bias`."""

    def call(self, inputs, training=None):
        kernel, bias = map(tf.convert_to_tensor, (self.kernel, self.bias))
        outputs = dense(tf.cast(inputs, kernel.dtype), kernel, bias)
        return outputs if self.activation is None else self.activation(outputs)


class Conv2D(keras.layers.Conv2D):
    """`keras.layers.Conv2D` with the gradient of `add_bias`."""

    def call(self, inputs):
        outputs = self.convolution_op(inputs, self.kernel)
        if self.use_bias:
            outputs = add_bias(outputs, tf.convert_to_tensor(self.bias))
        return outputs if self.activation is None else self.activation(outputs)


class GroupedConv2D(Conv2D):
    """A convolution in groups of channels, in any float type on any device.

    On a CPU without oneDNN, and in float64, TensorFlow has no gradient for a grouped
    convolution. Here as many groups as channels are a depthwise convolution, and fewer
    are convolutions side by side. The kernel is [height, width, channels / groups,
    filters], as in `keras.layers.Conv2D`, so that filters are its last axis in
    every case.

    Attributes:
        device_kind: CPU or GPU, for which a depthwise convolution is computed.
    """

    device_kind = "CPU"

    def convolution_op(self, inputs, kernel):
        padding, dilation = self.padding.upper(), self.dilation_rate
        strides = self.strides
        if self.kernel_size == (1, 1) and max(strides) > 1:
            inputs, strides = strided_pixels(inputs, strides), (1, 1)
        is_depthwise = self.groups == inputs.shape[-1] == self.filters
        if is_depthwise and strides[0] == strides[1]:  # TensorFlow has no others
            kernel = tf.reshape(kernel, [*self.kernel_size, self.filters, 1])
            if self.device_kind == "CPU" and max(dilation) == 1:
                return depthwise_conv2d_cpu(inputs, kernel, strides, padding)
            return tf.nn.depthwise_conv2d(
                inputs, kernel, [1, *strides, 1], padding, dilations=dilation
            )
        outputs = [
            tf.nn.conv2d(x, part, strides, padding, dilations=dilation)
            for x, part in zip(
                tf.split(inputs, self.groups, -1),
                tf.split(kernel, self.groups, -1),
                strict=True,
            )
        ]
        return tf.concat(outputs, -1) if len(outputs) > 1 else outputs[0]


class DepthwiseConv2D(keras.layers.DepthwiseConv2D):
    """The Keras layer with the gradients of `depthwise_conv2d_cpu` and `add_bias`."""

    call = Conv2D.call

    def convolution_op(self, inputs, kernel):
        kernel, padding = tf.convert_to_tensor(kernel), self.padding.upper()
        return depthwise_conv2d_cpu(inputs, kernel, self.strides, padding)


class FusedActivation(keras.layers.Activation):
    """`keras.layers.Activation` of a function in FUSED_ACTIVATIONS."""

    def call(self, inputs):
        return FUSED_ACTIVATIONS[self.activation.__name__](inputs)


class PadChannels(keras.layers.Layer):
    """Zeros before and after the channels: [..., c] to [..., before + c + after].

    The shortcut without parameters of He et al. 2015, section 3.3, option A.
    """

    def __init__(self, before: int, after: int, **kwargs):
        super().__init__(**kwargs)
        self.before = before
        self.after = after

    def call(self, inputs):
        return pad_channels(inputs, self.before, self.after)

    def get_config(self):
        return super().get_config() | {"before": self.before, "after": self.after}


def pad_channels(x: tf.Tensor, before: int, after: int) -> tf.Tensor:
    """Floats [..., c] with zeros before and after the last axis."""
    return tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[before, after]])
