"""Building blocks of residual networks."""

import keras
from keras import layers

from towers.models.convolution import SameConv2D
from towers.models.layers import BatchNormalization


def convolution(
    x: keras.KerasTensor,
    filters: int,
    size: int,
    stride: int,
    name: str,
    regularizer: keras.regularizers.Regularizer | None,
) -> keras.KerasTensor:
    """A convolution without biases.

    Its windows are centered on the pixels that a shortcut of the same stride takes;
    with TensorFlow's own padding they would lie one pixel further.
    """
    settings = {
        "use_bias": False,
        "kernel_initializer": "he_normal",
        "kernel_regularizer": regularizer,
        "name": name,
    }
    if size == 3 and stride == 1:
        return SameConv2D(filters, **settings)(x)
    if size > 1:
        x = layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x)
    return layers.Conv2D(filters, size, strides=stride, **settings)(x)


def normalization(
    x: keras.KerasTensor, name: str, gamma_initializer: str = "ones"
) -> keras.KerasTensor:
    """Batch normalization, with the smallest epsilon that its fast kernel takes."""
    return BatchNormalization(
        momentum=0.9,
        epsilon=1.001e-5,
        gamma_initializer=gamma_initializer,
        name=name,
    )(x)


def classifier(
    x: keras.KerasTensor,
    num_classes: int,
    regularizer: keras.regularizers.Regularizer | None,
) -> keras.KerasTensor:
    """Global average pooling and the logits.

    No rectifier follows, so that He's initializer would make the first logits too
    large.
    """
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return layers.Dense(
        num_classes,
        kernel_initializer=uniform(),
        kernel_regularizer=regularizer,
        name="logits",
    )(x)


def uniform(seed: int | None = None) -> keras.initializers.Initializer:
    """Uniform within 1 / sqrt(inputs), the default of the authors' framework, Torch."""
    return keras.initializers.VarianceScaling(
        1 / 3, mode="fan_in", distribution="uniform", seed=seed
    )
