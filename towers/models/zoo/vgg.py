"""VGG with batch normalization for small images (arXiv:1409.1556)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Builder


def create_model(
    build: Builder, *, stages: tuple[tuple[int, int], ...], dropout: float = 0.0
) -> keras.Model:
    """Build stages of (number, filters) of 3x3 convolutions, and one dense layer.

    The port of kuangliu/pytorch-cifar, without biases. On images of any size pools keep
    the last row and column of odd sides, and the head reads the mean of the pixels.
    """
    x = build.images
    for stage, (count, filters) in enumerate(stages, start=1):
        for place in range(1, count + 1):
            name = f"{stage}_{place}"
            x = build.conv(x, build.scaled(filters), 3, 1, f"conv{name}")
            x = blocks.normalization(x, f"norm{name}")
            x = layers.ReLU(name=f"relu{name}")(x)
        x = layers.MaxPooling2D(2, padding="same", name=f"pool{stage}")(x)
    logits = build.classifier(x, dropout)
    depth = sum(count for count, _ in stages) + 3  # the paper has three dense layers
    return build.network(logits, f"vgg{depth}_bn")
