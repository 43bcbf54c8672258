"""ConvNeXt (Liu et al. 2022, arXiv:2201.03545), V2 (Woo et al. 2023, 2301.00808)."""

import keras
from keras import layers

from towers.models.layers import normalization
from towers.models.layers.blocks import Builder
from towers.models.layers.core import Conv2D, Dense, Gelu, GroupedConv2D, LayerScale

_NAMES = {
    r"stem": "stem.0",
    r"stem_norm": "stem.1",
    r"stage(\d+)_reduce_norm": r"stages.{\1-1}.downsample.0",
    r"stage(\d+)_reduce": r"stages.{\1-1}.downsample.1",
    r"stage(\d+)_block(\d+)_depthwise": r"stages.{\1-1}.blocks.{\2-1}.conv_dw",
    r"stage(\d+)_block(\d+)_norm": r"stages.{\1-1}.blocks.{\2-1}.norm",
    r"stage(\d+)_block(\d+)_hidden": r"stages.{\1-1}.blocks.{\2-1}.mlp.fc1",
    r"stage(\d+)_block(\d+)_response": r"stages.{\1-1}.blocks.{\2-1}.mlp.grn",
    r"stage(\d+)_block(\d+)_out": r"stages.{\1-1}.blocks.{\2-1}.mlp.fc2",
    r"stage(\d+)_block(\d+)_scale/gamma": r"stages.{\1-1}.blocks.{\2-1}.gamma",
    r"last_norm": "head.norm",
    r"logits": "head.fc",
}


def torch_names(options: dict) -> tuple[dict[str, str], ...]:
    """Return parameter names in timm checkpoints; small networks have 1x1 kernels."""
    suffix = "[1x1]" if options["channels"][0] < 96 else ""
    return ({k: x + suffix * (".mlp.fc" in x) for k, x in _NAMES.items()},)


TORCH_NAMES = torch_names


def create_model(
    build: Builder,
    *,
    name: str,
    channels: tuple[int, ...],
    depths: tuple[int, ...],
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    is_v2: bool = False,
) -> keras.Model:
    """Build stages with numbers of `channels` and blocks. Every kernel decays.

    V2 has a global response normalization in a block in place of the layer scale.
    """
    build.check_image_size(name, at_least=2 ** (len(depths) + 1))
    settings = {
        # The authors' `trunc_normal_` truncates at 2, at 100 standard deviations.
        "kernel_initializer": keras.initializers.RandomNormal(stddev=0.02),
        "kernel_regularizer": build.regularizer,
    }

    def patches(x, filters, size, name):
        return Conv2D(filters, size, strides=size, name=name, **settings)(x)

    def norm(x, name):
        return normalization.FusedLayerNormalization(epsilon=1e-6, name=name)(x)

    def block(x, hidden, scope, rate):
        filters, shortcut = x.shape[-1], x
        depthwise = {"groups": filters, "padding": "same", "name": f"{scope}_depthwise"}
        x = GroupedConv2D(filters, 7, **depthwise, **settings)(x)
        x = norm(x, f"{scope}_norm")
        x = Dense(hidden, name=f"{scope}_hidden", **settings)(x)
        x = Gelu(name=f"{scope}_gelu")(x)
        if is_v2:
            x = normalization.GlobalResponseNormalization(name=f"{scope}_response")(x)
        x = Dense(filters, name=f"{scope}_out", **settings)(x)
        if not is_v2:
            x = LayerScale(name=f"{scope}_scale")(x)
        x = build.dropout(x, rate, f"{scope}_depth", per_image=True)
        return layers.Add(name=f"{scope}_add")([shortcut, x])

    x, index = build.images, 0
    for stage, (count, depth) in enumerate(zip(channels, depths, strict=True), start=1):
        filters, hidden = build.scaled(count), build.scaled(4 * count)
        if stage == 1:
            x = norm(patches(x, filters, 4, "stem"), "stem_norm")
        else:
            x = norm(x, f"stage{stage}_reduce_norm")
            x = patches(x, filters, 2, f"stage{stage}_reduce")
        for place in range(1, depth + 1):
            index += 1
            rate = stochastic_depth * index / sum(depths)
            x = block(x, hidden, f"stage{stage}_block{place}", rate)
    x = norm(layers.GlobalAveragePooling2D(name="pool")(x), "last_norm")
    x = build.dropout(x, dropout, "dropout")
    logits = Dense(build.num_classes, name="logits", **settings)(x)
    return build.network(logits, name)
