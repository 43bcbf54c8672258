"""ConvMixer for small images (Trockman and Kolter 2022, arXiv:2201.09792)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Builder
from towers.models.layers.core import Conv2D, Gelu, GroupedConv2D


def create_model(
    build: Builder,
    *,
    channels: int,
    depth: int,
    patch_size: int = 2,
    kernel_size: int = 5,
) -> keras.Model:
    """Build patches, and blocks that mix pixels, then channels. Every kernel decays."""
    name = f"convmixer_{channels}_{depth}"
    build.check_image_size(name, at_least=patch_size)
    channels = build.scaled(channels)

    def active(layer, x):
        x = Gelu(name=f"{layer.name}_gelu")(layer(x))
        return blocks.normalization(x, f"{layer.name}_norm")

    settings = {
        "kernel_initializer": blocks.uniform(),
        "kernel_regularizer": build.regularizer,
    }
    patches = Conv2D(
        channels, patch_size, strides=patch_size, name="patches", **settings
    )
    x = active(patches, build.images)
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
    return build.network(build.classifier(x), name)
