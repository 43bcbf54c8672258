"""Layers for networks of `keras.applications`, in place of what Keras has for them."""

import keras
import tensorflow as tf


class ReverseChannels(keras.layers.Layer):
    """Images [n, height, width, channels] with the last channel first: RGB as BGR."""

    def call(self, inputs):
        return tf.reverse(inputs, [-1])

    def compute_output_shape(self, input_shape):
        return input_shape


class LayerScale(keras.layers.Layer):
    """A factor for every channel (Touvron et al. 2021, arXiv:2103.17239).

    That of Keras leaves its variable without a name.

    Args:
        init_values: initial factor.
        projection_dim: number of channels.
    """

    def __init__(self, init_values: float, projection_dim: int, **kwargs):
        super().__init__(**kwargs)
        self.init_values = init_values
        self.projection_dim = projection_dim

    def build(self, input_shape):
        self.gamma = self.add_weight(
            shape=(self.projection_dim,),
            initializer=keras.initializers.Constant(self.init_values),
            name="gamma",
        )

    def call(self, inputs):
        return inputs * tf.convert_to_tensor(self.gamma)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return super().get_config() | {
            "init_values": self.init_values,
            "projection_dim": self.projection_dim,
        }
