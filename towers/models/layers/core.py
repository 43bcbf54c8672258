"""Layers that Keras lacks, computes slowly on a CPU, or lacks for some float types."""

import keras
import tensorflow as tf

from towers.models.layers import cpu_convolutions, cpu_kernels
from towers.models.layers.device import OnDevice

# Limits within which Winograd's convolution is faster. With fewer channels, or filters
# for a kernel size, transforming the images costs about what the products save; with
# fewer images or pixels in total, transforming the kernel does. Larger images are not
# measured.
MIN_CHANNELS, MIN_FILTERS, MAX_PIXELS = 64, {3: 128, 5: 64}, 32 * 32
MIN_IMAGES, MIN_PIXELS = 16, 512

# In bfloat16 TensorFlow's gradient of the kernel is slow for small images.
MAX_PIXELS_OF_PRODUCTS, MIN_CHANNELS_OF_PRODUCTS = 8 * 8, 128


class Gelu(OnDevice):
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016)."""

    def call(self, inputs):
        return cpu_kernels.gelu(inputs, self.device_kind)


class LayerScale(keras.layers.Layer):
    """A trained factor per channel that ends a residual branch (arXiv:2103.17239)."""

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
    """Dropout whose noise is an input (Srivastava et al. 2014).

    The noise, uniform in [0, 1), is drawn with the batch from (seed, step), so masks do
    not depend on the number of towers and no generator state has to be saved. Elements
    with noise below `rate` become zero.
    """

    def __init__(self, rate: float, **kwargs):
        # Noise rounded to a 16-bit type would keep other elements.
        super().__init__(autocast=False, **kwargs)
        self.rate = rate

    def call(self, inputs, training=False):
        x, noise = inputs
        return dropped(x, noise, self.rate) if training else x


def dropped(x: tf.Tensor, noise: tf.Tensor, rate: float) -> tf.Tensor:
    """Return x / (1 - rate) if the noise is at least the rate, else 0."""
    keep = tf.cast(noise >= rate, x.dtype)
    return x * keep * tf.constant(1 / (1 - rate), x.dtype)


class Dense(OnDevice, keras.layers.Dense):
    """`keras.layers.Dense`, with the gradient of `add_bias` in bfloat16 on CPUs."""

    def call(self, inputs, training=None):
        is_exact = self.device_kind == "GPU" or self.compute_dtype != "bfloat16"
        if is_exact or not self.use_bias:
            return super().call(inputs, training=training)
        kernel, bias = map(tf.convert_to_tensor, (self.kernel, self.bias))
        outputs = cpu_kernels.dense(tf.cast(inputs, kernel.dtype), kernel, bias)
        return outputs if self.activation is None else self.activation(outputs)


def _finished(layer, outputs):
    """Add the bias of a convolution and apply its activation."""
    if layer.use_bias:
        outputs = cpu_kernels.add_bias(outputs, tf.convert_to_tensor(layer.bias))
    return outputs if layer.activation is None else layer.activation(outputs)


class Conv2D(OnDevice, keras.layers.Conv2D):
    """`keras.layers.Conv2D` without two faults of TensorFlow on CPUs.

    In bfloat16 it has the gradient of `add_bias`. A 1x1 convolution with strides takes
    the pixels first: with few channels oneDNN's gradient of the kernel overwrites
    memory (docs/networks.md).
    """

    @property
    def _is_for_cpu(self):
        return self.device_kind == "CPU" and self.data_format == "channels_last"

    def call(self, inputs):
        if self._is_for_cpu and self.compute_dtype == "bfloat16":
            return _finished(self, self.convolution_op(inputs, self.kernel))
        return super().call(inputs)

    def convolution_op(self, inputs, kernel):
        is_strided_pixel = self.kernel_size == (1, 1) and max(self.strides) > 1
        if self._is_for_cpu and is_strided_pixel and self.groups == 1:
            pixels = cpu_convolutions.strided_pixels(inputs, self.strides)
            return tf.nn.conv2d(pixels, tf.convert_to_tensor(kernel), 1, "VALID")
        return super().convolution_op(inputs, kernel)


class GroupedConv2D(Conv2D):
    """A convolution in groups of channels, in any float type on any device.

    TensorFlow has no gradient for it on a CPU without oneDNN, and in float64. Here one
    group per channel is a depthwise convolution, and fewer are convolutions side by
    side.
    """

    def call(self, inputs):
        return _finished(self, self.convolution_op(inputs, self.kernel))

    def convolution_op(self, inputs, kernel):
        padding, dilation = self.padding.upper(), self.dilation_rate
        strides = self.strides
        if self.kernel_size == (1, 1) and max(strides) > 1:
            inputs, strides = cpu_convolutions.strided_pixels(inputs, strides), (1, 1)
        is_depthwise = self.groups == inputs.shape[-1] == self.filters
        if is_depthwise and strides[0] == strides[1]:  # TensorFlow has no others
            kernel = tf.reshape(kernel, [*self.kernel_size, self.filters, 1])
            if self.device_kind == "CPU" and max(dilation) == 1:
                return cpu_convolutions.depthwise_conv2d_cpu(
                    inputs, kernel, strides, padding
                )
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


class DepthwiseConv2D(OnDevice, keras.layers.DepthwiseConv2D):
    """The Keras layer, with the gradients of `depthwise_conv2d_cpu` and `add_bias`."""

    def call(self, inputs):
        is_dense = self.data_format == "channels_last" and max(self.dilation_rate) == 1
        if self.device_kind == "GPU" or not is_dense:
            return super().call(inputs)
        kernel, padding = tf.convert_to_tensor(self.kernel), self.padding.upper()
        outputs = cpu_convolutions.depthwise_conv2d_cpu(
            inputs, kernel, self.strides, padding
        )
        return _finished(self, outputs)


class SameConv2D(Conv2D):
    """A convolution with stride 1, padding "same" and a kernel size of 3 or 5.

    On a CPU large ones use `winograd_conv2d` in float32 and float64, and products for
    the gradient of the kernel in bfloat16. `before_pool` leaves out the last row or
    column of an odd number, which a 2x2 pool drops: [n, 7, 5, c] become [n, 6, 4,
    filters].
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int] = 3,
        before_pool: bool = False,
        **kwargs,
    ):
        super().__init__(filters, kernel_size, padding="same", **kwargs)
        self.before_pool = before_pool

    def call(self, inputs):
        return _finished(self, self.convolution_op(inputs, self.kernel))

    def convolution_op(self, inputs, kernel):
        kernel = tf.convert_to_tensor(kernel)
        count, height, width, channels = inputs.shape
        count = cpu_convolutions.MANY_IMAGES if count is None else count
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
            return cpu_convolutions.winograd_conv2d(inputs, kernel, *kept)
        by_products = (
            is_for_cpu
            and min(channels, self.filters) >= MIN_CHANNELS_OF_PRODUCTS
            and height * width <= MAX_PIXELS_OF_PRODUCTS
            and inputs.dtype == tf.bfloat16
        )
        if by_products or kept != (height, width):
            return cpu_convolutions.conv2d_cpu(inputs, kernel, *kept, by_products)
        return super().convolution_op(inputs, kernel)

    def compute_output_shape(self, input_shape):
        count, *sizes, _ = input_shape
        if self.before_pool:
            sizes = [size - size % 2 for size in sizes]
        return count, *sizes, self.filters

    def get_config(self):
        config = super().get_config()
        del config["padding"]
        return config | {"before_pool": self.before_pool}


class StandardizedConv2D(Conv2D):
    """A convolution with standardized kernels (arXiv:1903.10520)."""

    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, standardized(kernel))


class StandardizedSameConv2D(SameConv2D):
    """A `SameConv2D` with standardized kernels."""

    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, standardized(kernel))


def standardized(kernel: tf.Tensor) -> tf.Tensor:
    """Return a kernel whose filters have mean 0 and variance 1."""
    wide = cpu_kernels.widened(tf.convert_to_tensor(kernel))
    mean, variance = tf.nn.moments(wide, [0, 1, 2], keepdims=True)
    # BiT's epsilon: a filter of zeros stays zero.
    return tf.cast((wide - mean) * tf.math.rsqrt(variance + 1e-8), kernel.dtype)


class FusedActivation(OnDevice, keras.layers.Activation):
    """`keras.layers.Activation`, with FUSED_ACTIVATIONS on CPUs."""

    def call(self, inputs):
        if self.device_kind == "CPU" and is_fused(self.activation):
            return cpu_kernels.FUSED_ACTIVATIONS[self.activation.__name__](inputs)
        return super().call(inputs)


def is_fused(activation) -> bool:
    """Return whether an activation function of Keras has a fused form for CPUs."""
    name, module = (getattr(activation, x, "") for x in ("__name__", "__module__"))
    return name in cpu_kernels.FUSED_ACTIVATIONS and module.startswith("keras.")


class PadChannels(keras.layers.Layer):
    """Zeros around the channels: the shortcut of He et al. 2015, option A."""

    def __init__(self, before: int, after: int, **kwargs):
        super().__init__(**kwargs)
        self.before, self.after = before, after

    def call(self, inputs):
        others = [[0, 0]] * (len(inputs.shape) - 1)
        return tf.pad(inputs, [*others, [self.before, self.after]])
