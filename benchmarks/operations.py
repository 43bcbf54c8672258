"""The number of operations of a network."""

import math

import keras
from keras import layers

from towers.models.layers.attention import Attention, Prefix, Tokens, WindowAttention
from towers.models.layers.core import LayerScale, SameConv2D
from towers.models.layers.normalization import GlobalResponseNormalization
from towers.models.zoo.speedrun import Whitening

# Layers without products of inputs and parameters, or with a few per channel.
UNCOUNTED = (
    layers.BatchNormalization,
    layers.GroupNormalization,
    layers.LayerNormalization,
    GlobalResponseNormalization,
    LayerScale,
    Prefix,
    Tokens,
)

CONVOLUTIONS = (layers.Conv2D, layers.DepthwiseConv2D, layers.SeparableConv2D)


def flops_per_image(model: keras.Model) -> int:
    """Count the floating-point operations of the forward pass on one image.

    Counted are the products of convolutions, dense layers and attention, with padding
    and what `SameConv2D` leaves out; ValueError if another layer has parameters.
    """
    return sum(_flops(layer) for layer in model.layers)


def _flops(layer):
    if isinstance(layer, (*CONVOLUTIONS, layers.Dense, Whitening)):
        # The kernel of a grouped convolution has the inputs of one group only.
        image = layer.input if isinstance(layer, SameConv2D) else layer.output
        positions = math.prod(image.shape[1:-1])
        kernels = [w for w in layer.weights if "kernel" in w.name]
        return 2 * positions * sum(math.prod(kernel.shape) for kernel in kernels)
    if isinstance(layer, Attention):
        *image, channels = layer.output.shape[1:]
        tokens = math.prod(image)
        keys = layer.size**2 if isinstance(layer, WindowAttention) else tokens
        return 2 * 2 * tokens * keys * channels
    if layer.weights and not isinstance(layer, UNCOUNTED):
        raise ValueError(
            f"layer {layer.name} ({type(layer).__name__}): its operations are not "
            "counted"
        )
    return 0
