"""The network of TensorFlow's CIFAR-10 multi-GPU tutorial."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Regularizer, Shape
from towers.models.layers.core import Dense, SameConv2D
from towers.models.layers.normalization import LocalResponseNormalization


def create_model(
    *, image_shape: Shape, num_classes: int, width: float, regularizer: Regularizer
) -> keras.Model:
    """Build the network with initial values and weight decay of the tutorial."""
    # A narrower layer sums over fewer inputs; the factor is 1 at the tutorial's width.
    narrower = width**-0.5

    def conv(name, stddev, bias):
        return SameConv2D(
            blocks.scaled(64, width),
            kernel_size=5,
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=stddev),
            bias_initializer=keras.initializers.Constant(bias),
            name=name,
        )

    def dense(name, units, stddev, bias, decay=None):
        return Dense(
            units,
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=stddev),
            bias_initializer=keras.initializers.Constant(bias),
            kernel_regularizer=decay,
            name=name,
        )

    def pool(name):
        return layers.MaxPooling2D(3, strides=2, padding="same", name=name)

    def norm(name):
        return LocalResponseNormalization(4, 1.0, 0.001 / 9, 0.75, name=name)

    images = keras.Input(image_shape, name="images")
    x = conv("conv1", 0.05, 0.0)(images)
    x = layers.ReLU(name="relu1")(x)
    x = pool("pool1")(x)
    x = norm("norm1")(x)
    x = conv("conv2", 0.05 * narrower, 0.1)(x)
    x = layers.ReLU(name="relu2")(x)
    x = norm("norm2")(x)
    x = pool("pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = dense("local3", blocks.scaled(384, width), 0.04 * narrower, 0.1, regularizer)(x)
    x = layers.ReLU(name="relu3")(x)
    x = dense("local4", blocks.scaled(192, width), 0.04 * narrower, 0.1, regularizer)(x)
    x = layers.ReLU(name="relu4")(x)
    logits = dense("softmax_linear", num_classes, 1 / blocks.scaled(192, width), 0.0)(x)
    return keras.Model(images, logits, name="cnn")
