"""The network of TensorFlow's CIFAR-10 multi-GPU tutorial."""

import keras
from keras import layers

from towers.models.layers.blocks import scaled
from towers.models.layers.core import Dense, SameConv2D
from towers.models.layers.normalization import LocalResponseNormalization


def create_model(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
) -> keras.Model:
    """Two convolutions and two hidden dense layers; 1,068,298 parameters at 24x24x3.

    Initial standard deviations, biases, the normalization's constants and the choice of
    the decayed layers (the two hidden dense ones) are as in the tutorial; so are the
    layers' names.
    """
    # A narrower layer sums over fewer inputs; the factor is 1 at the tutorial's width.
    narrower = width**-0.5

    def conv(name, stddev, bias):
        return SameConv2D(
            scaled(64, width),
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
    x = dense("local3", scaled(384, width), 0.04 * narrower, 0.1, regularizer)(x)
    x = layers.ReLU(name="relu3")(x)
    x = dense("local4", scaled(192, width), 0.04 * narrower, 0.1, regularizer)(x)
    x = layers.ReLU(name="relu4")(x)
    logits = dense("softmax_linear", num_classes, 1 / scaled(192, width), 0.0)(x)
    return keras.Model(images, logits, name="cnn")
