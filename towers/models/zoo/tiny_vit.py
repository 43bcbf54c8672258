"""TinyViT (Wu et al. 2022, arXiv:2207.10666)."""

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.attention import WindowAttention
from towers.models.layers.blocks import Builder
from towers.models.layers.core import Dense, Gelu
from towers.models.layers.normalization import FusedLayerNormalization
from towers.models.zoo.efficientnet import InvertedResiduals

HEAD_CHANNELS = 32

# Parameter names in timm checkpoints.
TORCH_NAMES = (
    {
        r"stem_conv(\d)": r"patch_embed.conv\1.conv",
        r"stem_conv(\d)_norm": r"patch_embed.conv\1.bn",
        r"stage(\d+)_merge_conv(\d)": r"stages.{\1-1}.downsample.conv\2.conv",
        r"stage(\d+)_merge_conv(\d)_norm": r"stages.{\1-1}.downsample.conv\2.bn",
        **{
            rf"stage(\d+)_block(\d+)_{ours}": r"stages.{\1-1}.blocks.{\2-1}." + theirs
            for ours, theirs in (
                (r"conv(\d)", r"conv\3.conv"),
                (r"conv(\d)_norm", r"conv\3.bn"),
                ("norm1", "attn.norm"),
                ("qkv", "attn.qkv"),
                ("attention/attention_biases", "attn.attention_biases"),
                ("out", "attn.proj"),
                ("local", "local_conv.conv"),
                ("local_norm", "local_conv.bn"),
                ("norm2", "mlp.norm"),
                ("hidden", "mlp.fc1"),
                ("mlp", "mlp.fc2"),
            )
        },
        "last_norm": "head.norm",
        "logits": "head.fc",
    },
)


def create_model(
    build: Builder,
    *,
    name: str,
    channels: tuple[int, ...],
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    depths: tuple[int, ...] = (2, 2, 6, 2),
    windows: tuple[int, ...] = (0, 7, 14, 7),  # sides; 0 for convolutions
) -> keras.Model:
    """Build stages of convolutions, then of attention within windows of pixels.

    Images are padded to whole windows. Every kernel decays, and begins as in timm.
    """
    residuals = InvertedResiduals(build, initializer=blocks.uniform(), is_scaled=True)
    # timm's `trunc_normal_` truncates at 2, at 100 standard deviations.
    normal = keras.initializers.RandomNormal(0.0, 0.02)

    def conv(x, filters, name, gamma="ones", **settings):
        x = residuals.conv(x, filters, name, **settings)
        return blocks.normalization(x, f"{name}_norm", gamma)

    def gelu(x, name):
        return Gelu(name=f"{name}_gelu")(x)

    def bottleneck(x, inner, filters, scope, stride=1, gamma="ones"):
        x = gelu(conv(x, inner, f"{scope}_conv1"), f"{scope}_conv1")
        depthwise = {"size": 3, "stride": stride, "is_depthwise": True}
        x = gelu(conv(x, inner, f"{scope}_conv2", **depthwise), f"{scope}_conv2")
        return conv(x, filters, f"{scope}_conv3", gamma)

    def dense(x, units, name):
        decay = build.regularizer
        return Dense(
            units, kernel_initializer=normal, kernel_regularizer=decay, name=name
        )(x)

    def norm(x, name):
        return FusedLayerNormalization(epsilon=1e-5, name=name)(x)

    def attention(x, heads, window, scope):
        _, height, width, units = x.shape
        edges = (0, -height % window), (0, -width % window)
        if is_padded := edges != ((0, 0), (0, 0)):
            x = layers.ZeroPadding2D(edges, name=f"{scope}_pad")(x)
        x = dense(norm(x, f"{scope}_norm1"), 3 * units, f"{scope}_qkv")
        x = WindowAttention(heads, window, name=f"{scope}_attention")(x)
        if is_padded:
            x = layers.Cropping2D(edges, name=f"{scope}_crop")(x)
        return dense(x, units, f"{scope}_out")

    def perceptron(x, hidden, scope):
        x = dense(norm(x, f"{scope}_norm2"), hidden, f"{scope}_hidden")
        return dense(gelu(x, scope), filters, f"{scope}_mlp")

    def add(x, branch, rate, scope, place=""):
        y = build.dropout(branch, rate, f"{scope}_depth{place}", True)
        return layers.Add(name=f"{scope}_add{place}")([x, y])

    stem = build.scaled(channels[0] // 2), build.scaled(channels[0])
    x = conv(build.images, stem[0], "stem_conv1", size=3, stride=2)
    x = conv(gelu(x, "stem_conv1"), stem[1], "stem_conv2", size=3, stride=2)
    index, rows = 0, zip(channels, depths, windows, strict=True)
    for stage, (count, depth, window) in enumerate(rows, start=1):
        heads = max(1, int(count // HEAD_CHANNELS * build.width))
        filters = build.scaled(count, heads if window else 1)
        hidden = build.scaled(4 * count)
        if stage > 1:
            x = bottleneck(x, filters, filters, f"stage{stage}_merge", stride=2)
        for place in range(1, depth + 1):
            scope, index = f"stage{stage}_block{place}", index + 1
            rate = stochastic_depth * index / sum(depths)
            if window:
                x = add(x, attention(x, heads, window, scope), rate, scope, "1")
                x = conv(x, filters, f"{scope}_local", size=3, is_depthwise=True)
                x = add(x, perceptron(x, hidden, scope), rate, scope, "2")
            else:
                y = bottleneck(x, hidden, filters, scope, gamma="zeros")
                x = gelu(add(x, y, rate, scope), scope)
    x = norm(layers.GlobalAveragePooling2D(name="pool")(x), "last_norm")
    x = build.dropout(x, dropout, "dropout")
    return build.network(dense(x, build.num_classes, "logits"), name)
