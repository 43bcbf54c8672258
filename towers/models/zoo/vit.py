"""Vision Transformers (arXiv:2010.11929), as in arXiv:2205.01580 and big_vision."""

import keras
from keras import layers

from towers.models.layers.attention import Attention, Prefix, Tokens
from towers.models.layers.blocks import Builder
from towers.models.layers.core import Conv2D, Dense, Gelu, LayerScale
from towers.models.layers.normalization import FusedLayerNormalization

# Minimum side of an image for the paper's patches, 16x16; else 4x4.
LARGE = 128


def _with_blocks(
    others: dict[str, str], block: str, parts: dict[str, str]
) -> dict[str, str]:
    """Return a table in which names of the parts of a block begin with `block`."""
    named = {rf"block(\d+)_{ours}": block + theirs for ours, theirs in parts.items()}
    return others | named


def _of_torchvision(hidden: str, mlp: str) -> dict[str, str]:
    return _with_blocks(
        {
            "patches": "conv_proj",
            "tokens/class_token": "class_token",
            "tokens/positions": "encoder.pos_embedding",
            "last_norm": "encoder.ln",
            "logits": "heads.head",
        },
        r"encoder.layers.encoder_layer_{\1-1}.",
        {
            **{
                f"{part}/{ours}": f"self_attention.in_proj_{theirs}[{i}/3]"
                for i, part in enumerate(("query", "key", "value"))
                for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
            },
            r"norm(\d)": r"ln_\2",
            "out": "self_attention.out_proj",
            "hidden": f"mlp.{hidden}",
            "mlp": f"mlp.{mlp}",
        },
    )


def _of_transformers(network: str, blocks: str, parts: dict[str, str]):
    return _with_blocks(
        {
            "patches": f"{network}embeddings.patch_embeddings.projection",
            "tokens/class_token": f"{network}embeddings.cls_token",
            "tokens/positions": f"{network}embeddings.position_embeddings",
            "last_norm": f"{network}layernorm",
            "logits": "classifier",
        },
        rf"{network}{blocks}.{{\1-1}}.",
        {"norm1": "layernorm_before", "norm2": "layernorm_after", **parts},
    )


# Parts of a block in files of transformers' save_pretrained, and in its state dicts.
_SAVED = {
    "(query|key|value)": r"attention.attention.\2",
    "out": "attention.output.dense",
    "hidden": "intermediate.dense",
    "mlp": "output.dense",
}
_IN_MEMORY = {
    **{x: f"attention.{x[0]}_proj" for x in ("query", "key", "value", "out")},
    **{"hidden": "mlp.fc1", "mlp": "mlp.fc2"},
}


_TIMM = {
    r"patches": "patch_embed.proj",
    r"tokens/class_token|class/token": "cls_token",
    r"(registers)/token": "reg_token",
    r"tokens/positions": "pos_embed",
    r"block(\d+)_scale(\d)/gamma": r"blocks.{\1-1}.ls\2.gamma",
    r"block(\d+)_(norm\d)": r"blocks.{\1-1}.\2",
    r"block(\d+)_query": r"blocks.{\1-1}.attn.qkv[0/3]",
    r"block(\d+)_key": r"blocks.{\1-1}.attn.qkv[1/3]",
    r"block(\d+)_value": r"blocks.{\1-1}.attn.qkv[2/3]",
    r"block(\d+)_out": r"blocks.{\1-1}.attn.proj",
    r"block(\d+)_hidden": r"blocks.{\1-1}.mlp.fc1",
    r"block(\d+)_mlp": r"blocks.{\1-1}.mlp.fc2",
    r"last_norm": "norm",
    r"logits": "head",
}
_OTHERS = (
    _of_torchvision("0", "3"),
    _of_torchvision("linear_1", "linear_2"),  # its published files
    *(
        _of_transformers(network, *names)
        for network in ("vit.", "")  # with and without a head
        for names in (("encoder.layer", _SAVED), ("layers", _IN_MEMORY))
    ),
)


def torch_names(options: dict) -> tuple[dict[str, str], ...]:
    """Return names in checkpoints of timm, torchvision and transformers.

    DINOv3 is read from timm's alone, where it has other names.
    """
    if not options.get("is_rotary"):
        return _TIMM, *_OTHERS
    scales = {r"block(\d+)_scale(\d)/gamma": r"blocks.{\1-1}.gamma_\2"}
    return ({k: x for k, x in _TIMM.items() if k != "tokens/positions"} | scales,)


TORCH_NAMES = torch_names


def create_model(
    build: Builder,
    *,
    name: str,
    channels: int,
    depth: int,
    heads: int,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    has_class_token: bool = False,
    patch_size: int = 0,
    initial_scale: float = 0.0,
    num_registers: int = 0,
    is_rotary: bool = False,
) -> keras.Model:
    """Build a Vision Transformer with pre-normalization.

    With `has_class_token` it is DeiT (arXiv:2012.12877) without distillation; else the
    head reads the mean of the patches, and positions are fixed. Pixels beyond the last
    whole patch are cut off. With `initial_scale` layer scales end the branches, as in
    DINOv2 (arXiv:2304.07193). Registers (arXiv:2309.16588) follow a class token; like
    it they have no position.

    With `is_rotary` it is DINOv3 (arXiv:2508.10104): queries and keys are rotated by
    their positions and have no biases, and epsilon is 1e-5. The head reads the mean of
    the patches, timm's default; the authors' head of ViT-7B also reads the class
    token.
    """
    patch_size = patch_size or (16 if min(build.image_shape[:2]) >= LARGE else 4)
    build.check_image_size(name, at_least=2 * patch_size)
    num_heads = max(1, int(heads * build.width))
    units = build.scaled(channels, num_heads * (4 if is_rotary else 1))
    hidden = build.scaled(4 * channels)

    def dense(x, units, name, use_bias=True):
        settings = {"kernel_regularizer": build.regularizer, "use_bias": use_bias}
        return Dense(units, name=name, **settings)(x)

    def norm(x, name):
        epsilon = 1e-5 if is_rotary else 1e-6
        return FusedLayerNormalization(epsilon=epsilon, name=name)(x)

    def attention(x, name):
        kinds = ("query", "key", "value")
        parts = [dense(x, units, f"{name}_{kind}", not is_rotary) for kind in kinds]
        x = Attention(num_heads, grid, name=f"{name}_attention")(parts)
        return dense(x, units, f"{name}_out")

    def perceptron(x, name):
        x = Gelu(name=f"{name}_gelu")(dense(x, hidden, f"{name}_hidden"))
        x = build.dropout(x, dropout, f"{name}_hidden_dropout")
        return dense(x, units, f"{name}_mlp")

    x = Conv2D(
        units,
        patch_size,
        strides=patch_size,
        kernel_initializer="lecun_normal",
        kernel_regularizer=build.regularizer,
        name="patches",
    )(build.images)
    grid, positions = None, "learned" if num_registers else "fixed"
    if is_rotary:
        grid, positions = x.shape[1:3], "none"
    x = Tokens(has_class_token and not num_registers, positions, name="tokens")(x)
    if num_registers:
        x = Prefix(num_registers, name="registers")(x)
        x = Prefix(1, name="class")(x)
    x = build.dropout(x, dropout, "tokens_dropout")
    for block in range(1, depth + 1):
        scope, rate = f"block{block}", stochastic_depth * block / depth
        for place, branch in enumerate((attention, perceptron), 1):
            y = branch(norm(x, f"{scope}_norm{place}"), scope)
            y = build.dropout(y, dropout, f"{scope}_dropout{place}")
            if initial_scale:
                y = LayerScale(initial_scale, name=f"{scope}_scale{place}")(y)
            depth_name = f"{scope}_depth{place}"
            y = build.dropout(y, rate, depth_name, per_image=True)
            x = layers.Add(name=f"{scope}_add{place}")([x, y])
    x = norm(x, "last_norm")
    if has_class_token:
        x = layers.Cropping1D((0, x.shape[1] - 1), name="class_token")(x)
        x = layers.Flatten(name="flatten")(x)
    else:
        if num_registers:
            x = layers.Cropping1D((1 + num_registers, 0), name="last_patches")(x)
        x = layers.GlobalAveragePooling1D(name="pool")(x)
    logits = Dense(
        build.num_classes,
        kernel_initializer="zeros",
        kernel_regularizer=build.regularizer,
        name="logits",
    )(x)
    return build.network(logits, name)
