"""Building blocks of the networks."""

from typing import TypeAlias

import keras
from keras import layers

from towers.errors import ConfigError
from towers.models.layers import core
from towers.models.layers.core import Conv2D, Dense, Dropout, SameConv2D
from towers.models.layers.normalization import BatchNormalization

Shape = tuple[int, int, int]  # height, width, channels
Tensor: TypeAlias = keras.KerasTensor
Regularizer: TypeAlias = keras.regularizers.Regularizer | None

# Up to this number a product with `width` is exact to one channel.
MAX_CHANNELS = 2**53


def scaled(count: int, width: float, multiple_of: int = 1) -> int:
    """Return `count` channels times `width`, rounded to a nonzero multiple."""
    if count * width >= MAX_CHANNELS:
        raise ConfigError(
            f"width={width:g}: a layer would have {count * width:.3g} channels, and "
            f"{MAX_CHANNELS:.3g} can be counted; lower --width"
        )
    return multiple_of * max(1, round(count * width / multiple_of))


def check_image_size(model: str, image_shape: Shape, at_least: int) -> None:
    """Raise ConfigError if pooling would leave nothing of an image."""
    height, width, _ = image_shape
    if min(height, width) < at_least:
        raise ConfigError(
            f"model={model} needs images of at least {at_least}x{at_least}, not "
            f"{height}x{width}; choose another --model or --augment"
        )


def conv(
    x: Tensor,
    filters: int,
    size: int,
    stride: int,
    name: str,
    regularizer: Regularizer,
    is_standardized: bool = False,
) -> Tensor:
    """Add a convolution without biases, centered on the pixels of a shortcut."""
    same, other = SameConv2D, Conv2D
    if is_standardized:
        same, other = core.StandardizedSameConv2D, core.StandardizedConv2D
    settings: dict = {
        "use_bias": False,
        "kernel_initializer": "he_normal",
        "kernel_regularizer": regularizer,
        "name": name,
    }
    if size == 3 and stride == 1:
        return same(filters, **settings)(x)
    if size > 1:
        x = layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x)
    return other(filters, size, strides=stride, **settings)(x)


def normalization(
    x: Tensor,
    name: str,
    gamma_initializer: str = "ones",
    momentum: float = 0.9,
    epsilon: float = 1.001e-5,
) -> Tensor:
    """Add batch normalization, with the smallest epsilon of the fused kernel."""
    return BatchNormalization(
        momentum=momentum,
        epsilon=epsilon,
        gamma_initializer=gamma_initializer,
        name=name,
    )(x)


def dropout(
    x: Tensor, rate: float, name: str, inputs: list[Tensor], per_image: bool = False
) -> Tensor:
    """Add dropout, or stochastic depth if `per_image`, and its noise to the inputs."""
    if not rate:
        return x
    shape = [1] * (len(x.shape) - 1) if per_image else x.shape[1:]
    inputs.append(keras.Input(shape, name=f"{name}_noise"))
    return Dropout(rate, name=name)([x, inputs[-1]])


def network(inputs: list[Tensor], logits: Tensor, name: str) -> keras.Model:
    """Return the network of images and, if it has dropout, of noise."""
    return keras.Model(inputs if len(inputs) > 1 else inputs[0], logits, name=name)


def classifier(
    x: Tensor,
    num_classes: int,
    regularizer: Regularizer,
    dropout_rate: float = 0.0,
    inputs: list[Tensor] | None = None,
) -> Tensor:
    """Add global average pooling, `dropout` and the logits."""
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    if inputs is not None:
        x = dropout(x, dropout_rate, "dropout", inputs)
    return logits(x, num_classes, regularizer)


def logits(x: Tensor, num_classes: int, regularizer: Regularizer) -> Tensor:
    """Add the last dense layer."""
    return Dense(
        num_classes,
        kernel_initializer=uniform(),  # He's would make the first logits too large
        kernel_regularizer=regularizer,
        name="logits",
    )(x)


def uniform(seed: int | None = None) -> keras.initializers.Initializer:
    """Return Torch's default initializer, uniform within 1 / sqrt(inputs)."""
    return keras.initializers.VarianceScaling(
        1 / 3, mode="fan_in", distribution="uniform", seed=seed
    )
