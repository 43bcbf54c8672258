"""Networks as people write them with Keras, for --model=written_networks.py:NAME."""

import keras
from keras import layers


def sequential(image_shape, num_classes):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(6, 3, strides=2, activation="relu"),
            layers.SpatialDropout2D(0.2),
            layers.Conv2D(6, 3, strides=2),
            layers.BatchNormalization(),
            layers.GaussianNoise(0.1),
            layers.Flatten(),
            layers.Dense(12, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(num_classes),
        ]
    )


def attention(image_shape, num_classes):
    """With layers as in the examples of Keras' pages."""
    pictures = keras.Input(image_shape)
    x = layers.Conv2D(4, 8, strides=8)(pictures)
    x = layers.Reshape((-1, 4))(x)
    x = Positions()(x)
    x = x + layers.MultiHeadAttention(2, 3, dropout=0.1)(x, x, use_causal_mask=True)
    x = Block()(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(pictures, layers.Dense(num_classes)(x))


class Positions(layers.Layer):
    def build(self, shape):
        self.embedding = layers.Embedding(*shape[1:])

    def call(self, x):
        return x + self.embedding(keras.ops.arange(x.shape[1]))


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.3)
        self.norm = layers.LayerNormalization()
        dense = [layers.Dense(8, activation="gelu"), layers.Dense(4)]
        self.net = keras.Sequential(dense)
        self.dropouts = {"both": [(layers.Dropout(0.2), 1)]}

    def build(self, shape):
        self.scale = self.add_weight((shape[-1],), initializer="random_normal")

    def call(self, x):
        [(dropout, _)] = self.dropouts["both"]
        x = x + dropout(self.attention(x, x))
        return x + self.scale * dropout(self.net(self.norm(x)))
