"""Networks of `keras.applications`: the same function, trained under every strategy."""

import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from marks import slow

from towers.models.create import create_model, noise_shapes, pixel_moments
from towers.models.keras import applications
from towers.models.variables import keras_settings

SMALL, RESIDUAL = "MobileNetV3Small", "ResNet50"
SIDE, NUM_CLASSES = 64, 7

create = functools.partial(create_model, num_classes=NUM_CLASSES)


def stock_network(name, side=SIDE):
    """The network as Keras builds it."""
    with keras_settings(), tf.device("CPU:0"):
        return getattr(keras.applications, name)(
            weights=None,
            input_shape=(side, side, 3),
            classes=NUM_CLASSES,
            classifier_activation=None,
        )


def whole_layers(model):
    """The layers of a network, in place of a network in it those of that."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from whole_layers(layer)
        else:
            yield layer


def give_random_values(stock, model):
    """Give the same values to both."""
    rng = np.random.default_rng(0)
    by_name = {layer.name: layer for layer in model.layers}
    for layer in whole_layers(stock):
        variables = [v for v in layer.variables if "seed_generator" not in v.path]
        if not variables:
            continue
        own = by_name.pop(layer.name)
        assert [v.shape for v in own.variables] == [v.shape for v in variables]
        for variable, other in zip(variables, own.variables, strict=True):
            values = variable.numpy()
            if variable.name in ("moving_variance", "variance"):
                values = rng.uniform(0.5, 1.5, values.shape)
            elif variable.name in ("moving_mean", "beta", "bias", "mean"):
                values = rng.normal(size=values.shape) / 10
            variable.assign(values)
            other.assign(values)
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()
    assert not any(layer.variables for layer in by_name.values())


@pytest.mark.parametrize(
    "name,mean,std",
    [
        (SMALL, 0, 1),
        slow(RESIDUAL, 123.68, 1),  # and blue first
        slow("ResNet50V2", 127.5, 127.5),
        slow("EfficientNetB0", 0, 1),
        slow("EfficientNetV2B0", 0, 1),
        slow("ConvNeXtTiny", 0, 1),
        slow("DenseNet121", 123.675, 58.395),
    ],
)
def test_a_network_gives_the_logits_of_keras(name, mean, std):
    """From the same pixels: Keras' by its own preprocessing, ours standardized."""
    stock = stock_network(name)
    model = create(f"keras:{name}", image_shape=(SIDE, SIDE, 3))
    give_random_values(stock, model)
    pixels = np.random.default_rng(1).integers(0, 256, (2, SIDE, SIDE, 3))
    pixels = pixels.astype(np.float32)
    module = sys.modules[getattr(keras.applications, name).__module__]
    expected = stock(module.preprocess_input(pixels.copy()), training=False).numpy()
    means, stds = pixel_moments(f"keras:{name}")
    assert means[0] == pytest.approx(mean) and stds[0] == pytest.approx(std)
    images = ((pixels - means) / stds).astype(np.float32)
    noises = [np.zeros((2, *x), np.float32) for x in noise_shapes(model).values()]
    logits = model([images, *noises] if noises else images, training=False)
    scale = np.std(expected)
    assert scale > 1e-3
    np.testing.assert_allclose(logits, expected, atol=1e-5 * scale)


def test_moments_are_of_every_network_that_keras_has():
    """`preprocess_input` of each family, read from its results, is linear."""
    pixels = np.random.default_rng(0).uniform(0, 255, (5, 1, 1, 3))
    functions = {
        name: value
        for name, value in vars(keras.applications).items()
        if callable(value) and name[0].isupper()
    }
    assert len(functions) > 30
    for name, function in functions.items():
        expected = sys.modules[function.__module__].preprocess_input(pixels.copy())
        means, stds = pixel_moments(f"keras:{name}")
        images = (pixels - means) / stds
        if applications._moments(function)[2]:
            images = images[..., ::-1]
        np.testing.assert_allclose(images, expected, atol=1e-4, err_msg=name)
