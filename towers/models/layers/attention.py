"""Layers of Vision Transformers: tokens and attention."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from towers.models.layers.cpu_kernels import channel_sum, widened
from towers.models.layers.device import OnDevice


class Tokens(keras.layers.Layer):
    """Pixels as tokens with positions (arXiv:2010.11929, equation 1).

    Images [n, height, width, channels] become [n, tokens, channels]. Positions are
    "fixed", from `sincos2d`, "learned" or "none"; with a class token, initially zero,
    which comes first, they are learned. A slice of channels begins at `first` of all
    `channels`.
    """

    def __init__(
        self,
        has_class_token: bool = False,
        positions: str = "fixed",
        first: int = 0,
        channels: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.has_class_token = has_class_token
        self.positions = "learned" if has_class_token else positions
        self.first, self.channels = first, channels

    def build(self, input_shape):
        _, height, width, count = input_shape
        whole = self.channels or count
        if self.positions == "fixed":
            table = sincos2d(height, width, whole)
            self.table = table[:, self.first : self.first + count]
        if self.has_class_token:
            self.token = self.add_weight(
                shape=(1, count), initializer="zeros", name="class_token"
            )
        if self.positions == "learned":
            self.table = self.add_weight(
                shape=(height * width + self.has_class_token, count),
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
        if self.positions == "none":
            return x
        return x + tf.convert_to_tensor(self.table, x.dtype)


class Prefix(keras.layers.Layer):
    """Learned tokens before the others, such as registers (arXiv:2309.16588)."""

    def __init__(self, count: int, **kwargs):
        super().__init__(**kwargs)
        self.count = count

    def build(self, input_shape):
        self.token = self.add_weight(
            shape=(self.count, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(0.0, 0.02),
            name="token",
        )

    def call(self, inputs):
        tokens = tf.convert_to_tensor(self.token)
        tokens = tf.tile(tokens[None], [tf.shape(inputs)[0], 1, 1])
        return tf.concat([tokens, inputs], 1)


def sincos2d(height: int, width: int, channels: int) -> np.ndarray:
    """Return positions [height * width, channels] of arXiv:2104.02057."""
    rates = 10_000.0 ** -np.linspace(0, 1, -(-channels // 4))
    y, x = (np.outer(places.ravel(), rates) for places in np.mgrid[:height, :width])
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], 1)
    return table[:, :channels]


class Attention(OnDevice):
    """Multi-head attention of queries, keys and values, without its dense layers.

    With a `grid`, the height and width of the patches, which are the last tokens,
    queries and keys are rotated by their positions.
    """

    def __init__(self, heads: int, grid: Sequence[int] | None = None, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.grid = heads, grid

    def angles(self, inputs) -> np.ndarray:
        """Return the angles [tokens, channels of a head / 2] of `rotated`."""
        _, tokens, channels = inputs[0].shape
        height, width = self.grid or (0, 0)
        angles = rotary2d(height, width, channels // self.heads)
        return np.pad(angles, [(tokens - len(angles), 0), (0, 0)])

    def call(self, inputs, watch=None):
        if self.grid:
            inputs = rotated(inputs, self.angles(inputs), self.heads)
        if self.device_kind == "CPU" and not watch:
            return head_by_head(*inputs, heads=self.heads)
        return attention(*inputs, heads=self.heads, watch=watch)

    def get_config(self):
        return super().get_config() | {"heads": self.heads, "grid": self.grid}


def rotary2d(height: int, width: int, size: int) -> np.ndarray:
    """Return angles [height * width, size / 2] of DINOv3 (arXiv:2508.10104)."""
    rates = 2 * np.pi * 100.0 ** -np.linspace(0, 1, size // 4, endpoint=False)
    centers = [(2 * np.arange(n) + 1) / n - 1 for n in (height, width)]
    y, x = np.meshgrid(*centers, indexing="ij")
    return np.concatenate([np.outer(y, rates), np.outer(x, rates)], 1)


def rotated(inputs: Sequence, angles, heads: int) -> list:
    """Rotate the halves of each head of queries and keys (arXiv:2104.09864)."""
    queries, keys, values = inputs
    _, tokens, channels = queries.shape
    wide = keras.backend.result_type(queries.dtype, "float32")
    angles = ops.convert_to_tensor(angles, wide)[..., None, :]  # of all heads
    cos, sin = ops.cos(angles), ops.sin(angles)

    def rotate(x):
        shape = -1, tokens, heads, 2, channels // heads // 2
        x = ops.cast(ops.reshape(x, shape), wide)
        a, b = x[..., 0, :], x[..., 1, :]
        x = ops.stack([a * cos - b * sin, b * cos + a * sin], -2)
        return ops.cast(ops.reshape(x, [-1, tokens, channels]), values.dtype)

    return [rotate(queries), rotate(keys), values]


class WindowAttention(Attention):
    """Attention within squares of pixels (TinyViT, arXiv:2207.10666; arXiv:2103.14030).

    Images [n, height, width, 3 * channels], with the query, key and value of a head
    side by side, become [n, height, width, channels]. Height and width are multiples of
    `size`. Scores have a trained bias for each vertical and horizontal distance.
    """

    def __init__(self, heads: int, size: int, **kwargs):
        super().__init__(heads, **kwargs)
        self.size = size

    def build(self, input_shape):
        shape, name = (self.size**2, self.heads), "attention_biases"
        self.attention_biases = self.add_weight(shape, "zeros", name=name)

    def call(self, inputs):
        compute = head_by_head if self.device_kind == "CPU" else attention
        table = tf.convert_to_tensor(self.attention_biases)
        return self.attend(inputs, pair_biases(table, self.size), compute)

    def attend(self, x, biases, compute):
        """Call `attention` or `head_by_head` for each square."""
        _, height, width, channels = x.shape
        size, columns, units = self.size, width // self.size, channels // 3
        x = ops.reshape(x, [-1, size, columns, size * channels])
        x = ops.transpose(x, [0, 2, 1, 3])
        x = ops.reshape(x, [-1, size**2, self.heads, 3, units // self.heads])
        parts = [ops.reshape(x[:, :, :, i], [-1, size**2, units]) for i in range(3)]
        x = compute(*parts, biases, heads=self.heads)
        x = ops.reshape(x, [-1, columns, size, size * units])
        return ops.reshape(ops.transpose(x, [0, 2, 1, 3]), [-1, height, width, units])

    def get_config(self):
        return super().get_config() | {"size": self.size}


def pair_biases(biases: tf.Tensor, size: int) -> tf.Tensor:
    """Return biases [heads, tokens, tokens] of pairs of pixels in a square.

    Row `size` * y + x of `biases` [size^2, heads] is for pixels y rows and x columns
    apart. Selected by products, whose gradient has no order of additions on a GPU.
    """
    distances = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    apart = tf.constant(np.eye(size)[distances], biases.dtype)
    table = tf.reshape(biases, [size, size, -1])
    pairs = tf.einsum("acy,bdx,yxh->habcd", apart, apart, table)
    return tf.reshape(pairs, [-1, size**2, size**2])


def attention(queries, keys, values, biases=None, *, heads: int, watch=None):
    """Return softmax(queries keys^T / sqrt(channels of a head)) values, per head.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.2. In 16-bit types the softmax is
    computed in float32. Takes symbolic tensors too, of shape [n, tokens, channels].
    `biases` [heads, tokens, tokens] are added to the scores; `watch` is called with the
    softmax [n, heads, tokens, tokens].
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
    if biases is not None:
        scores = scores + biases
    wide = keras.backend.result_type(scores.dtype, "float32")
    weights = ops.cast(ops.softmax(ops.cast(scores, wide)), values.dtype)
    if watch:
        watch(weights)
    outputs = ops.transpose(ops.matmul(weights, values), [0, 2, 1, 3])
    return ops.reshape(outputs, [-1, tokens, channels])


def head_by_head(*inputs: tf.Tensor, heads: int) -> tf.Tensor:
    """Compute `attention` one head after the other: 0.8 to 0.9 of its time on a CPU."""
    scale = (inputs[0].shape[-1] // heads) ** -0.5

    @tf.custom_gradient
    def attend(*inputs):
        inputs = inputs[0] * scale, *inputs[1:]  # before float16 overflows
        queries, keys, values = (tf.split(x, heads, -1) for x in inputs[:3])
        pairs = zip(queries, keys, *map(tf.unstack, inputs[3:]), strict=True)
        weights = [
            _softmax(sum(bias, tf.matmul(q, k, transpose_b=True)))
            for q, k, *bias in pairs
        ]

        def gradient(upstream):
            parts = [[] for _ in inputs]
            upstream = tf.split(upstream, heads, -1)
            for up, q, k, v, w in zip(
                upstream, queries, keys, values, weights, strict=True
            ):
                by_weights = tf.matmul(up, v, transpose_b=True)
                by_scores = _softmax_gradient(w, by_weights)
                parts[0].append(tf.matmul(by_scores, k) * scale)
                parts[1].append(tf.matmul(by_scores, q, transpose_a=True))
                parts[2].append(tf.matmul(w, up, transpose_a=True))
                for bias_parts in parts[3:]:  # bfloat16 would lose most of a long sum
                    total = tf.reduce_sum(widened(by_scores), 0)
                    bias_parts.append(tf.cast(total, w.dtype))
            return [tf.concat(x, -1) for x in parts[:3]] + list(
                map(tf.stack, parts[3:])
            )

        pairs = zip(weights, values, strict=True)
        return tf.concat([tf.matmul(w, v) for w, v in pairs], -1), gradient

    return attend(*inputs)


def _softmax(scores):
    return tf.cast(tf.nn.softmax(widened(scores)), scores.dtype)


@tf.function(jit_compile=True, autograph=False)
def _softmax_gradient(weights, upstream):
    wide, upstream = widened(weights), widened(upstream)
    gradient = wide * (upstream - channel_sum(upstream * wide))
    return tf.cast(gradient, weights.dtype)
