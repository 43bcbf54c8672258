"""Layers of Vision Transformers: images as tokens, and attention between these."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from towers.models.layers.transformer_kernels import head_by_head


class Tokens(keras.layers.Layer):
    """The pixels of images as tokens, to which their positions are added: from
    [n, height, width, channels] to [n, tokens, channels].

    Dosovitskiy et al. 2021, arXiv:2010.11929, equation 1.

    Args:
        has_class_token: whether a trained token, initially zero, precedes the pixels'
            tokens, and positions are learned; otherwise they are from `sincos2d`.
        first, channels: where the input is a slice of channels: the first one of it,
            and how many the whole has.
    """

    def __init__(
        self,
        has_class_token: bool = False,
        first: int = 0,
        channels: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.has_class_token = has_class_token
        self.first = first
        self.channels = channels

    def build(self, input_shape):
        _, height, width, count = input_shape
        whole = self.channels or count
        if not self.has_class_token:
            table = sincos2d(height, width, whole)
            self.table = table[:, self.first : self.first + count]
            return
        self.token = self.add_weight(
            shape=(1, count), initializer="zeros", name="class_token"
        )
        self.table = self.add_weight(
            shape=(1 + height * width, count),
            initializer=keras.initializers.RandomNormal(stddev=whole**-0.5),
            name="positions",
        )

    def call(self, inputs):
        _, height, width, channels = inputs.shape
        x = tf.reshape(inputs, [-1, height * width, channels])
        if self.has_class_token:
            token = tf.convert_to_tensor(self.token)
            token = tf.tile(token[None], [tf.shape(x)[0], 1, 1])
            x = tf.concat([token, x], 1)
        return x + tf.convert_to_tensor(self.table, x.dtype)

    def get_config(self):
        names = "has_class_token", "first", "channels"
        return super().get_config() | {name: getattr(self, name) for name in names}


def sincos2d(height: int, width: int, channels: int) -> np.ndarray:
    """Positions of pixels, float64 [height * width, channels]: sines, then cosines of
    x, then of y, of wavelengths from 2 pi to 20,000 pi pixels.

    Chen et al. 2021, arXiv:2104.02057 (MoCo v3), as in big_vision; there, channels are
    a multiple of 4.
    """
    rates = 10_000.0 ** -np.linspace(0, 1, -(-channels // 4))
    y, x = (np.outer(places.ravel(), rates) for places in np.mgrid[:height, :width])
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], 1)
    return table[:, :channels]


class Attention(keras.layers.Layer):
    """Attention of several heads, without the dense layers before and behind it.

    The inputs are queries, keys and values [n, tokens, channels]. The channels of a
    head are next to each other. See `attention`.
    """

    def __init__(self, heads: int, device_kind: str = "CPU", **kwargs):
        super().__init__(**kwargs)
        self.heads = heads
        self.device_kind = device_kind

    def call(self, inputs):
        compute = head_by_head if self.device_kind == "CPU" else attention
        return compute(*inputs, self.heads)

    def get_config(self):
        config = {"heads": self.heads, "device_kind": self.device_kind}
        return super().get_config() | config


def attention(queries, keys, values, heads: int):
    """softmax(queries keys^T / sqrt(channels of a head)) values, in each head.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.2. Of 16-bit types the softmax is
    computed in float32. Written in operations of Keras, for tensors of both kinds.

    Args:
        queries, keys, values: [n, tokens, channels].
        heads: divides the channels.
    """
    _, tokens, channels = queries.shape
    size = channels // heads
    queries, keys, values = (
        ops.transpose(ops.reshape(x, [-1, tokens, heads, size]), order)
        for x, order in (
            (queries, [0, 2, 1, 3]),
            (keys, [0, 2, 3, 1]),
            (values, [0, 2, 1, 3]),
        )
    )
    scores = ops.matmul(queries * size**-0.5, keys)
    wide = keras.backend.result_type(scores.dtype, "float32")
    weights = ops.cast(ops.softmax(ops.cast(scores, wide)), values.dtype)
    outputs = ops.transpose(ops.matmul(weights, values), [0, 2, 1, 3])
    return ops.reshape(outputs, [-1, tokens, channels])
