"""Networks of `keras.applications`: the same function, trained under every strategy."""

import functools
import json
import subprocess
import sys

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from processes import environ_of
from recipes import Recipe, assert_close, create_trainer

from towers.errors import ConfigError
from towers.models.create import create_model, noise_shapes, pixel_moments
from towers.models.keras import applications
from towers.models.variables import keras_settings
from towers.parallel import strategies
from towers.parallel.asynchronous import AsynchronousTrainer

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
    """The same to both. Keras numbers automatic names from network to network, and does
    not name the variable of LayerScale: where names differ, kinds follow in order."""
    rng, ours = np.random.default_rng(0), {}
    for layer in model.layers:
        ours.setdefault(type(layer).__name__, []).append(layer)
    by_name = {layer.name: layer for layer in model.layers}
    for layer in whole_layers(stock):
        variables = [v for v in layer.variables if "seed_generator" not in v.path]
        if not variables:
            continue
        own = by_name.pop(layer.name, None)
        assert own is not None, layer.name
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
    "name,mean,deviation",
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
def test_a_network_gives_the_logits_of_keras(name, mean, deviation):
    """From the same pixels: Keras' by its own preprocessing, ours standardized."""
    stock = stock_network(name)
    model = create(f"keras:{name}", image_shape=(SIDE, SIDE, 3))
    give_random_values(stock, model)
    pixels = np.random.default_rng(1).integers(0, 256, (2, SIDE, SIDE, 3))
    pixels = pixels.astype(np.float32)
    module = sys.modules[getattr(keras.applications, name).__module__]
    expected = stock(module.preprocess_input(pixels.copy()), training=False).numpy()
    means, deviations = pixel_moments(f"keras:{name}")
    assert means[0] == pytest.approx(mean) and deviations[0] == pytest.approx(deviation)
    images = ((pixels - means) / deviations).astype(np.float32)
    noises = [np.zeros((2, *x), np.float32) for x in noise_shapes(model).values()]
    logits = model([images, *noises] if noises else images, training=False)
    scale = np.std(expected)
    assert scale > 1e-3
    np.testing.assert_allclose(logits, expected, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "name,shape,words",
    [
        ("ResNet51", (32, 32, 3), "did you mean 'ResNet50'"),
        (RESIDUAL, (32, 32, 1), "3 channels, not 1"),
        (RESIDUAL, (31, 32, 3), "at least 32x32"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(name, shape, words):
    with pytest.raises(ConfigError, match=f"^model=keras:{name}.*{words}"):
        create(f"keras:{name}", image_shape=shape)


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
        means, deviations = pixel_moments(f"keras:{name}")
        images = (pixels - means) / deviations
        if applications._moments(function)[2]:
            images = images[..., ::-1]
        np.testing.assert_allclose(images, expected, atol=1e-4, err_msg=name)


# Training. In float64: batch normalization of few images multiplies rounding.


def trained(name, cls, num_devices, batch_size, **options):
    network = networks.application(f"keras:{name}")
    batches = networks.application_batches(network, batch_size)
    recipe = Recipe(learning_rate=0.01)
    trainer = create_trainer(cls, network, recipe, batches, num_devices, **options)
    before = trainer.state()
    trainer.train(2)
    after = trainer.state()
    kernels = [x for x in before if x.startswith("params/")]
    moved = [not np.array_equal(before[x], after[x]) for x in kernels]
    assert np.mean(moved) > 0.9
    return after


@pytest.mark.parametrize(
    "name,cls,num_devices,options",
    [
        slow(SMALL, strategies.towers, 2, {"sync_batch_norm": True}),
        slow(SMALL, AsynchronousTrainer, 1, {}),
        slow(RESIDUAL, strategies.replicated, 3, {"sync_batch_norm": True}),
        slow(RESIDUAL, strategies.model_parallel, 2, {"group_size": 2}),
        slow("EfficientNetB0", strategies.replicated, 2, {"sync_batch_norm": True}),
        slow("EfficientNetV2B0", strategies.towers, 2, {"sync_batch_norm": True}),
        slow("ConvNeXtTiny", strategies.replicated, 2, {}),
    ],
)
def test_two_steps_equal_those_of_one_device(name, cls, num_devices, options):
    """In another process, which keeps most of what such networks take until it ends."""
    script = (
        "import json, sys, conftest, test_applications as t; "
        "conftest.pytest_configure(None); "
        "t.compare_with_one_device(*json.loads(sys.argv[1]))"
    )
    case = json.dumps([name, cls.__name__, num_devices, options])
    command = [sys.executable, "-c", script, case]
    done = subprocess.run(command, env=environ_of(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compare_with_one_device(name, cls, num_devices, options):
    """In float64, whose rounding grows through many normalizations of few values: in
    EfficientNetV2B0 to 7e-8."""
    cls = getattr(strategies, cls, AsynchronousTrainer)
    state = trained(name, cls, num_devices, 9, **options)
    assert_close(state, trained(name, strategies.towers, 1, 9), 1e-6)
