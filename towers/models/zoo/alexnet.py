"""AlexNet (Krizhevsky et al. 2012), whole or in the two columns of its two GPUs."""

import keras
from keras import layers

from towers.models.layers.blocks import Builder
from towers.models.layers.core import Conv2D, Dense, GroupedConv2D
from towers.models.layers.normalization import LocalResponseNormalization

# Minimum side of an image for the paper's first convolution.
LARGE = 64


def create_model(build: Builder, *, columns: int) -> keras.Model:
    """Build five convolutions and three dense layers.

    In columns, the second, fourth and fifth convolution and the normalizations see only
    the channels of their own column. Images of fewer than 64 pixels have a 5x5
    convolution first, and begin as in He et al. 2015: from the paper's values they do
    not learn CIFAR-10.
    """
    name = "alexnet" if columns == 1 else "alexnet_two_columns"
    build.check_image_size(name, at_least=15)
    is_large = min(build.image_shape[:2]) >= LARGE
    # A narrower layer sums over fewer inputs; the factor is 1 at the paper's width.
    narrower = build.width**-0.5

    def settings(name, bias, stddev=0.01 * narrower, rectified=True) -> dict:
        initial = keras.initializers.RandomNormal(stddev=stddev)
        if rectified and not is_large:
            initial = keras.initializers.HeNormal()
        return {
            "kernel_initializer": initial,
            "bias_initializer": keras.initializers.Constant(bias if is_large else 0.0),
            "kernel_regularizer": build.regularizer,
            "name": name,
        }

    def conv(x, number, count, size, bias, groups=1):
        layer = GroupedConv2D(
            build.scaled(count, columns),
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
        units = build.scaled(4096, columns)
        x = Dense(units, **settings(f"fc{number}", 1.0))(x)
        x = layers.ReLU(name=f"relu{number}")(x)
        return build.dropout(x, 0.5, f"dropout{number}")

    x = build.images
    first: dict = {"kernel_size": 5, "padding": "same"}
    if is_large:
        x = layers.ZeroPadding2D(((1, 2), (1, 2)), name="pad1")(x)
        first = {"kernel_size": 11, "strides": 4}
    first |= settings("conv1", 0.0, 0.01)
    x = Conv2D(build.scaled(96, columns), **first)(x)
    x = layers.ReLU(name="relu1")(x)
    x = norm_pool(x, 1)
    x = norm_pool(conv(x, 2, 256, 5, 1.0, columns), 2)
    x = conv(x, 3, 384, 3, 0.0)
    x = conv(x, 4, 384, 3, 1.0, columns)
    x = conv(x, 5, 256, 3, 1.0, columns)
    x = layers.MaxPooling2D(3, strides=2, name="pool5")(x)
    x = layers.Flatten(name="flatten")(x)
    x = dense(dense(x, 6), 7)
    logits = Dense(build.num_classes, **settings("fc8", 0.0, rectified=False))(x)
    return build.network(logits, name)
