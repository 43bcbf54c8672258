"""Layers that convolve in the way that suits a kind of device."""

import keras
import tensorflow as tf

from towers.keras_internals import layers_of
from towers.models.layers.attention import Attention
from towers.models.layers.core import (
    Conv2D,
    Dense,
    DepthwiseConv2D,
    FusedActivation,
    Gelu,
    GroupedConv2D,
)
from towers.models.layers.cpu_kernels import (
    FUSED_ACTIVATIONS,
    conv2d_cpu,
    strided_pixels,
)
from towers.models.layers.normalization import (
    BatchNormalization,
    FusedLayerNormalization,
)
from towers.models.layers.winograd import MANY_IMAGES, winograd_conv2d

# With fewer channels, or filters for a kernel's size, the transforms of images cost
# about what the products save; larger images have not been measured. With fewer images,
# or pixels in total, the transforms of the kernel do.
LEAST_CHANNELS, LEAST_FILTERS, MOST_PIXELS = 64, {3: 128, 5: 64}, 32 * 32
LEAST_IMAGES, LEAST_PIXELS = 16, 512

# Layers of Keras -> those with the right gradient of a bias in bfloat16 on a CPU.
EXACT_BIASES = {keras.layers.Conv2D: Conv2D, keras.layers.Dense: Dense}

# In bfloat16 TensorFlow's gradient of the kernel is slow where images are small.
MOST_PIXELS_OF_PRODUCTS, LEAST_CHANNELS_OF_PRODUCTS = 8 * 8, 128


class SameConv2D(Conv2D):
    """`keras.layers.Conv2D` with stride 1 and padding "same".

    With at least LEAST_CHANNELS channels, LEAST_IMAGES images and so on they are
    convolved by `winograd_conv2d` on a CPU, in float32 or float64; in 16 bits that
    would be less exact, on a GPU slower. In bfloat16 on a CPU the gradient of a kernel
    of many channels is computed as matrix products. A trace has no device, so the kind
    of device is an argument; on the other kind the layer computes the same, only
    slower.

    Args:
        filters, kernel_size: as of `keras.layers.Conv2D`, the second 3 or 5.
        before_pool: a pool of 2x2 follows that drops the last row or column where their
            number is odd; they are not computed, so that images [n, 7, 5, c] become
            [n, 6, 4, filters]. With kernels of 3x3 only.
        device_kind: CPU or GPU; `set_device_kind` sets it for a whole network.
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
        self.before_pool = before_pool
        self.device_kind = device_kind

    def convolution_op(self, inputs, kernel):
        kernel = tf.convert_to_tensor(kernel)
        count, height, width, channels = inputs.shape
        count = MANY_IMAGES if count is None else count
        kept = self.compute_output_shape(inputs.shape)[1:3]
        is_for_cpu = self.device_kind == "CPU"
        if (
            is_for_cpu
            and channels >= LEAST_CHANNELS
            and self.filters >= LEAST_FILTERS[self.kernel_size[0]]
            and height * width <= MOST_PIXELS
            and count >= LEAST_IMAGES
            and count * height * width >= LEAST_PIXELS
            and inputs.dtype in (tf.float32, tf.float64)
        ):
            return winograd_conv2d(inputs, kernel, *kept)
        by_products = (
            is_for_cpu
            and min(channels, self.filters) >= LEAST_CHANNELS_OF_PRODUCTS
            and height * width <= MOST_PIXELS_OF_PRODUCTS
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


def set_device_kind(model: keras.Model, device_kind: str) -> None:
    """Has a network compute in the way that suits a kind of device, CPU or GPU."""
    with_kind = SameConv2D, GroupedConv2D, Gelu, Attention, BatchNormalization
    for layer in layers_of(model):
        if isinstance(layer, with_kind):
            layer.device_kind = device_kind
        elif device_kind == "CPU" and _is_pointwise_with_strides(layer):
            # In place: its name, its variables and its users stay.
            layer.__class__ = PointwiseConv2D
        elif device_kind == "CPU" and _is_layer_normalization(layer):
            layer.__class__ = FusedLayerNormalization
        elif device_kind == "CPU" and _is_depthwise(layer):
            layer.__class__ = DepthwiseConv2D
        elif device_kind == "CPU" and _is_fused_activation(layer):
            layer.__class__ = FusedActivation
        elif device_kind == "CPU" and _has_bias_in_bfloat16(layer):
            layer.__class__ = EXACT_BIASES[type(layer)]


def _has_bias_in_bfloat16(layer):
    return (
        type(layer) in EXACT_BIASES
        and layer.use_bias
        and layer.compute_dtype == "bfloat16"
        and getattr(layer, "data_format", "channels_last") == "channels_last"
    )


def _is_layer_normalization(layer):
    """With a scale and an offset for each entry of the last axis."""
    return (
        type(layer) is keras.layers.LayerNormalization
        and layer.scale
        and layer.center
        and not layer.rms_scaling
        and layer.axis in (-1, [-1])
    )


def _is_pointwise_with_strides(layer):
    return (
        type(layer) is keras.layers.Conv2D
        and layer.kernel_size == (1, 1)
        and max(layer.strides) > 1
        and layer.groups == 1
        and layer.data_format == "channels_last"
    )


def _is_depthwise(layer):
    return (
        type(layer) is keras.layers.DepthwiseConv2D
        and layer.data_format == "channels_last"
        and tuple(layer.dilation_rate) == (1, 1)
    )


def _is_fused_activation(layer):
    return (
        type(layer) is keras.layers.Activation
        and getattr(layer.activation, "__name__", "") in FUSED_ACTIVATIONS
        and layer.activation.__module__.startswith("keras.")
    )
