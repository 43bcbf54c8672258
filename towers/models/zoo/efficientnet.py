"""EfficientNet (arXiv:1905.11946); every kernel decays, and begins as in timm."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import keras
from keras import layers

from towers.models.layers import blocks
from towers.models.layers.blocks import Builder, Tensor
from towers.models.layers.core import Conv2D, FusedActivation, GroupedConv2D

# Stages of B0: kernel size, stride of the first block, expansion, filters, blocks.
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
STEM_FILTERS, HEAD_FILTERS = 32, 1280

# Names of blocks in timm checkpoints; blocks of the first stage do not expand.
BLOCK_NAMES = {
    r"stage1_block(\d+)_depthwise": r"blocks.0.{\1-1}.conv_dw",
    r"stage1_block(\d+)_depthwise_norm": r"blocks.0.{\1-1}.bn1",
    r"stage1_block(\d+)_project": r"blocks.0.{\1-1}.conv_pw",
    r"stage1_block(\d+)_project_norm": r"blocks.0.{\1-1}.bn2",
    r"stage(\d+)_block(\d+)_expand": r"blocks.{\1-1}.{\2-1}.conv_pw",
    r"stage(\d+)_block(\d+)_expand_norm": r"blocks.{\1-1}.{\2-1}.bn1",
    r"stage(\d+)_block(\d+)_depthwise": r"blocks.{\1-1}.{\2-1}.conv_dw",
    r"stage(\d+)_block(\d+)_depthwise_norm": r"blocks.{\1-1}.{\2-1}.bn2",
    r"stage(\d+)_block(\d+)_project": r"blocks.{\1-1}.{\2-1}.conv_pwl",
    r"stage(\d+)_block(\d+)_project_norm": r"blocks.{\1-1}.{\2-1}.bn3",
    r"stage(\d+)_block(\d+)_squeeze": r"blocks.{\1-1}.{\2-1}.se.conv_reduce",
    r"stage(\d+)_block(\d+)_excite": r"blocks.{\1-1}.{\2-1}.se.conv_expand",
    "stem": "conv_stem",
    "stem_norm": "bn1",
    "logits": "classifier",
}


def _num_blocks(deeper, is_lite):
    counts = [math.ceil(count * deeper) for *_, count in STAGES]
    return [1, *counts[1:-1], 1] if is_lite else counts


def _names_of_port(counts):
    """Return names of lukemelas/EfficientNet-PyTorch, which counts all blocks."""
    rows = {"stem": "_conv_stem", "stem_norm": "_bn0", "logits": "_fc"}
    rows |= {"head": "_conv_head", "head_norm": "_bn1"}
    places = [(s, b) for s, n in enumerate(counts, 1) for b in range(1, n + 1)]
    for number, (stage, block) in enumerate(places):
        ours, theirs = f"stage{stage}_block{block}", f"_blocks.{number}"
        rows[f"{ours}_(expand|depthwise|project)"] = rf"{theirs}._\1_conv"
        for i, layer in enumerate(("expand", "depthwise", "project")):
            rows[f"{ours}_{layer}_norm"] = f"{theirs}._bn{i}"
        rows[f"{ours}_squeeze"] = f"{theirs}._se_reduce"
        rows[f"{ours}_excite"] = f"{theirs}._se_expand"
    return rows


TORCH_NAMES = (
    BLOCK_NAMES | {"head": "conv_head", "head_norm": "bn2"},
    *(_names_of_port(_num_blocks(deeper, True)) for deeper in (1, 1.1, 1.4, 1.8)),
)


class Block(NamedTuple):
    """An inverted residual; channels are those at width 1."""

    size: int  # kernel size of the depthwise convolution; 0 for none
    stride: int
    inputs: int  # channels
    expanded: int  # channels of the depthwise convolution; `inputs` for no expansion
    filters: int  # channels of the output
    squeezed: int  # channels within squeeze-and-excitation; 0 for none
    activation: str  # name in Keras
    start: int = 0  # kernel size of another one before the expansion; 0 for none


@dataclasses.dataclass(frozen=True)
class InvertedResiduals:
    """Adds inverted residuals and other convolutions to a network.

    With `as_tensorflow` convolutions with strides pad the right and lower edges by
    more, and normalization has epsilon 1e-3 and momentum 0.99; else they are as in
    PyTorch: equal edges, 1e-5 and 0.9.
    """

    build: Builder
    stochastic_depth: float = 0.0
    as_tensorflow: bool = False
    gate: str = "sigmoid"  # last activation of squeeze-and-excitation
    squeezed_activation: str | None = None  # first one; None for the block's
    initializer: keras.initializers.Initializer | None = None  # of kernels
    is_scaled: bool = False  # numbers of filters include the width

    def conv(
        self,
        x: Tensor,
        filters: int,
        name: str,
        size: int = 1,
        stride: int = 1,
        is_depthwise: bool = False,
        use_bias: bool = False,
    ) -> Tensor:
        """Add a convolution with a number of filters at width 1."""
        padding = "same"
        if stride > 1 and not self.as_tensorflow:
            x = layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x)
            padding = "valid"
        settings: dict = {
            "filters": filters if self.is_scaled else self.build.scaled(filters),
            "kernel_size": size,
            "strides": stride,
            "padding": padding,
            "use_bias": use_bias,
            # Each input of a depthwise kernel has one filter, of as many inputs.
            "kernel_initializer": self.initializer
            or _normal("fan_in" if is_depthwise else "fan_out"),
            "kernel_regularizer": self.build.regularizer,
            "name": name,
        }
        if is_depthwise:
            return GroupedConv2D(groups=x.shape[-1], **settings)(x)
        return Conv2D(**settings)(x)

    def normalized(self, x: Tensor, name: str, activation: str | None = None) -> Tensor:
        """Add batch normalization and an activation."""
        momentum, epsilon = (0.99, 1e-3) if self.as_tensorflow else (0.9, 1.001e-5)
        x = blocks.normalization(x, f"{name}_norm", "ones", momentum, epsilon)
        return self.active(x, activation, name) if activation else x

    def active(self, x: Tensor, activation: str, name: str) -> Tensor:
        """Add an activation."""
        return FusedActivation(activation, name=f"{name}_{activation}")(x)

    def stages(self, x: Tensor, stages: Sequence[Sequence[Block]]) -> Tensor:
        """Add stages; an image skips block l of L at l / L of stochastic depth."""
        num_blocks, index = sum(map(len, stages)), 0
        for stage, stage_blocks in enumerate(stages, start=1):
            for place, block in enumerate(stage_blocks, start=1):
                index += 1
                rate = self.stochastic_depth * index / num_blocks
                x = self._block(x, block, f"stage{stage}_block{place}", rate)
        return x

    def _block(self, x, block, name, rate):
        shortcut, activation = x, block.activation
        if block.start:
            kernel = {"size": block.start, "is_depthwise": True}
            x = self.conv(x, block.inputs, f"{name}_start", **kernel)
            x = self.normalized(x, f"{name}_start")
        if block.expanded != block.inputs:
            x = self.conv(x, block.expanded, f"{name}_expand")
            x = self.normalized(x, f"{name}_expand", activation)
        if block.size:
            kernel = {"size": block.size, "stride": block.stride, "is_depthwise": True}
            x = self.conv(x, block.expanded, f"{name}_depthwise", **kernel)
            x = self.normalized(x, f"{name}_depthwise", activation)
        if block.squeezed:
            gates = self._gates(x, block, name)
            x = layers.Multiply(name=f"{name}_multiply")([x, gates])
        x = self.conv(x, block.filters, f"{name}_project")
        x = self.normalized(x, f"{name}_project")
        if block.stride > 1 or block.filters != block.inputs:
            return x
        x = self.build.dropout(x, rate, f"{name}_depth", per_image=True)
        return layers.Add(name=f"{name}_add")([shortcut, x])

    def _gates(self, x, block, name):
        """Add squeeze-and-excitation, a factor per channel (arXiv:1709.01507)."""
        x = layers.GlobalAveragePooling2D(keepdims=True, name=f"{name}_pool")(x)
        x = self.conv(x, block.squeezed, f"{name}_squeeze", use_bias=True)
        activation = self.squeezed_activation or block.activation
        x = self.active(x, activation, f"{name}_squeeze")
        x = self.conv(x, block.expanded, f"{name}_excite", use_bias=True)
        return self.active(x, self.gate, f"{name}_excite")


def _normal(mode):
    return keras.initializers.VarianceScaling(2.0, mode, "untruncated_normal")


def multiple_of_8(count: float) -> int:
    """Return the nearest multiple of 8, or the next if that is more than 10 % below."""
    nearest = int(count + 4) // 8 * 8
    return nearest if nearest >= 0.9 * count else nearest + 8


def create_model(
    build: Builder,
    *,
    name: str,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    wider: float = 1.0,
    deeper: float = 1.0,
    is_lite: bool = False,
    as_tensorflow: bool = False,
) -> keras.Model:
    """Build EfficientNet, its channels and blocks scaled by `wider` and `deeper`.

    The Lite form has ReLU6 and no squeeze-and-excitation, and does not scale the stem,
    the head and the number of blocks of the first and the last stage.
    """
    activation, outer = "relu6" if is_lite else "silu", 1.0 if is_lite else wider
    before = stem = multiple_of_8(STEM_FILTERS * outer)
    stages, counts = [], _num_blocks(deeper, is_lite)
    for count, (size, stride, expansion, filters, _) in zip(
        counts, STAGES, strict=True
    ):
        out, stage = multiple_of_8(filters * wider), []
        for place in range(count):
            squeezed, expanded = 0 if is_lite else before // 4, expansion * before
            channels, step = (before, expanded, out, squeezed), 1 if place else stride
            stage.append(Block(size, step, *channels, activation))
            before = out
        stages.append(stage)
    residuals = InvertedResiduals(build, stochastic_depth, as_tensorflow)
    x = residuals.conv(build.images, stem, "stem", size=3, stride=2)
    x = residuals.stages(residuals.normalized(x, "stem", activation), stages)
    x = residuals.conv(x, multiple_of_8(HEAD_FILTERS * outer), "head")
    x = residuals.normalized(x, "head", activation)
    return build.network(build.classifier(x, dropout), name)
