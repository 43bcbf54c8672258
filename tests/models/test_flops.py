"""The operations that are counted over a network's layers, against formulas."""

import networks
import pytest
from keras import layers
from test_models import CIFAR10, IMAGENET, MNIST, build_model

from benchmarks.operations import flops_per_image


def test_a_layer_that_cannot_be_counted_is_refused_by_name():
    model = networks.model_of(layers.PReLU(name="odd"))
    with pytest.raises(ValueError, match=r"odd \(PReLU\)"):
        flops_per_image(model)


def cnn():
    convs = 24 * 24 * 25 * 3 * 64 + 12 * 12 * 25 * 64 * 64
    return convs + 6 * 6 * 64 * 384 + 384 * 192 + 192 * 10


def lenet():
    return 26 * 26 * 9 * 20 + 9 * 9 * 25 * 20 * 50 + 800 * 128 + 128 * 10


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


def vit(channels, patches, patch, class_tokens=0):
    tokens = patches + class_tokens
    dense = 12 * channels**2  # queries, keys, values, out, and 4 + 4 of the perceptron
    block = tokens * dense + 2 * tokens**2 * channels
    return patches * 3 * patch**2 * channels + 12 * block


def tiny_vit():
    products = 112**2 * 27 * 32 + 56**2 * 9 * 32 * 64  # the stem
    products += 2 * 56**2 * (64 * 256 + 9 * 256 + 256 * 64) + 320 * 1000
    rows = (28, 64, 128, 2, 7), (14, 128, 160, 6, 14), (7, 160, 320, 2, 7)
    for side, before, own, blocks, window in rows:
        products += 4 * side**2 * before * own + side**2 * (9 * own + own**2)
        dense = (3 + 1 + 4 + 4) * own**2
        products += blocks * side**2 * (dense + 2 * window**2 * own + 9 * own)
    return products


@pytest.mark.parametrize(
    "name,shape,products",
    [
        ("cnn", ((24, 24, 3), 10), cnn()),
        ("lenet", MNIST, lenet()),
        ("resnet50", IMAGENET, resnet50()),
        ("vit_tiny", CIFAR10, vit(192, patches=8**2, patch=4) + 192 * 10),
        ("deit_tiny", CIFAR10, vit(192, 8**2, patch=4, class_tokens=1) + 192 * 10),
        ("tiny_vit_5m", IMAGENET, tiny_vit()),
    ],
)
def test_operations_of_the_networks_are_those_of_their_formulas(name, shape, products):
    assert flops_per_image(build_model(name, *shape)) == 2 * products
