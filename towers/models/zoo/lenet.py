"""The network that "Dive into Deep Learning" trains on several GPUs from scratch."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Regularizer, Shape
from towers.models.layers.core import Conv2D, Dense


def create_model(
    *, image_shape: Shape, num_classes: int, width: float, regularizer: Regularizer
) -> keras.Model:
    """Build two convolutions and two dense layers, whose kernels decay."""
    blocks.check_image_size("lenet", image_shape, at_least=14)
    # A narrower layer sums over fewer inputs; the factor is 1 at the book's width.
    narrower = width**-0.5

    def settings(name, stddev=0.01) -> dict:
        return {
            "kernel_initializer": keras.initializers.RandomNormal(stddev=stddev),
            "kernel_regularizer": regularizer,
            "name": name,
        }

    images = keras.Input(image_shape, name="images")
    x = Conv2D(blocks.scaled(20, width), 3, **settings("conv1"))(images)
    x = layers.ReLU(name="relu1")(x)
    x = layers.AveragePooling2D(2, name="pool1")(x)
    x = Conv2D(blocks.scaled(50, width), 5, **settings("conv2", 0.01 * narrower))(x)
    x = layers.ReLU(name="relu2")(x)
    x = layers.AveragePooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = Dense(blocks.scaled(128, width), **settings("fc3", 0.01 * narrower))(x)
    x = layers.ReLU(name="relu3")(x)
    logits = Dense(num_classes, **settings("fc4", 0.01 * narrower))(x)
    return keras.Model(images, logits, name="lenet")
