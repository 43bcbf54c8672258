"""Residual networks (He et al. 2015, arXiv:1512.03385).

Normalization follows each convolution. All kernels are marked for decay; the scales and
offsets of the normalizations are not.
"""

import keras
from keras import layers

from towers.models.blocks import classifier, conv, normalization, scaled
from towers.models.layers import PadChannels


def create_resnet18(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
) -> keras.Model:
    """The 18-layer network with a stem for small images; 11,173,962 parameters.

    A 3x3 convolution and no pooling in place of the stem for ImageNet, as in
    "Concise Implementation for Multiple GPUs" of "Dive into Deep Learning"; where the
    size changes, shortcuts are normalized 1x1 convolutions (option B of the paper).
    """

    def shortcut(x, filters, stride, name):
        x = conv(x, filters, 1, stride, f"{name}_shortcut_conv", regularizer)
        return normalization(x, f"{name}_shortcut_norm")

    stages = [(scaled(count, width), 2) for count in (64, 128, 256, 512)]
    return _resnet("resnet18", image_shape, num_classes, stages, regularizer, shortcut)


def create_cifar_resnet(
    *,
    depth: int,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
) -> keras.Model:
    """The networks of the paper's section 4.2, of 6n + 2 layers.

    Shortcuts have no parameters (option A): where the size changes they take every
    other pixel and add as many channels of zeros before the existing ones as after
    them. The paper does not say where the zeros are; this way each half of the channels
    stays a half, and a network split in two needs no transfer for them.
    """

    def shortcut(x, filters, stride, name):
        more = filters - x.shape[-1]
        x = layers.AveragePooling2D(1, strides=stride, name=f"{name}_subsample")(x)
        return PadChannels(more // 2, more - more // 2, name=f"{name}_zeros")(x)

    blocks, rest = divmod(depth - 2, 6)
    if rest:
        raise ValueError(f"depth={depth}: must be 6n + 2")
    stages = [(scaled(count, width), blocks) for count in (16, 32, 64)]
    name = f"resnet{depth}"
    return _resnet(name, image_shape, num_classes, stages, regularizer, shortcut)


def create_imagenet_resnet(
    *,
    blocks: tuple[int, ...],
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
) -> keras.Model:
    """The networks of the paper's table 1 with bottlenecks; 25,557,032 parameters at
    224x224x3, 1000 classes and blocks of (3, 4, 6, 3), all of them trainable.

    The form called 1.5, of facebookarchive/fb.resnet.torch: the 3x3 convolution of a
    bottleneck has the stride, not the first 1x1 as in the paper and in Keras. The last
    scale of each block is initially zero, so that the block hands its input on (Goyal
    et al. 2017, arXiv:1706.02677, section 5.1).

    Args:
        blocks: number of blocks of each stage.
    """
    images = keras.Input(image_shape, name="images")
    x = conv(images, scaled(64, width), 7, 2, "stem_conv", regularizer)
    x = normalization(x, "stem_norm")
    x = layers.ReLU(name="stem_relu")(x)
    x = layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
    x = layers.MaxPooling2D(3, strides=2, name="stem_pool")(x)
    for stage, count in enumerate(blocks, start=1):
        inner = 64 * 2 ** (stage - 1)
        for block in range(1, count + 1):
            x = _bottleneck(
                x,
                scaled(inner, width),
                scaled(4 * inner, width),
                stride=2 if stage > 1 and block == 1 else 1,
                has_projection=block == 1,
                name=f"stage{stage}_block{block}",
                regularizer=regularizer,
            )
    logits = classifier(x, num_classes, regularizer)
    return keras.Model(images, logits, name=f"resnet{3 * sum(blocks) + 2}")


def _resnet(name, image_shape, num_classes, stages, regularizer, shortcut_fn):
    """The stem, stages of (channels, blocks), pooling and the classifier."""
    images = keras.Input(image_shape, name="images")
    x = conv(images, stages[0][0], 3, 1, "stem_conv", regularizer)
    x = normalization(x, "stem_norm")
    x = layers.ReLU(name="stem_relu")(x)
    for stage, (filters, blocks) in enumerate(stages, start=1):
        for block in range(1, blocks + 1):
            changes = stage > 1 and block == 1
            x = _basic_block(
                x,
                filters,
                stride=2 if changes else 1,
                name=f"stage{stage}_block{block}",
                regularizer=regularizer,
                shortcut_fn=shortcut_fn if changes else None,
            )
    logits = classifier(x, num_classes, regularizer)
    return keras.Model(images, logits, name=name)


def _basic_block(x, filters, *, stride, name, regularizer, shortcut_fn):
    """Two 3x3 convolutions, and the sum with the shortcut (figure 2)."""
    shortcut = shortcut_fn(x, filters, stride, name) if shortcut_fn else x
    x = conv(x, filters, 3, stride, f"{name}_conv1", regularizer)
    x = normalization(x, f"{name}_norm1")
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = conv(x, filters, 3, 1, f"{name}_conv2", regularizer)
    x = normalization(x, f"{name}_norm2")
    x = layers.Add(name=f"{name}_add")([shortcut, x])
    return layers.ReLU(name=f"{name}_relu2")(x)


def _bottleneck(x, inner, outer, *, stride, has_projection, name, regularizer):
    """Convolutions of 1x1, 3x3 and 1x1, and the sum with the shortcut (figure 5)."""
    shortcut = x
    if has_projection:
        shortcut = conv(x, outer, 1, stride, f"{name}_shortcut_conv", regularizer)
        shortcut = normalization(shortcut, f"{name}_shortcut_norm")
    x = conv(x, inner, 1, 1, f"{name}_conv1", regularizer)
    x = normalization(x, f"{name}_norm1")
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = conv(x, inner, 3, stride, f"{name}_conv2", regularizer)
    x = normalization(x, f"{name}_norm2")
    x = layers.ReLU(name=f"{name}_relu2")(x)
    x = conv(x, outer, 1, 1, f"{name}_conv3", regularizer)
    x = normalization(x, f"{name}_norm3", gamma_initializer="zeros")
    x = layers.Add(name=f"{name}_add")([shortcut, x])
    return layers.ReLU(name=f"{name}_relu3")(x)
