"""Densely connected networks (Huang et al. 2016, arXiv:1608.06993)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Regularizer, Shape


def create_model(
    *,
    depth: int,
    growth: int,
    image_shape: Shape,
    num_classes: int,
    width: float,
    regularizer: Regularizer,
    dropout: float = 0.0,
) -> keras.Model:
    """Build DenseNet-BC-depth-growth, of 6n + 4 layers. Every kernel decays."""
    num_layers, rest = divmod(depth - 4, 6)
    if rest:
        raise ValueError(f"depth={depth}: must be 6n + 4")
    inputs = [keras.Input(image_shape, name="images")]

    def active_conv(x, filters, size, name):
        x = blocks.normalization(x, f"{name}_norm")
        x = layers.ReLU(name=f"{name}_relu")(x)
        x = blocks.conv(x, filters, size, 1, f"{name}_conv", regularizer)
        return blocks.dropout(x, dropout, f"{name}_dropout", inputs)

    channels = 2 * growth  # at width 1
    x = blocks.conv(
        inputs[0], blocks.scaled(channels, width), 3, 1, "stem_conv", regularizer
    )
    for block in (1, 2, 3):
        if block > 1:
            name, channels = f"transition{block - 1}", channels // 2
            x = active_conv(x, blocks.scaled(channels, width), 1, name)
            x = layers.AveragePooling2D(2, padding="same", name=f"{name}_pool")(x)
        for place in range(1, num_layers + 1):
            name = f"block{block}_layer{place}"
            new = active_conv(
                x, blocks.scaled(4 * growth, width), 1, f"{name}_bottleneck"
            )
            new = active_conv(new, blocks.scaled(growth, width), 3, name)
            x = layers.Concatenate(name=f"{name}_concat")([x, new])
        channels += num_layers * growth
    x = blocks.normalization(x, "last_norm")
    x = layers.ReLU(name="last_relu")(x)
    logits = blocks.classifier(x, num_classes, regularizer)
    return blocks.network(inputs, logits, f"densenet_bc_{depth}_{growth}")
