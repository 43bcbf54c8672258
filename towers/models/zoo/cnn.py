"""The network of TensorFlow's CIFAR-10 multi-GPU tutorial."""

import keras
from keras import layers

from towers.models.layers.blocks import Builder
from towers.models.layers.core import Dense, SameConv2D
from towers.models.layers.normalization import LocalResponseNormalization


def create_model(build: Builder) -> keras.Model:
    """Build the network with initial values and weight decay of the tutorial."""
    # A narrower layer sums over fewer inputs; the factor is 1 at the tutorial's width.
    narrower, decay = build.width**-0.5, build.regularizer

    def conv(name, stddev, bias):
        return SameConv2D(
            build.scaled(64),
            kernel_size=5,
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=stddev),
            bias_initializer=keras.initializers.Constant(bias),
            name=name,
        )

    def dense(name, units, stddev, bias, regularizer=None):
        return Dense(
            units,
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=stddev),
            bias_initializer=keras.initializers.Constant(bias),
            kernel_regularizer=regularizer,
            name=name,
        )

    def pool(name):
        return layers.MaxPooling2D(3, strides=2, padding="same", name=name)

    def norm(name):
        return LocalResponseNormalization(4, 1.0, 0.001 / 9, 0.75, name=name)

    x = conv("conv1", 0.05, 0.0)(build.images)
    x = layers.ReLU(name="relu1")(x)
    x = pool("pool1")(x)
    x = norm("norm1")(x)
    x = conv("conv2", 0.05 * narrower, 0.1)(x)
    x = layers.ReLU(name="relu2")(x)
    x = norm("norm2")(x)
    x = pool("pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = dense("local3", build.scaled(384), 0.04 * narrower, 0.1, decay)(x)
    x = layers.ReLU(name="relu3")(x)
    x = dense("local4", build.scaled(192), 0.04 * narrower, 0.1, decay)(x)
    x = layers.ReLU(name="relu4")(x)
    classes, stddev = build.num_classes, 1 / build.scaled(192)
    return build.network(dense("softmax_linear", classes, stddev, 0.0)(x), "cnn")
