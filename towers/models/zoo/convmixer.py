"""ConvMixer for small images (Trockman and Kolter 2022, arXiv:2201.09792)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Regularizer, Shape
from towers.models.layers.core import Conv2D, Gelu, GroupedConv2D


def create_model(
    *,
    channels: int,
    depth: int,
    image_shape: Shape,
    num_classes: int,
    width: float,
    regularizer: Regularizer,
    patch_size: int = 2,
    kernel_size: int = 5,
) -> keras.Model:
    """Build patches, and blocks that mix pixels, then channels. Every kernel decays."""
    name = f"convmixer_{channels}_{depth}"
    blocks.check_image_size(name, image_shape, at_least=patch_size)
    channels = blocks.scaled(channels, width)

    def active(layer, x):
        x = Gelu(name=f"{layer.name}_gelu")(layer(x))
        return blocks.normalization(x, f"{layer.name}_norm")

    settings = {
        "kernel_initializer": blocks.uniform(),
        "kernel_regularizer": regularizer,
    }
    images = keras.Input(image_shape, name="images")
    patches = Conv2D(
        channels, patch_size, strides=patch_size, name="patches", **settings
    )
    x = active(patches, images)
    for block in range(1, depth + 1):
        pixels = GroupedConv2D(
            channels,
            kernel_size,
            groups=channels,
            padding="same",
            name=f"block{block}_pixels",
            **settings,
        )
        x = layers.Add(name=f"block{block}_add")([active(pixels, x), x])
        x = active(Conv2D(channels, 1, name=f"block{block}_channels", **settings), x)
    return keras.Model(
        images, blocks.classifier(x, num_classes, regularizer), name=name
    )
