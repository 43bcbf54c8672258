"""BiT's residual networks (Kolesnikov et al. 2020, arXiv:1912.11370).

Group normalization and a rectifier precede each convolution (arXiv:1603.05027), whose
kernel is standardized. All kernels decay.
"""

import functools
import math

import keras
from keras import layers

from towers.models.layers.blocks import Builder

# Parameter names in timm checkpoints.
TORCH_NAMES = (
    {
        r"stem_conv": "stem.conv",
        r"stage(\d+)_block(\d+)_(conv\d|norm\d)": r"stages.{\1-1}.blocks.{\2-1}.\3",
        r"stage(\d+)_block(\d+)_shortcut": (
            r"stages.{\1-1}.blocks.{\2-1}.downsample.conv"
        ),
        r"last_norm": "norm",
        r"logits": "head.fc[1x1]",
    },
)


def create_model(
    build: Builder, *, depths: tuple[int, ...], stochastic_depth: float = 0.0
) -> keras.Model:
    """Build stages with `depths` blocks; their 3x3 convolutions have the stride.

    Normalization is in 32 groups of channels, with `width` in the largest power of two
    that divides the channels.
    """
    conv, index = functools.partial(build.conv, is_standardized=True), 0

    def active(x, name):
        groups = {"groups": math.gcd(32, x.shape[-1]), "epsilon": 1e-5}
        x = layers.GroupNormalization(name=name, **groups)(x)
        return layers.ReLU(name=name.replace("norm", "relu"))(x)

    x = conv(build.images, build.scaled(64), 7, 2, "stem_conv")
    x = layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
    x = layers.MaxPooling2D(3, strides=2, name="stem_pool")(x)
    for stage, depth in enumerate(depths, start=1):
        inner, outer = (build.scaled(k * 32 * 2**stage) for k in (1, 4))
        for block in range(1, depth + 1):
            name, index = f"stage{stage}_block{block}", index + 1
            stride = 2 if stage > 1 and block == 1 else 1
            y = active(x, f"{name}_norm1")
            if block == 1:
                x = conv(y, outer, 1, stride, f"{name}_shortcut")
            y = conv(y, inner, 1, 1, f"{name}_conv1")
            y = conv(active(y, f"{name}_norm2"), inner, 3, stride, f"{name}_conv2")
            y = conv(active(y, f"{name}_norm3"), outer, 1, 1, f"{name}_conv3")
            rate, place = stochastic_depth * index / sum(depths), f"{name}_depth"
            y = build.dropout(y, rate, place, per_image=True)
            x = layers.Add(name=f"{name}_add")([x, y])
    return build.network(build.classifier(active(x, "last_norm")), "bit_resnet50x1")
