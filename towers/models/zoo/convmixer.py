"""ConvMixer for small images (Trockman and Kolter 2022, arXiv:2201.09792)."""

import keras
from keras import layers

from towers.models.layers.blocks import (
    check_image_size,
    classifier,
    normalization,
    scaled,
    uniform,
)
from towers.models.layers.core import Conv2D, Gelu, GroupedConv2D


def create_model(
    *,
    channels: int,
    depth: int,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
    patch_size: int = 2,
    kernel_size: int = 5,
) -> keras.Model:
    """Patches, then blocks that mix pixels within a channel and channels at a pixel.

    ConvMixer-256/8 with these patches and kernels has 594,186 parameters at 10 classes.
    Each convolution is followed by GELU and normalization. Kernels begin uniform within
    1 / sqrt(inputs), biases with 0. Every kernel is marked for decay.
    """
    name = f"convmixer_{channels}_{depth}"
    check_image_size(name, image_shape, at_least=patch_size)
    channels = scaled(channels, width)

    def active(layer, x):
        x = Gelu(name=f"{layer.name}_gelu")(layer(x))
        return normalization(x, f"{layer.name}_norm")

    settings = {"kernel_initializer": uniform(), "kernel_regularizer": regularizer}
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
    return keras.Model(images, classifier(x, num_classes, regularizer), name=name)
