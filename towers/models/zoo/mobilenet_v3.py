"""MobileNetV3 (Howard et al. 2019, arXiv:1905.02244)."""

import keras
from keras import layers

from towers.models.layers.blocks import Builder
from towers.models.zoo import efficientnet

# Tables 2 and 1 of the paper, by stages of one size: kernel size, stride, expanded
# channels, filters, squeeze-and-excitation, activation.
SMALL = (
    ((3, 2, 16, 16, True, "relu"),),
    ((3, 2, 72, 24, False, "relu"), (3, 1, 88, 24, False, "relu")),
    ((5, 2, 96, 40, True, "hard_silu"), *[(5, 1, 240, 40, True, "hard_silu")] * 2),
    ((5, 1, 120, 48, True, "hard_silu"), (5, 1, 144, 48, True, "hard_silu")),
    ((5, 2, 288, 96, True, "hard_silu"), *[(5, 1, 576, 96, True, "hard_silu")] * 2),
)
LARGE = (
    ((3, 1, 16, 16, False, "relu"),),
    ((3, 2, 64, 24, False, "relu"), (3, 1, 72, 24, False, "relu")),
    ((5, 2, 72, 40, True, "relu"), *[(5, 1, 120, 40, True, "relu")] * 2),
    (
        (3, 2, 240, 80, False, "hard_silu"),
        (3, 1, 200, 80, False, "hard_silu"),
        *[(3, 1, 184, 80, False, "hard_silu")] * 2,
    ),
    ((3, 1, 480, 112, True, "hard_silu"), (3, 1, 672, 112, True, "hard_silu")),
    ((5, 2, 672, 160, True, "hard_silu"), *[(5, 1, 960, 160, True, "hard_silu")] * 2),
)
STEM_FILTERS = 16

# Parameter names in timm checkpoints.
TORCH_NAMES = (
    efficientnet.BLOCK_NAMES
    | {r"stage(\d+)_conv": r"blocks.{\1-1}.0.conv", "hidden": "conv_head"}
    | {r"stage(\d+)_conv_norm": r"blocks.{\1-1}.0.bn1"},
)

STAGES = {"small": SMALL, "large": LARGE}
HIDDEN_UNITS = {"small": 1024, "large": 1280}


def create_model(
    build: Builder,
    *,
    name: str,
    size: str,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    as_tensorflow: bool = False,
) -> keras.Model:
    """Build inverted residuals; for `as_tensorflow` see `InvertedResiduals`."""
    before, stages = STEM_FILTERS, list[list[efficientnet.Block]]()
    for rows in STAGES[size]:
        stages.append([])
        for kernel, stride, expanded, filters, is_squeezed, activation in rows:
            squeezed = efficientnet.multiple_of_8(expanded / 4) if is_squeezed else 0
            channels = before, expanded, filters, squeezed
            stages[-1].append(efficientnet.Block(kernel, stride, *channels, activation))
            before = filters
    residuals = efficientnet.InvertedResiduals(
        build,
        stochastic_depth,
        as_tensorflow,
        gate="hard_sigmoid",
        squeezed_activation="relu",
    )
    x = residuals.conv(build.images, STEM_FILTERS, "stem", size=3, stride=2)
    x = residuals.stages(residuals.normalized(x, "stem", "hard_silu"), stages)
    last = f"stage{len(stages) + 1}_conv"
    x = residuals.conv(x, 6 * before, last)
    x = residuals.normalized(x, last, "hard_silu")
    x = layers.GlobalAveragePooling2D(keepdims=True, name="pool")(x)
    x = residuals.conv(x, HIDDEN_UNITS[size], "hidden", use_bias=True)
    x = layers.Flatten(name="flatten")(residuals.active(x, "hard_silu", "hidden"))
    x = build.dropout(x, dropout, "dropout")
    return build.network(build.logits(x), name)
