"""Wide residual networks (Zagoruyko and Komodakis 2016, arXiv:1605.07146)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Builder


def create_model(
    build: Builder, *, depth: int, widening: int, dropout: float = 0.0
) -> keras.Model:
    """Build WRN-depth-widening, of 6n + 4 layers. Every kernel decays."""
    num_blocks, rest = divmod(depth - 4, 6)
    if rest:
        raise ValueError(f"depth={depth}: must be 6n + 4")
    x = build.conv(build.images, build.scaled(16), 3, 1, "stem_conv")
    for stage, count in enumerate((16, 32, 64), start=1):
        filters = build.scaled(count * widening)
        for block in range(1, num_blocks + 1):
            name, shortcut = f"stage{stage}_block{block}", x
            stride = 2 if stage > 1 and block == 1 else 1
            x = blocks.normalization(x, f"{name}_norm1")
            x = layers.ReLU(name=f"{name}_relu1")(x)
            if block == 1:
                shortcut = build.conv(x, filters, 1, stride, f"{name}_shortcut")
            x = build.conv(x, filters, 3, stride, f"{name}_conv1")
            x = blocks.normalization(x, f"{name}_norm2")
            x = layers.ReLU(name=f"{name}_relu2")(x)
            x = build.dropout(x, dropout, f"{name}_dropout")
            x = build.conv(x, filters, 3, 1, f"{name}_conv2")
            x = layers.Add(name=f"{name}_add")([shortcut, x])
    x = blocks.normalization(x, "last_norm")
    x = layers.ReLU(name="last_relu")(x)
    return build.network(build.classifier(x), f"wide_resnet_{depth}_{widening}")
