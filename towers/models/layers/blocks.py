"""Building blocks of the networks."""

import dataclasses
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


@dataclasses.dataclass
class Builder:
    """Adds layers to a network of `images`, a symbolic tensor."""

    image_shape: Shape
    num_classes: int  # number of logits
    width: float = 1.0  # factor on the channels of every layer
    regularizer: Regularizer = None  # of the kernels that decay

    def __post_init__(self):
        self.images = keras.Input(self.image_shape, name="images")
        self._noises: list[Tensor] = []

    def scaled(self, count: int, multiple_of: int = 1) -> int:
        """Return `count` channels times the width, rounded to a nonzero multiple."""
        if count * self.width >= MAX_CHANNELS:
            raise ConfigError(
                f"width={self.width:g}: a layer would have {count * self.width:.3g} "
                f"channels, and {MAX_CHANNELS:.3g} can be counted; lower --width"
            )
        return multiple_of * max(1, round(count * self.width / multiple_of))

    def check_image_size(self, model: str, at_least: int) -> None:
        """Raise ConfigError if pooling would leave nothing of an image."""
        height, width, _ = self.image_shape
        if min(height, width) < at_least:
            raise ConfigError(
                f"model={model} needs images of at least {at_least}x{at_least}, not "
                f"{height}x{width}; choose another --model or --augment"
            )

    def conv(
        self,
        x: Tensor,
        filters: int,
        size: int,
        stride: int,
        name: str,
        is_standardized: bool = False,
    ) -> Tensor:
        """Add a convolution without biases, centered on the pixels of a shortcut."""
        same, other = SameConv2D, Conv2D
        if is_standardized:
            same, other = core.StandardizedSameConv2D, core.StandardizedConv2D
        settings: dict = {
            "use_bias": False,
            "kernel_initializer": "he_normal",
            "kernel_regularizer": self.regularizer,
            "name": name,
        }
        if size == 3 and stride == 1:
            return same(filters, **settings)(x)
        if size > 1:
            x = layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x)
        return other(filters, size, strides=stride, **settings)(x)

    def dropout(
        self, x: Tensor, rate: float, name: str, per_image: bool = False
    ) -> Tensor:
        """Add dropout, or stochastic depth if `per_image`, with an input of noise."""
        if not rate:
            return x
        shape = [1] * (len(x.shape) - 1) if per_image else x.shape[1:]
        self._noises.append(keras.Input(shape, name=f"{name}_noise"))
        return Dropout(rate, name=name)([x, self._noises[-1]])

    def classifier(self, x: Tensor, dropout_rate: float = 0.0) -> Tensor:
        """Add global average pooling, dropout and the logits."""
        x = layers.GlobalAveragePooling2D(name="pool")(x)
        return self.logits(self.dropout(x, dropout_rate, "dropout"))

    def logits(self, x: Tensor) -> Tensor:
        """Add the last dense layer."""
        return Dense(
            self.num_classes,
            kernel_initializer=uniform(),  # He's would make the first logits too large
            kernel_regularizer=self.regularizer,
            name="logits",
        )(x)

    def network(self, logits: Tensor, name: str) -> keras.Model:
        """Return the network of images and, if it has dropout, of noise."""
        inputs = [self.images, *self._noises] if self._noises else self.images
        return keras.Model(inputs, logits, name=name)


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


def uniform(seed: int | None = None) -> keras.initializers.Initializer:
    """Return Torch's default initializer, uniform within 1 / sqrt(inputs)."""
    return keras.initializers.VarianceScaling(
        1 / 3, mode="fan_in", distribution="uniform", seed=seed
    )
