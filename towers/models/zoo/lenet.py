"""The network that "Dive into Deep Learning" trains on several GPUs from scratch."""

import keras
from keras import layers

from towers.models.layers.blocks import Builder
from towers.models.layers.core import Conv2D, Dense


def create_model(build: Builder) -> keras.Model:
    """Build two convolutions and two dense layers, whose kernels decay."""
    build.check_image_size("lenet", at_least=14)
    # A narrower layer sums over fewer inputs; the factor is 1 at the book's width.
    narrower = build.width**-0.5

    def settings(name, stddev=0.01) -> dict:
        return {
            "kernel_initializer": keras.initializers.RandomNormal(stddev=stddev),
            "kernel_regularizer": build.regularizer,
            "name": name,
        }

    x = Conv2D(build.scaled(20), 3, **settings("conv1"))(build.images)
    x = layers.ReLU(name="relu1")(x)
    x = layers.AveragePooling2D(2, name="pool1")(x)
    x = Conv2D(build.scaled(50), 5, **settings("conv2", 0.01 * narrower))(x)
    x = layers.ReLU(name="relu2")(x)
    x = layers.AveragePooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = Dense(build.scaled(128), **settings("fc3", 0.01 * narrower))(x)
    x = layers.ReLU(name="relu3")(x)
    logits = Dense(build.num_classes, **settings("fc4", 0.01 * narrower))(x)
    return build.network(logits, "lenet")
