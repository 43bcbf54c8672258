"""Densely connected networks (Huang et al. 2016, arXiv:1608.06993)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Builder


def create_model(
    build: Builder, *, depth: int, growth: int, dropout: float = 0.0
) -> keras.Model:
    """Build DenseNet-BC-depth-growth, of 6n + 4 layers. Every kernel decays."""
    num_layers, rest = divmod(depth - 4, 6)
    if rest:
        raise ValueError(f"depth={depth}: must be 6n + 4")

    def active_conv(x, filters, size, name):
        x = blocks.normalization(x, f"{name}_norm")
        x = layers.ReLU(name=f"{name}_relu")(x)
        x = build.conv(x, filters, size, 1, f"{name}_conv")
        return build.dropout(x, dropout, f"{name}_dropout")

    channels = 2 * growth  # at width 1
    x = build.conv(build.images, build.scaled(channels), 3, 1, "stem_conv")
    for block in (1, 2, 3):
        if block > 1:
            name, channels = f"transition{block - 1}", channels // 2
            x = active_conv(x, build.scaled(channels), 1, name)
            x = layers.AveragePooling2D(2, padding="same", name=f"{name}_pool")(x)
        for place in range(1, num_layers + 1):
            name = f"block{block}_layer{place}"
            new = active_conv(x, build.scaled(4 * growth), 1, f"{name}_bottleneck")
            new = active_conv(new, build.scaled(growth), 3, name)
            x = layers.Concatenate(name=f"{name}_concat")([x, new])
        channels += num_layers * growth
    x = blocks.normalization(x, "last_norm")
    x = layers.ReLU(name="last_relu")(x)
    return build.network(build.classifier(x), f"densenet_bc_{depth}_{growth}")
