"""Vision Transformers (Dosovitskiy et al. 2021, arXiv:2010.11929), in the plain form of
Beyer et al. 2022, arXiv:2205.01580, and big_vision."""

import keras
from keras import layers

from towers.models.attention import Attention, Tokens
from towers.models.blocks import check_image_size, network, scaled
from towers.models.blocks import dropout as dropped
from towers.models.layers import Gelu

# Sides of an image from which on patches are those of the paper, 16x16; else 4x4.
LARGE = 64


def create_model(
    *,
    name: str,
    channels: int,
    depth: int,
    heads: int,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    pool: str = "mean",
    positions: str = "sincos2d",
) -> keras.Model:
    """Patches as tokens, and blocks of attention and a perceptron of one hidden layer,
    each behind a normalization and within a shortcut.

    With a class token and learned positions these are the parameters of timm's
    `vit_*_patch16_224`. Kernels begin as in big_vision: patches as LeCun's, those of
    the blocks as Glorot's, the last one zero; so do biases. Every kernel is marked for
    decay. GELU is exact, where big_vision approximates it. What remains of an image at
    its right and lower edge is not seen. With a smaller `width` there are fewer heads,
    of 64 channels or more.

    Args:
        name: of the network.
        channels, depth, heads: of a token, blocks, heads of each.
        image_shape, num_classes, width, regularizer: see `models.create_model`.
        dropout: its rate, of the tokens, of the hidden units and of each branch.
        stochastic_depth: that of both branches of the last block.
        pool: mean, of all tokens, or token, for a class token.
        positions: sincos2d, which are fixed, or learned.

    Raises:
        ConfigError: the images are smaller than two by two patches.
    """
    patch_size = 16 if min(image_shape[:2]) >= LARGE else 4
    check_image_size(name, image_shape, at_least=2 * patch_size)
    heads = max(1, int(heads * width))
    hidden = scaled(4 * channels, width)
    channels = scaled(channels, width, heads)
    inputs = [keras.Input(image_shape, name="images")]

    def dense(x, units, name):
        return layers.Dense(units, kernel_regularizer=regularizer, name=name)(x)

    def norm(x, name):
        return layers.LayerNormalization(epsilon=1e-6, name=name)(x)

    def attention(x, name):
        kinds = ("query", "key", "value")
        parts = [dense(x, channels, f"{name}_{kind}") for kind in kinds]
        x = Attention(heads, name=f"{name}_attention")(parts)
        return dense(x, channels, f"{name}_out")

    def perceptron(x, name):
        x = Gelu(name=f"{name}_gelu")(dense(x, hidden, f"{name}_hidden"))
        x = dropped(x, dropout, f"{name}_hidden_dropout", inputs)
        return dense(x, channels, f"{name}_mlp")

    x = layers.Conv2D(
        channels,
        patch_size,
        strides=patch_size,
        kernel_initializer="lecun_normal",
        kernel_regularizer=regularizer,
        name="patches",
    )(inputs[0])
    x = Tokens(positions, class_token=pool == "token", name="tokens")(x)
    x = dropped(x, dropout, "tokens_dropout", inputs)
    for block in range(1, depth + 1):
        skipped = stochastic_depth * block / depth
        for place, branch in enumerate((attention, perceptron), 1):
            part = f"block{block}_{{}}{place}".format
            y = branch(norm(x, part("norm")), f"block{block}")
            y = dropped(y, dropout, part("dropout"), inputs)
            y = dropped(y, skipped, part("depth"), inputs, per_image=True)
            x = layers.Add(name=part("add"))([x, y])
    x = norm(x, "last_norm")
    if pool == "token":
        x = layers.Cropping1D((0, x.shape[1] - 1), name="class_token")(x)
        x = layers.Flatten(name="flatten")(x)
    else:
        x = layers.GlobalAveragePooling1D(name="pool")(x)
    logits = layers.Dense(
        num_classes,
        kernel_initializer="zeros",
        kernel_regularizer=regularizer,
        name="logits",
    )(x)
    return network(inputs, logits, name)
