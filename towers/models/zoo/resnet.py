"""Residual networks (He et al. 2015, arXiv:1512.03385).

Normalization follows each convolution. All kernels decay. With stochastic depth (Huang
et al. 2016, arXiv:1603.09382) an image skips block l of L at l / L of the rate.
"""

import keras
from keras import layers

from towers.models.layers.blocks import Builder, normalization
from towers.models.layers.core import PadChannels

# Parameter names in checkpoints of torchvision and timm.
TORCH_NAMES = (
    {
        r"stem_conv": "conv1",
        r"stem_norm": "bn1",
        r"stage(\d+)_block(\d+)_conv(\d)": r"layer\1.{\2-1}.conv\3",
        r"stage(\d+)_block(\d+)_norm(\d)": r"layer\1.{\2-1}.bn\3",
        r"stage(\d+)_block(\d+)_shortcut_conv": r"layer\1.{\2-1}.downsample.0",
        r"stage(\d+)_block(\d+)_shortcut_norm": r"layer\1.{\2-1}.downsample.1",
        r"logits": "fc",
    },
)


def create_resnet18(build: Builder, *, stochastic_depth: float = 0.0) -> keras.Model:
    """Build ResNet-18 with the stem for small images of "Dive into Deep Learning"."""
    x = _stem(build, build.scaled(64), 3, 1)
    stages = [(_basic(build.scaled(count)), 2) for count in (64, 128, 256, 512)]
    x = _stages(build, x, stages, _projection, stochastic_depth)
    return build.network(build.classifier(x), "resnet18")


def create_cifar_resnet(
    build: Builder, *, depth: int, stochastic_depth: float = 0.0
) -> keras.Model:
    """Build the networks of the paper's section 4.2, of 6n + 2 layers.

    Zeros of shortcuts (option A) are before and after the channels, so a network split
    in two needs no transfer for them.
    """

    def shortcut(_, x, filters, stride, name):
        more = filters - x.shape[-1]
        x = layers.AveragePooling2D(1, strides=stride, name=f"{name}_subsample")(x)
        return PadChannels(more // 2, more - more // 2, name=f"{name}_zeros")(x)

    blocks, rest = divmod(depth - 2, 6)
    if rest:
        raise ValueError(f"depth={depth}: must be 6n + 2")
    x = _stem(build, build.scaled(16), 3, 1)
    stages = [(_basic(build.scaled(count)), blocks) for count in (16, 32, 64)]
    x = _stages(build, x, stages, shortcut, stochastic_depth)
    return build.network(build.classifier(x), f"resnet{depth}")


def create_imagenet_resnet(
    build: Builder,
    *,
    blocks: tuple[int, ...],
    has_bottlenecks: bool = True,
    name: str = "",
    stochastic_depth: float = 0.0,
) -> keras.Model:
    """Build the networks of the paper's table 1; `blocks` are counted per stage.

    The 3x3 convolution of a bottleneck has the stride, not the first 1x1 as in the
    paper. The last scale of a block is initially zero (arXiv:1706.02677, section 5.1).
    """
    stages = []
    for stage, count in enumerate(blocks):
        inner, outer = (build.scaled(factor * 64 * 2**stage) for factor in (1, 4))
        convs = [(inner, 1), (inner, 3), (outer, 1)]
        stages.append((convs if has_bottlenecks else _basic(inner), count))
    x = _stem(build, build.scaled(64), 7, 2)
    x = layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
    x = layers.MaxPooling2D(3, strides=2, name="stem_pool")(x)
    x = _stages(build, x, stages, _projection, stochastic_depth, "zeros")
    logits = build.classifier(x)
    name = name or f"resnet{len(stages[0][0]) * sum(blocks) + 2}"
    return build.network(logits, name)


def _basic(filters):
    """Return filters and kernel sizes of a block (figure 2)."""
    return [(filters, 3), (filters, 3)]


def _stem(build, filters, size, stride):
    x = build.conv(build.images, filters, size, stride, "stem_conv")
    x = normalization(x, "stem_norm")
    return layers.ReLU(name="stem_relu")(x)


def _projection(build, x, filters, stride, name):
    x = build.conv(x, filters, 1, stride, f"{name}_shortcut_conv")
    return normalization(x, f"{name}_shortcut_norm")


def _stages(build, x, stages, shortcut_fn, stochastic_depth, last_scale="ones"):
    """Add stages of (filters and kernel sizes of a block's convolutions, blocks).

    `shortcut_fn` adds the shortcut of a stage's first block; in the first stage only
    with bottlenecks.
    """
    num_blocks, index = sum(blocks for _, blocks in stages), 0
    for stage, (convs, blocks) in enumerate(stages, start=1):
        for block in range(1, blocks + 1):
            name, index = f"stage{stage}_block{block}", index + 1
            stride = 2 if stage > 1 and block == 1 else 1
            outer, shortcut = convs[-1][0], x
            if block == 1 and (stage > 1 or len(convs) == 3):
                shortcut = shortcut_fn(build, x, outer, stride, name)
            x = _branch(build, x, convs, stride, name, last_scale)
            rate, place = stochastic_depth * index / num_blocks, f"{name}_depth"
            x = build.dropout(x, rate, place, per_image=True)
            x = layers.Add(name=f"{name}_add")([shortcut, x])
            x = layers.ReLU(name=f"{name}_relu{len(convs)}")(x)
    return x


def _branch(build, x, convs, stride, name, last_scale):
    for place, (filters, size) in enumerate(convs, start=1):
        if place > 1:
            x = layers.ReLU(name=f"{name}_relu{place - 1}")(x)
        step, stride = (stride, 1) if size == 3 else (1, stride)
        x = build.conv(x, filters, size, step, f"{name}_conv{place}")
        scale = last_scale if place == len(convs) else "ones"
        x = normalization(x, f"{name}_norm{place}", scale)
    return x
