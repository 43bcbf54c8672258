"""The operations that are counted over a network's layers, against formulas."""

import networks
import pytest
from keras import layers
from marks import slow
from test_models import CIFAR10, IMAGENET, MNIST, build_model

from towers.models.layers.core import GroupedConv2D
from towers.models.summary import flops_per_image


@pytest.mark.parametrize(
    "stack,expected",
    [
        ([layers.Conv2D(6, (3, 2), name="c")], 2 * (7 * 7) * (3 * 2) * 4 * 6),
        ([layers.Conv2D(6, 3, padding="same", name="c")], 2 * (9 * 8) * 9 * 4 * 6),
        ([layers.Conv2D(6, 3, strides=2, name="c")], 2 * (4 * 3) * 9 * 4 * 6),
        ([layers.Conv2D(6, 1, groups=2, name="c")], 2 * (9 * 8) * 2 * 6),
        ([GroupedConv2D(4, 3, groups=4, name="c")], 2 * (7 * 6) * 9 * 4),
        ([layers.DepthwiseConv2D(3, depth_multiplier=2, name="c")], 2 * 42 * 9 * 8),
        ([layers.SeparableConv2D(6, 3, name="c")], 2 * 42 * (9 * 4 + 4 * 6)),
        ([layers.Flatten(name="f"), layers.Dense(5, name="d")], 2 * 9 * 8 * 4 * 5),
        ([layers.Dense(5, name="d")], 2 * (9 * 8) * 4 * 5),  # at every pixel
        ([layers.ReLU(name="r"), layers.BatchNormalization(name="n")], 0),
    ],
)
def test_a_layer_multiplies_and_adds_once_per_weight_and_position(stack, expected):
    assert flops_per_image(networks.model_of(*stack, shape=(9, 8, 4))) == expected


def test_a_layer_that_cannot_be_counted_is_refused_by_name():
    model = networks.model_of(layers.PReLU(name="odd"))
    with pytest.raises(ValueError, match=r"odd \(PReLU\)"):
        flops_per_image(model)


def cnn():
    convs = 24 * 24 * 25 * 3 * 64 + 12 * 12 * 25 * 64 * 64
    return convs + 6 * 6 * 64 * 384 + 384 * 192 + 192 * 10


def lenet():
    return 26 * 26 * 9 * 20 + 9 * 9 * 25 * 20 * 50 + 800 * 128 + 128 * 10


def alexnet(columns):
    convs = 55**2 * 11**2 * 3 * 96 + 27**2 * 25 * 96 // columns * 256
    convs += 13**2 * 9 * (256 * 384 + (384 * 384 + 384 * 256) // columns)
    return convs + 9216 * 4096 + 4096 * 4096 + 4096 * 1000


def resnet18():
    stem, first = 32**2 * 9 * 3 * 64, 4 * 32**2 * 9 * 64**2
    # A stage halves the side and doubles the channels: n^2 c^2 stays; its first
    # convolution has half of the inputs, and so has the shortcut.
    stage = 32**2 * 64**2 * (9 // 1 * 3 + 9 / 2 + 1 / 2)
    return int(stem + first + 3 * stage + 512 * 10)


def resnet50():
    products = 112**2 * 49 * 3 * 64 + 2048 * 1000
    inputs, side = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        before = side * (2 if stage else 1)
        # The first 1x1 convolution, with the stride in the 3x3, has all pixels.
        products += before**2 * inputs * inner + side**2 * inputs * 4 * inner
        products += side**2 * (9 + 4) * inner**2
        products += (blocks - 1) * side**2 * (4 + 9 + 4) * inner**2
        inputs, side = 4 * inner, side // 2
    return products


def cifar_resnet(depth):
    per_stage = (depth - 2) // 3
    stem, first = 32**2 * 9 * 3 * 16, per_stage * 32**2 * 9 * 16**2
    return int(stem + first + 2 * (per_stage - 0.5) * 32**2 * 9 * 16**2 + 64 * 10)


def wide_resnet():
    side, own = 32**2 * 160, 160
    stem = 32**2 * 9 * 3 * 16
    first = side * (9 * 16 + 16 + 7 * 9 * own)
    others = side * (9 * own / 2 + own / 2 + 7 * 9 * own)
    return int(stem + first + 2 * others + 640 * 10)


def vgg16():
    # (side, filters of the convolutions before, of this one)
    convs = [(32, 3, 64), (32, 64, 64), (16, 64, 128), (16, 128, 128), (8, 128, 256)]
    convs += 2 * [(8, 256, 256)] + [(4, 256, 512)] + 2 * [(4, 512, 512)]
    convs += 3 * [(2, 512, 512)]
    return sum(side**2 * 9 * a * b for side, a, b in convs) + 512 * 10


def densenet():
    channels, products = 24, 32**2 * 9 * 3 * 24
    for side in (32, 16, 8):
        for _ in range(16):
            products += side**2 * (channels * 48 + 9 * 48 * 12)
            channels += 12
        if side > 8:
            products += side**2 * channels * channels // 2
            channels //= 2
    return products + channels * 10


def convmixer():
    return 16**2 * 256 * (2 * 2 * 3 + 8 * (25 + 256)) + 256 * 10


def speedrun():
    convs = 31**2 * (4 * 3 * 24 + 9 * 24 * 64) + 15**2 * 9 * (64 * 64 + 64 * 256)
    return convs + 7**2 * 9 * 2 * 256**2 + 3**2 * 9 * 256**2 + 256 * 10


def speedrun_deep():
    convs = 31**2 * (4 * 3 * 24 + 9 * 24 * 128)
    convs += 15**2 * 9 * (2 * 128 * 128 + 128 * 384)
    convs += 7**2 * 9 * (2 * 384 * 384 + 384 * 512)
    return convs + 3**2 * 9 * 2 * 512**2 + 512 * 10


def vit(channels, patches, patch, class_tokens=0):
    tokens = patches + class_tokens
    dense = 12 * channels**2  # queries, keys, values, out, and 4 + 4 of the perceptron
    block = tokens * dense + 2 * tokens**2 * channels
    return patches * 3 * patch**2 * channels + 12 * block


@pytest.mark.parametrize(
    "name,shape,products",
    [
        ("cnn", ((24, 24, 3), 10), cnn()),
        ("lenet", MNIST, lenet()),
        ("alexnet", IMAGENET, alexnet(1)),
        ("alexnet_two_columns", IMAGENET, alexnet(2)),
        ("resnet18", CIFAR10, resnet18()),
        ("resnet50", IMAGENET, resnet50()),
        ("resnet20", CIFAR10, cifar_resnet(20)),
        slow("resnet110", CIFAR10, cifar_resnet(110)),
        ("wide_resnet_28_10", CIFAR10, wide_resnet()),
        ("vgg16_bn", CIFAR10, vgg16()),
        ("densenet_bc_100_12", CIFAR10, densenet()),
        ("convmixer_256_8", CIFAR10, convmixer()),
        ("vit_tiny", CIFAR10, vit(192, patches=8**2, patch=4) + 192 * 10),
        slow("vit_small", IMAGENET, vit(384, patches=14**2, patch=16) + 384 * 1000),
        slow("vit_base", IMAGENET, vit(768, patches=14**2, patch=16) + 768 * 1000),
        ("deit_tiny", CIFAR10, vit(192, 8**2, patch=4, class_tokens=1) + 192 * 10),
        ("speedrun", CIFAR10, speedrun()),
        ("speedrun_deep", CIFAR10, speedrun_deep()),
    ],
)
def test_operations_of_the_networks_are_those_of_their_formulas(name, shape, products):
    assert flops_per_image(build_model(name, *shape)) == 2 * products
