"""Elementary layers that Keras lacks or that TensorFlow computes slowly on a CPU."""

import keras
import numpy as np
import tensorflow as tf


class LocalResponseNormalization(keras.layers.Layer):
    """x / (bias + alpha * sum of squares over channels within depth_radius) ** beta.

    Krizhevsky et al. 2012, section 3.3, in the parametrisation of `tf.nn.lrn`. The sum
    over neighbouring channels is a product with a band matrix of ones, that is a 1x1
    convolution, and the gradient is written out; on a CPU this is faster than
    TensorFlow's own kernel, and it runs in any float type.
    """

    def __init__(
        self,
        depth_radius: int = 5,
        bias: float = 1.0,
        alpha: float = 1.0,
        beta: float = 0.5,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.depth_radius = depth_radius
        self.bias = bias
        self.alpha = alpha
        self.beta = beta

    def call(self, inputs):
        return local_response_normalization(
            inputs, self.depth_radius, self.bias, self.alpha, self.beta
        )

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return super().get_config() | {
            "depth_radius": self.depth_radius,
            "bias": self.bias,
            "alpha": self.alpha,
            "beta": self.beta,
        }


def local_response_normalization(
    x: tf.Tensor, depth_radius: int, bias: float, alpha: float, beta: float
) -> tf.Tensor:
    """`tf.nn.lrn` of floats [..., channels] in any float type, with its gradient."""
    channels = x.shape[-1]
    offsets = np.abs(np.arange(channels)[:, None] - np.arange(channels)[None, :])
    band = tf.constant(offsets <= depth_radius, x.dtype)

    def sum_over_band(values):
        flat = tf.reshape(values, [-1, channels])
        return tf.reshape(tf.matmul(flat, band), tf.shape(values))

    def power(denominator):
        if beta == 0.75:
            # Two square roots cost a tenth of a general power.
            root = tf.math.rsqrt(denominator)
            return root * tf.sqrt(root)
        return denominator ** tf.constant(-beta, denominator.dtype)

    @tf.custom_gradient
    def normalize(x):
        denominator = bias + alpha * sum_over_band(x * x)
        scale = power(denominator)

        def gradient(upstream):
            # The band is symmetric, so the transposed sum is the sum itself.
            inner = sum_over_band(upstream * x * scale / denominator)
            return upstream * scale - (2 * alpha * beta) * x * inner

        return x * scale, gradient

    return normalize(x)


class Dropout(keras.layers.Layer):
    """Zeroes a share `rate` of the elements and scales the others by 1 / (1 - rate).

    Srivastava et al. 2014. The noise, uniform in [0, 1) and of the shape of the input,
    is a second input: it is drawn with the batch from (seed, step), so that masks do
    not depend on the number of towers and no generator's state has to be saved. An
    element is kept where its noise is at least `rate`.
    """

    def __init__(self, rate: float, **kwargs):
        # Noise rounded to a half-width type would keep other elements.
        super().__init__(autocast=False, **kwargs)
        self.rate = rate

    def call(self, inputs, training=False):
        x, noise = inputs
        if not training:
            return x
        keep = tf.cast(noise >= self.rate, x.dtype)
        return x * keep * tf.constant(1 / (1 - self.rate), x.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape[0]

    def get_config(self):
        return super().get_config() | {"rate": self.rate}
