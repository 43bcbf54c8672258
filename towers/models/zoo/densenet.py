"""Densely connected networks (Huang et al. 2016, arXiv:1608.06993)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import classifier, conv, network, normalization, scaled


def create_model(
    *,
    depth: int,
    growth: int,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
    dropout: float = 0.0,
) -> keras.Model:
    """DenseNet-BC-depth-growth for small images, of 6n + 4 layers.

    DenseNet-BC-100-12 has 769,162 parameters at 10 classes. Normalization and rectifier
    come before each convolution; a layer adds `growth` channels, by 1x1 to four times
    as many and 3x3, to those that it reads, and a transition halves them. Every kernel
    is marked for decay. Dropout is after each convolution but the first.
    """
    num_layers, rest = divmod(depth - 4, 6)
    if rest:
        raise ValueError(f"depth={depth}: must be 6n + 4")
    inputs = [keras.Input(image_shape, name="images")]

    def active_conv(x, filters, size, name):
        x = normalization(x, f"{name}_norm")
        x = layers.ReLU(name=f"{name}_relu")(x)
        x = conv(x, filters, size, 1, f"{name}_conv", regularizer)
        return blocks.dropout(x, dropout, f"{name}_dropout", inputs)

    channels = 2 * growth  # where the width is 1
    x = conv(inputs[0], scaled(channels, width), 3, 1, "stem_conv", regularizer)
    for block in (1, 2, 3):
        if block > 1:
            name, channels = f"transition{block - 1}", channels // 2
            x = active_conv(x, scaled(channels, width), 1, name)
            x = layers.AveragePooling2D(2, padding="same", name=f"{name}_pool")(x)
        for place in range(1, num_layers + 1):
            name = f"block{block}_layer{place}"
            new = active_conv(x, scaled(4 * growth, width), 1, f"{name}_bottleneck")
            new = active_conv(new, scaled(growth, width), 3, name)
            x = layers.Concatenate(name=f"{name}_concat")([x, new])
        channels += num_layers * growth
    x = normalization(x, "last_norm")
    x = layers.ReLU(name="last_relu")(x)
    logits = classifier(x, num_classes, regularizer)
    return network(inputs, logits, f"densenet_bc_{depth}_{growth}")
