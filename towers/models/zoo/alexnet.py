"""AlexNet (Krizhevsky et al. 2012), whole or in the two columns of its two GPUs."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Regularizer, Shape
from towers.models.layers.core import Conv2D, Dense, Dropout, GroupedConv2D
from towers.models.layers.normalization import LocalResponseNormalization

# Minimum side of an image for the paper's first convolution.
LARGE = 64


def create_model(
    *,
    columns: int,
    image_shape: Shape,
    num_classes: int,
    width: float,
    regularizer: Regularizer,
) -> keras.Model:
    """Build five convolutions and three dense layers.

    In columns, the second, fourth and fifth convolution and the normalizations see only
    the channels of their own column. Images of fewer than 64 pixels have a 5x5
    convolution first, and begin as in He et al. 2015: from the paper's values they do
    not learn CIFAR-10.
    """
    name = "alexnet" if columns == 1 else "alexnet_two_columns"
    blocks.check_image_size(name, image_shape, at_least=15)
    is_large = min(image_shape[:2]) >= LARGE
    # A narrower layer sums over fewer inputs; the factor is 1 at the paper's width.
    narrower = width**-0.5

    def settings(name, bias, stddev=0.01 * narrower, rectified=True) -> dict:
        initial = keras.initializers.RandomNormal(stddev=stddev)
        if rectified and not is_large:
            initial = keras.initializers.HeNormal()
        return {
            "kernel_initializer": initial,
            "bias_initializer": keras.initializers.Constant(bias if is_large else 0.0),
            "kernel_regularizer": regularizer,
            "name": name,
        }

    def conv(x, number, count, size, bias, groups=1):
        layer = GroupedConv2D(
            blocks.scaled(count, width, columns),
            size,
            padding="same",
            groups=groups,
            **settings(f"conv{number}", bias),
        )
        return layers.ReLU(name=f"relu{number}")(layer(x))

    def norm_pool(x, number):
        x = LocalResponseNormalization(
            2, 2.0, 1e-4, 0.75, columns, name=f"norm{number}"
        )(x)
        return layers.MaxPooling2D(3, strides=2, name=f"pool{number}")(x)

    def dense(x, number):
        units = blocks.scaled(4096, width, columns)
        noise = keras.Input((units,), name=f"dropout{number}_noise")
        x = Dense(units, **settings(f"fc{number}", 1.0))(x)
        x = layers.ReLU(name=f"relu{number}")(x)
        return Dropout(0.5, name=f"dropout{number}")([x, noise]), noise

    x = images = keras.Input(image_shape, name="images")
    first: dict = {"kernel_size": 5, "padding": "same"}
    if is_large:
        x = layers.ZeroPadding2D(((1, 2), (1, 2)), name="pad1")(x)
        first = {"kernel_size": 11, "strides": 4}
    first |= settings("conv1", 0.0, 0.01)
    x = Conv2D(blocks.scaled(96, width, columns), **first)(x)
    x = layers.ReLU(name="relu1")(x)
    x = norm_pool(x, 1)
    x = norm_pool(conv(x, 2, 256, 5, 1.0, columns), 2)
    x = conv(x, 3, 384, 3, 0.0)
    x = conv(x, 4, 384, 3, 1.0, columns)
    x = conv(x, 5, 256, 3, 1.0, columns)
    x = layers.MaxPooling2D(3, strides=2, name="pool5")(x)
    x = layers.Flatten(name="flatten")(x)
    x, noise6 = dense(x, 6)
    x, noise7 = dense(x, 7)
    logits = Dense(num_classes, **settings("fc8", 0.0, rectified=False))(x)
    return keras.Model([images, noise6, noise7], logits, name=name)
