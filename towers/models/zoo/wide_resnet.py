"""Wide residual networks (Zagoruyko and Komodakis 2016, arXiv:1605.07146)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import classifier, conv, network, normalization, scaled


def create_model(
    *,
    depth: int,
    widening: int,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
    dropout: float = 0.0,
) -> keras.Model:
    """WRN-depth-widening, of 6n + 4 layers.

    WRN-28-10 has 36,479,194 parameters at 10 classes. Every kernel is marked for decay.

    Args:
        dropout: before the second convolution of each block.
    """
    num_blocks, rest = divmod(depth - 4, 6)
    if rest:
        raise ValueError(f"depth={depth}: must be 6n + 4")
    inputs = [keras.Input(image_shape, name="images")]
    x = conv(inputs[0], scaled(16, width), 3, 1, "stem_conv", regularizer)
    for stage, count in enumerate((16, 32, 64), start=1):
        for block in range(1, num_blocks + 1):
            x = _block(
                x,
                scaled(count * widening, width),
                stride=2 if stage > 1 and block == 1 else 1,
                is_first=block == 1,
                name=f"stage{stage}_block{block}",
                regularizer=regularizer,
                dropout=dropout,
                inputs=inputs,
            )
    x = normalization(x, "last_norm")
    x = layers.ReLU(name="last_relu")(x)
    logits = classifier(x, num_classes, regularizer)
    return network(inputs, logits, f"wide_resnet_{depth}_{widening}")


def _block(x, filters, *, stride, is_first, name, regularizer, dropout, inputs):
    """Normalization and rectifier before each convolution; where the channels change,
    both branches read the first of them."""
    shortcut = x
    x = normalization(x, f"{name}_norm1")
    x = layers.ReLU(name=f"{name}_relu1")(x)
    if is_first:
        shortcut = conv(x, filters, 1, stride, f"{name}_shortcut", regularizer)
    x = conv(x, filters, 3, stride, f"{name}_conv1", regularizer)
    x = normalization(x, f"{name}_norm2")
    x = layers.ReLU(name=f"{name}_relu2")(x)
    x = blocks.dropout(x, dropout, f"{name}_dropout", inputs)
    x = conv(x, filters, 3, 1, f"{name}_conv2", regularizer)
    return layers.Add(name=f"{name}_add")([shortcut, x])
