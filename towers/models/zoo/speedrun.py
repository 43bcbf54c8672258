"""The network of the fastest trainings on CIFAR-10 (Jordan 2024, arXiv:2404.00498)."""

from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Builder
from towers.models.layers.core import Gelu, SameConv2D
from towers.models.layers.cpu_kernels import add_bias
from towers.models.layers.normalization import BatchNormalization

WHITENING_SIZE, EPSILON = 2, 5e-4
PIECE_PIXELS = 100 * 32 * 32  # pixels per chunk of patches
MIN_SIDE = 9  # one pixel is left after the last pool


def create_model(
    build: Builder, *, widths: tuple[int, int, int], depth: int, momentum: float
) -> keras.Model:
    """Build whitened patches and three groups of convolutions with `widths` filters.

    In the deeper network a group has a third convolution and a shortcut. Parameters
    that Muon leaves to momentum decay. The author divides the logits of airbench94 by
    the number of features; here the initial head is smaller by that factor.
    """
    name = "speedrun" if depth == 2 else "speedrun_deep"
    build.check_image_size(name, at_least=MIN_SIDE)

    def group(x, number, filters):
        first = None
        for place in range(1, depth + 1):
            part = f"{number}_{place}"
            x = SameConv2D(
                filters,
                before_pool=place == 1,
                use_bias=False,
                kernel_initializer=PartlyIdentity(),
                name=f"conv{part}",
            )(x)
            if place == 1:
                x = layers.MaxPooling2D(2, name=f"pool{number}")(x)
            x = BatchNormalization(
                momentum=momentum,
                epsilon=1.001e-5,
                scale=False,
                beta_regularizer=build.regularizer,
                name=f"norm{part}",
            )(x)
            if place == 3:
                x = layers.Add(name=f"add{number}")([x, first])
            x = Gelu(name=f"gelu{part}")(x)
            first = x if place == 1 else first
        return x

    settings = {"bias_regularizer": build.regularizer, "name": "whitening"}
    x = Whitening(WHITENING_SIZE, **settings)(build.images)
    x = Gelu(name="gelu0")(x)
    for number, filters in enumerate(widths, start=1):
        x = group(x, number, build.scaled(filters))
    x = layers.GlobalMaxPooling2D(name="pool")(x)  # 3x3 of 32x32 images
    stddev = 1 / x.shape[-1]
    logits = layers.Dense(
        build.num_classes,
        use_bias=False,
        kernel_initializer=keras.initializers.RandomUniform(
            -(3**0.5) * stddev, 3**0.5 * stddev
        ),
        kernel_regularizer=build.regularizer,
        name="logits",
    )(x)
    return build.network(logits, name)


@keras.saving.register_keras_serializable("towers")
class PartlyIdentity(keras.initializers.Initializer):
    """Kernels whose first filters are the identity; others as `uniform`."""

    def __init__(self, seed: int | None = None):
        self.seed = seed

    def __call__(self, shape, dtype=None):
        height, width, inputs, filters = shape
        drawn = blocks.uniform(self.seed)(shape, dtype)
        num_identity = min(inputs, filters)
        center = tf.scatter_nd(
            [[height // 2, width // 2, i, i] for i in range(num_identity)],
            tf.ones([num_identity], drawn.dtype),
            [height, width, inputs, num_identity],
        )
        return tf.concat([center, drawn[..., num_identity:]], axis=-1)

    def get_config(self):
        return {"seed": self.seed}


class Whitening(keras.layers.Layer):
    """Whitening of patches, and a trained bias (arXiv:2404.00498, section 3.2).

    Filters are eigenvectors of the patches' second moments, and the negated ones; they
    are zero until `adapt` is called.
    """

    def __init__(self, size, bias_regularizer=None, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)

    def build(self, input_shape):
        channels = input_shape[-1]
        filters = 2 * self.size**2 * channels
        self.kernel = self.add_weight(
            shape=(self.size, self.size, channels, filters),
            initializer="zeros",
            trainable=False,
            name="kernel",
        )
        self.bias = self.add_weight(
            shape=(filters,),
            initializer="zeros",
            regularizer=self.bias_regularizer,
            name="bias",
        )

    def call(self, inputs):
        whitened = tf.nn.conv2d(inputs, tf.convert_to_tensor(self.kernel), 1, "VALID")
        return add_bias(whitened, tf.convert_to_tensor(self.bias))

    def adapt(self, arrays: Iterable[np.ndarray]) -> None:
        """Compute the filters from arrays of float images [n, height, width, c]."""
        values, vectors = np.linalg.eigh(second_moments(arrays, self.size))
        # The sign of an eigenvector is arbitrary: here its largest entry is positive.
        largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(len(values))]
        vectors = vectors * np.sign(largest) / np.sqrt(values + EPSILON)
        filters = np.concatenate([vectors, -vectors], axis=1)
        self.kernel.assign(filters.reshape(self.kernel.shape))

    def get_config(self):
        return super().get_config() | {
            "size": self.size,
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }


def second_moments(arrays: Iterable[np.ndarray], size: int) -> np.ndarray:
    """Return the mean outer product of patches, float64, by row, column and channel."""
    total, count = np.zeros(()), 0
    for images in arrays:
        height, width, channels = images.shape[1:]
        piece = max(1, PIECE_PIXELS // (height * width))
        for first in range(0, len(images), piece):
            patches = np.lib.stride_tricks.sliding_window_view(
                np.asarray(images[first : first + piece], np.float64),
                (size, size),
                axis=(1, 2),
            )
            flat = np.moveaxis(patches, 3, -1).reshape(-1, size * size * channels)
            total, count = total + flat.T @ flat, count + len(flat)
    return total / count
