"""VGG with batch normalization for small images (Simonyan and Zisserman 2014,
arXiv:1409.1556).
"""

import keras
from keras import layers

from towers.models.layers.blocks import classifier, conv, network, normalization, scaled


def create_model(
    *,
    stages: tuple[tuple[int, int], ...],
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
    dropout: float = 0.0,
) -> keras.Model:
    """Convolutions of 3x3 in stages that end in a pool, and one dense layer;
    configuration D has 14,724,042 parameters at 10 classes.

    The port to CIFAR of kuangliu/pytorch-cifar. Its 4,224 biases of convolutions, which
    normalization subtracts again, are left out. On images of other sizes than 32x32
    pools keep the last row and column of odd sides, and the head reads the mean over
    the pixels. Every kernel is marked for decay. `stages` are number and filters of the
    convolutions of each; dropout is before the head.
    """
    inputs = [keras.Input(image_shape, name="images")]
    x = inputs[0]
    for stage, (count, filters) in enumerate(stages, start=1):
        for place in range(1, count + 1):
            name = f"{stage}_{place}"
            x = conv(x, scaled(filters, width), 3, 1, f"conv{name}", regularizer)
            x = normalization(x, f"norm{name}")
            x = layers.ReLU(name=f"relu{name}")(x)
        x = layers.MaxPooling2D(2, padding="same", name=f"pool{stage}")(x)
    logits = classifier(x, num_classes, regularizer, dropout, inputs)
    depth = sum(count for count, _ in stages) + 3  # the paper has three dense layers
    return network(inputs, logits, f"vgg{depth}_bn")
