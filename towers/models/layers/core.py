"""Layers that Keras lacks, computes slowly on a CPU, or lacks for some float types, and
the choice of layers for a kind of device.
"""

import keras
import tensorflow as tf

from towers.keras_internals import layers_of
from towers.models.layers.attention import Attention
from towers.models.layers.cpu_convolutions import (
    MANY_IMAGES,
    conv2d_cpu,
    depthwise_conv2d_cpu,
    strided_pixels,
    winograd_conv2d,
)
from towers.models.layers.cpu_kernels import FUSED_ACTIVATIONS, add_bias, dense, gelu
from towers.models.layers.normalization import (
    BatchNormalization,
    FusedLayerNormalization,
)

# With fewer channels, or filters for a kernel's size, the transforms of images cost
# about what the products save; larger images have not been measured. With fewer images,
# or pixels in total, the transforms of the kernel do.
MIN_CHANNELS, MIN_FILTERS, MAX_PIXELS = 64, {3: 128, 5: 64}, 32 * 32
MIN_IMAGES, MIN_PIXELS = 16, 512

# In bfloat16 TensorFlow's gradient of the kernel is slow where images are small.
MAX_PIXELS_OF_PRODUCTS, MIN_CHANNELS_OF_PRODUCTS = 8 * 8, 128


class Gelu(keras.layers.Layer):
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016), for a
    kind of device, CPU or GPU, which `set_device_kind` sets for a whole network.
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
    residual branch (Touvron et al. 2021, arXiv:2103.17239).
    """

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


def dropped(x: tf.Tensor, noise: tf.Tensor, rate: float) -> tf.Tensor:
    """Dropout: x scaled by 1 / (1 - rate) where the noise is at least the rate, else
    0.
    """
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
    """

    device_kind = "CPU"  # or GPU, for which a depthwise convolution is computed

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


class SameConv2D(Conv2D):
    """`keras.layers.Conv2D` with stride 1 and padding "same".

    With at least MIN_CHANNELS channels, MIN_IMAGES images and so on they are
    convolved by `winograd_conv2d` on a CPU, in float32 or float64; in 16 bits that
    would be less exact, on a GPU slower. In bfloat16 on a CPU the gradient of a kernel
    of many channels is computed as matrix products. A trace has no device, so the kind
    of device is an argument; on the other kind the layer computes the same, only
    slower.

    The kernel size is 3 or 5. `before_pool` says that a pool of 2x2 follows, which
    drops the last row or column where their number is odd; they are not computed, so
    that images [n, 7, 5, c] become [n, 6, 4, filters], with kernels of 3x3 only.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int] = 3,
        before_pool: bool = False,
        device_kind: str = "CPU",
        **kwargs,
    ):
        super().__init__(filters, kernel_size, padding="same", **kwargs)
        self.before_pool, self.device_kind = before_pool, device_kind

    def convolution_op(self, inputs, kernel):
        kernel = tf.convert_to_tensor(kernel)
        count, height, width, channels = inputs.shape
        count = MANY_IMAGES if count is None else count
        kept = self.compute_output_shape(inputs.shape)[1:3]
        is_for_cpu = self.device_kind == "CPU"
        if (
            is_for_cpu
            and channels >= MIN_CHANNELS
            and self.filters >= MIN_FILTERS[self.kernel_size[0]]
            and height * width <= MAX_PIXELS
            and count >= MIN_IMAGES
            and count * height * width >= MIN_PIXELS
            and inputs.dtype in (tf.float32, tf.float64)
        ):
            return winograd_conv2d(inputs, kernel, *kept)
        by_products = (
            is_for_cpu
            and min(channels, self.filters) >= MIN_CHANNELS_OF_PRODUCTS
            and height * width <= MAX_PIXELS_OF_PRODUCTS
            and inputs.dtype == tf.bfloat16
        )
        if by_products or kept != (height, width):
            return conv2d_cpu(inputs, kernel, *kept, by_products)
        return super().convolution_op(inputs, kernel)

    def compute_output_shape(self, input_shape):
        count, *sizes, _ = input_shape
        if self.before_pool:
            sizes = [size - size % 2 for size in sizes]
        return count, *sizes, self.filters

    def get_config(self):
        config = super().get_config()
        del config["padding"]
        added = {"before_pool": self.before_pool, "device_kind": self.device_kind}
        return config | added


class PointwiseConv2D(Conv2D):
    """`keras.layers.Conv2D` of 1x1 with strides: takes the pixels, then has stride 1.

    With strides and few channels oneDNN's gradient of the kernel overwrites memory
    (docs/networks.md).
    """

    def convolution_op(self, inputs, kernel):
        pixels = strided_pixels(inputs, self.strides)
        return tf.nn.conv2d(pixels, tf.convert_to_tensor(kernel), 1, "VALID")


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
        self.before, self.after = before, after

    def call(self, inputs):
        return pad_channels(inputs, self.before, self.after)


def pad_channels(x: tf.Tensor, before: int, after: int) -> tf.Tensor:
    """Floats [..., c] with zeros before and after the last axis."""
    return tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[before, after]])


# Layers of Keras -> those with the right gradient of a bias in bfloat16 on a CPU.
EXACT_BIASES = {keras.layers.Conv2D: Conv2D, keras.layers.Dense: Dense}


def set_device_kind(model: keras.Model, device_kind: str) -> None:
    """Has a network compute in the way that suits a kind of device, CPU or GPU."""
    with_kind = SameConv2D, GroupedConv2D, Gelu, Attention, BatchNormalization
    for layer in layers_of(model):
        if isinstance(layer, with_kind):
            layer.device_kind = device_kind
        elif device_kind == "CPU" and (kind := _class_for_cpu(layer)):
            layer.__class__ = kind  # in place: its name, variables and users stay


def _class_for_cpu(layer):
    """The class that computes a layer of Keras on CPUs, or None."""
    kind = type(layer)
    is_last = getattr(layer, "data_format", "channels_last") == "channels_last"
    if kind is keras.layers.LayerNormalization:
        with_both = layer.scale and layer.center and not layer.rms_scaling
        return (
            FusedLayerNormalization if with_both and layer.axis in (-1, [-1]) else None
        )
    if kind is keras.layers.Activation:
        function = layer.activation
        is_fused = getattr(function, "__name__", "") in FUSED_ACTIVATIONS
        is_fused = is_fused and function.__module__.startswith("keras.")
        return FusedActivation if is_fused else None
    if kind is keras.layers.DepthwiseConv2D:
        is_dense = tuple(layer.dilation_rate) == (1, 1)
        return DepthwiseConv2D if is_last and is_dense else None
    if kind is keras.layers.Conv2D and is_last and layer.groups == 1:
        if layer.kernel_size == (1, 1) and max(layer.strides) > 1:
            return PointwiseConv2D
    if is_last and kind in EXACT_BIASES and layer.use_bias:
        return EXACT_BIASES[kind] if layer.compute_dtype == "bfloat16" else None
    return None
