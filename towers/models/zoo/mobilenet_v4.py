"""MobileNetV4 of convolutions (Qin et al. 2024, arXiv:2404.10518)."""

import keras
from keras import layers

from towers.models.layers.blocks import Builder
from towers.models.zoo.efficientnet import Block, InvertedResiduals

# The first convolutions: kernel size, stride, filters.
CONVS = {
    "small": {
        **{"stage1_block1": (3, 2, 32), "stage1_block2": (1, 1, 32)},
        **{"stage2_block1": (3, 2, 96), "stage2_block2": (1, 1, 64)},
    },
    "medium": {
        "stage1_block1_expand": (3, 2, 128),
        "stage1_block1_project": (1, 1, 48),
    },
}
# Stage -> filters and, a digit each for each block, the kernel sizes of the depthwise
# convolutions before and after the expansion, 0 for none, and the expansion. The first
# block has stride 2.
STAGES = {
    "small": {3: (96, "553 032 032 032 032 304"), 4: (128, "336 554 054 053 034 034")},
    "medium": {
        2: (80, "354 332"),
        3: (160, "356 334 334 354 334 304 002 304"),
        4: (256, "556 554 354 354 004 304 352 554 004 004 502"),
    },
}
STEM_FILTERS, LAST_FILTERS, HIDDEN_UNITS = 32, 960, 1280

# Parameter names in timm checkpoints. Blocks of one convolution have no part.
_PARTS = {"start": "dw_start", "expand": "pw_exp", "depthwise": "dw_mid"}
_PARTS |= {"project": "pw_proj"}
_OURS, _THEIRS = r"stage(\d+)_block(\d+)", r"blocks.{\1-1}.{\2-1}"
TORCH_NAMES = (
    {
        "stem": "conv_stem",
        "stem_norm": "bn1",
        "stage1_block1_expand": "blocks.0.0.conv_exp",
        "stage1_block1_expand_norm": "blocks.0.0.bn1",
        "stage1_block1_project": "blocks.0.0.conv_pwl",
        "stage1_block1_project_norm": "blocks.0.0.bn2",
        _OURS: f"{_THEIRS}.conv",
        f"{_OURS}_norm": f"{_THEIRS}.bn1",
        **{f"{_OURS}_{x}": f"{_THEIRS}.{y}.conv" for x, y in _PARTS.items()},
        **{f"{_OURS}_{x}_norm": f"{_THEIRS}.{y}.bn" for x, y in _PARTS.items()},
        "hidden": "conv_head",
        "hidden_norm": "norm_head",
        "logits": "classifier",
    },
)


def create_model(
    build: Builder,
    *,
    name: str,
    size: str,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
) -> keras.Model:
    """Build universal inverted bottlenecks after a few convolutions."""
    stages: list[list[Block]] = [[], [], [], []]
    *_, (_, _, before) = CONVS[size].values()
    for stage, (filters, rows) in STAGES[size].items():
        for place, digits in enumerate(rows.split()):
            start, kernel, expansion = map(int, digits)
            channels = before, expansion * before, filters, 0
            block = Block(kernel, 1 if place else 2, *channels, "relu", start)
            stages[stage - 1].append(block)
            before = filters
    residuals = InvertedResiduals(build, stochastic_depth)

    def conv(x, kernel, stride, filters, name):
        x = residuals.conv(x, filters, name, size=kernel, stride=stride)
        return residuals.normalized(x, name, None if "project" in name else "relu")

    x = conv(build.images, 3, 2, STEM_FILTERS, "stem")
    for first, row in CONVS[size].items():
        x = conv(x, *row, first)
    x = conv(residuals.stages(x, stages), 1, 1, LAST_FILTERS, "stage5_block1")
    x = layers.GlobalAveragePooling2D(keepdims=True, name="pool")(x)
    x = layers.Flatten(name="flatten")(conv(x, 1, 1, HIDDEN_UNITS, "hidden"))
    x = build.dropout(x, dropout, "dropout")
    return build.network(build.logits(x), name)
