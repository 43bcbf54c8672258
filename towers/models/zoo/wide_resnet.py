"""Wide residual networks (Zagoruyko and Komodakis 2016, arXiv:1605.07146)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Regularizer, Shape


def create_model(
    *,
    depth: int,
    widening: int,
    image_shape: Shape,
    num_classes: int,
    width: float,
    regularizer: Regularizer,
    dropout: float = 0.0,
) -> keras.Model:
    """Build WRN-depth-widening, of 6n + 4 layers. Every kernel decays."""
    num_blocks, rest = divmod(depth - 4, 6)
    if rest:
        raise ValueError(f"depth={depth}: must be 6n + 4")
    inputs = [keras.Input(image_shape, name="images")]
    x = blocks.conv(inputs[0], blocks.scaled(16, width), 3, 1, "stem_conv", regularizer)
    for stage, count in enumerate((16, 32, 64), start=1):
        filters = blocks.scaled(count * widening, width)
        for block in range(1, num_blocks + 1):
            name, shortcut = f"stage{stage}_block{block}", x
            stride = 2 if stage > 1 and block == 1 else 1
            x = blocks.normalization(x, f"{name}_norm1")
            x = layers.ReLU(name=f"{name}_relu1")(x)
            if block == 1:
                shortcut = blocks.conv(
                    x, filters, 1, stride, f"{name}_shortcut", regularizer
                )
            x = blocks.conv(x, filters, 3, stride, f"{name}_conv1", regularizer)
            x = blocks.normalization(x, f"{name}_norm2")
            x = layers.ReLU(name=f"{name}_relu2")(x)
            x = blocks.dropout(x, dropout, f"{name}_dropout", inputs)
            x = blocks.conv(x, filters, 3, 1, f"{name}_conv2", regularizer)
            x = layers.Add(name=f"{name}_add")([shortcut, x])
    x = blocks.normalization(x, "last_norm")
    x = layers.ReLU(name="last_relu")(x)
    logits = blocks.classifier(x, num_classes, regularizer)
    return blocks.network(inputs, logits, f"wide_resnet_{depth}_{widening}")
