"""A convolution that whitens patches, with filters computed from training images."""

from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

# Of which patches are made at a time: they take 8 k bytes each.
PIECE_PIXELS = 100 * 32 * 32


class Whitening(keras.layers.Layer):
    """Projects patches on the eigenvectors of their second moments, and on the negated
    ones, each divided by the root of its eigenvalue; adds a bias, which is trained.

    The filters are part of the model's state and not trained. They are zero until
    `adapt` is called. After tysam-code's hlb-CIFAR10 and Jordan 2024,
    arXiv:2404.00498, section 3.2.

    Args:
        size: height and width of a patch, in pixels.
        epsilon: added to the eigenvalues.
        bias_regularizer: of the bias.
    """

    def __init__(self, size, epsilon=5e-4, bias_regularizer=None, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        self.epsilon = epsilon
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
        return tf.nn.bias_add(whitened, tf.convert_to_tensor(self.bias))

    def compute_output_shape(self, input_shape):
        count, height, width, channels = input_shape
        less = self.size - 1
        return count, height - less, width - less, 2 * self.size**2 * channels

    def adapt(self, arrays: Iterable[np.ndarray]) -> None:
        """Computes the filters from arrays of float images [n, height, width, c]."""
        values, vectors = np.linalg.eigh(second_moments(arrays, self.size))
        # The sign of an eigenvector is arbitrary: here its largest entry is positive.
        largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(len(values))]
        vectors = vectors * np.sign(largest) / np.sqrt(values + self.epsilon)
        filters = np.concatenate([vectors, -vectors], axis=1)
        self.kernel.assign(filters.reshape(self.kernel.shape))

    def get_config(self):
        return super().get_config() | {
            "size": self.size,
            "epsilon": self.epsilon,
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }


def second_moments(arrays: Iterable[np.ndarray], size: int) -> np.ndarray:
    """The mean of the outer products of all patches of size x size pixels.

    Args:
        arrays: images [n, height, width, channels] each.

    Returns:
        float64 [k, k], k = size * size * channels, rows by row, column and channel.
    """
    total, count = 0.0, 0
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
