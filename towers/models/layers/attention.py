"""Layers of Vision Transformers: tokens and attention."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from towers.models.layers.cpu_kernels import channel_sum, widened
from towers.models.layers.device import OnDevice


class Tokens(keras.layers.Layer):
    """Pixels as tokens with positions (arXiv:2010.11929, equation 1).

    Images [n, height, width, channels] become [n, tokens, channels]. With a class
    token, initially zero, which comes first, positions are learned; otherwise they are
    from `sincos2d`. A slice of channels begins at `first` of all `channels`.
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
        self.first, self.channels = first, channels

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


def sincos2d(height: int, width: int, channels: int) -> np.ndarray:
    """Return positions [height * width, channels] of arXiv:2104.02057."""
    rates = 10_000.0 ** -np.linspace(0, 1, -(-channels // 4))
    y, x = (np.outer(places.ravel(), rates) for places in np.mgrid[:height, :width])
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], 1)
    return table[:, :channels]


class Attention(OnDevice):
    """Multi-head attention of queries, keys and values, without its dense layers."""

    def __init__(self, heads: int, **kwargs):
        super().__init__(**kwargs)
        self.heads = heads

    def call(self, inputs):
        compute = head_by_head if self.device_kind == "CPU" else attention
        return compute(*inputs, self.heads)

    def get_config(self):
        return super().get_config() | {"heads": self.heads}


def attention(queries, keys, values, heads: int):
    """Return softmax(queries keys^T / sqrt(channels of a head)) values, per head.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.2. In 16-bit types the softmax is
    computed in float32. Takes symbolic tensors too, of shape [n, tokens, channels].
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


def head_by_head(
    queries: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, heads: int
) -> tf.Tensor:
    """Compute `attention` one head after the other: 0.8 to 0.9 of its time on a CPU."""
    scale = (queries.shape[-1] // heads) ** -0.5

    @tf.custom_gradient
    def attend(*inputs):
        inputs = inputs[0] * scale, *inputs[1:]  # before float16 overflows
        queries, keys, values = (tf.split(x, heads, -1) for x in inputs)
        weights = [
            _softmax(tf.matmul(q, k, transpose_b=True))
            for q, k in zip(queries, keys, strict=True)
        ]

        def gradient(upstream):
            parts = [[], [], []]
            upstream = tf.split(upstream, heads, -1)
            for up, q, k, v, w in zip(
                upstream, queries, keys, values, weights, strict=True
            ):
                by_weights = tf.matmul(up, v, transpose_b=True)
                by_scores = _softmax_gradient(w, by_weights)
                parts[0].append(tf.matmul(by_scores, k) * scale)
                parts[1].append(tf.matmul(by_scores, q, transpose_a=True))
                parts[2].append(tf.matmul(w, up, transpose_a=True))
            return [tf.concat(x, -1) for x in parts]

        pairs = zip(weights, values, strict=True)
        return tf.concat([tf.matmul(w, v) for w, v in pairs], -1), gradient

    return attend(queries, keys, values)


def _softmax(scores):
    return tf.cast(tf.nn.softmax(widened(scores)), scores.dtype)


@tf.function(jit_compile=True, autograph=False)
def _softmax_gradient(weights, upstream):
    wide, upstream = widened(weights), widened(upstream)
    gradient = wide * (upstream - channel_sum(upstream * wide))
    return tf.cast(gradient, weights.dtype)
