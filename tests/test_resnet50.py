"""ResNet-50, -101 and -152 against those of Keras, which another group has written."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.models.create import create_model
from towers.models.variables import keras_settings

# With these the images of every stage have odd sides, 65, 33, 17, 9, 5 and 3. Padding
# "same", as in Keras' network, then adds a pixel on every side, as ours does; on even
# sides it would add one on the right and at the bottom alone.
SIDE = 65


def with_the_strides_of_ours(layer):
    """Keras' layer; in a first block the 3x3 convolution has the stride of the 1x1."""
    config = layer.get_config()
    place = re.fullmatch(r"conv[345]_block1_([12])_conv", layer.name)
    if place:
        config["strides"] = {"1": (1, 1), "2": (2, 2)}[place[1]]
    return type(layer).from_config(config)


def name_of_ours(name):
    """The name of our layer for one of Keras' with variables."""
    if name == "predictions":
        return "logits"
    if name.startswith("conv1_"):
        return {"conv1_conv": "stem_conv", "conv1_bn": "stem_norm"}[name]
    match = re.fullmatch(r"conv(\d)_block(\d+)_(\d)_(conv|bn)", name)
    stage, block, place, kind = match.groups()
    kind = {"conv": "conv", "bn": "norm"}[kind]
    place = f"{kind}{place}" if place != "0" else f"shortcut_{kind}"
    return f"stage{int(stage) - 1}_block{block}_{place}"


def carry_over(theirs, ours):
    """Random values into Keras' network, and the same function into ours.

    Its convolutions have biases, which the normalization after them subtracts again:
    the moving mean of ours is less by them.
    """
    rng, names = np.random.default_rng(0), set()
    bias = None
    for layer in sorted(theirs.layers, key=lambda x: x.name.replace("bn", "norm")):
        if not layer.weights:
            continue
        name = name_of_ours(layer.name)
        names.add(name)
        if isinstance(layer, keras.layers.BatchNormalization):
            shape = layer.gamma.shape
            layer.gamma.assign(rng.uniform(0.5, 1.0, shape))
            layer.beta.assign(rng.normal(size=shape) / 4)
            layer.moving_mean.assign(rng.normal(size=shape))
            layer.moving_variance.assign(rng.uniform(1.0, 2.0, shape))
            own = ours.get_layer(name)
            values = layer.get_weights()
            values[2] = values[2] - bias
            own.set_weights(values)
            continue
        bias = rng.normal(size=layer.bias.shape)
        layer.bias.assign(bias)
        if name == "logits":
            ours.get_layer(name).set_weights(layer.get_weights())
        else:
            ours.get_layer(name).set_weights(layer.get_weights()[:1])
    assert names == {x.name for x in ours.layers if x.weights}


@pytest.mark.slow
@pytest.mark.parametrize("depth,biases", [(50, 26_560), (101, 52_672), (152, 75_712)])
def test_logits_equal_those_of_keras_with_the_strides_moved(depth, biases):
    with keras_settings(), tf.device("CPU:0"):
        stock = getattr(keras.applications, f"ResNet{depth}")(
            weights=None, input_shape=(SIDE, SIDE, 3), classifier_activation=None
        )
        theirs = keras.models.clone_model(
            stock, clone_function=with_the_strides_of_ours
        )
    shape = (SIDE, SIDE, 3)
    ours = create_model(f"resnet{depth}", image_shape=shape, num_classes=1000)
    carry_over(theirs, ours)
    images = np.random.default_rng(1).normal(size=(2, SIDE, SIDE, 3))
    expected = theirs(images.astype(np.float32), training=False).numpy()
    logits = ours(images.astype(np.float32), training=False).numpy()
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.std(expected))
    # Theirs has a bias more for each filter.
    assert stock.count_params() - ours.count_params() == biases


def test_blocks_begin_as_their_shortcuts():
    model = create_model("resnet50", image_shape=(32, 32, 3), num_classes=3, width=0.1)
    lasts = {x.name for x in model.layers if re.search("block._norm3$", x.name)}
    zeros = {
        x.name
        for x in model.layers
        if isinstance(x, keras.layers.BatchNormalization) and not np.any(x.gamma)
    }
    assert len(lasts) == 16 and zeros == lasts
