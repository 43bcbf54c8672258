"""Heat maps of convolutional networks and Vision Transformers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from marks import slow

from towers.models.create import create_model, without_noise
from towers.models.grad_cam import class_maps, enlarged, overlay
from towers.models.layers.blocks import Builder
from towers.models.zoo import vit

IMAGES = np.random.default_rng(0).standard_normal((3, 16, 12, 3)).astype(np.float32)
CLASSES = np.array([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 1]], bool)


def by_formula(activations, gradients):
    """Selvaraju et al. 2017, equations 1 and 2, in float64, divided by the maximum."""
    activations, gradients = activations.astype(np.float64), np.array(gradients)
    weights = gradients.astype(np.float64).mean((1, 2))
    maps = np.maximum(np.einsum("nhwc,nc->nhw", activations, weights), 0)
    return maps / np.maximum(maps.max((1, 2), keepdims=True), 1e-9)


def test_maps_equal_the_formula_in_numpy():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input(IMAGES.shape[1:])
    x = layers.Conv2D(5, 3, padding="same", strides=2, activation="relu")(x)
    features = keras.Model(inputs, x)
    hidden = layers.Dense(7, activation="tanh", use_bias=False)
    head = layers.Dense(4)
    model = keras.Model(inputs, head(hidden(layers.Flatten()(x))))
    maps = class_maps(model, tf.constant(IMAGES), CLASSES)
    values = features(IMAGES).numpy()
    units = np.tanh(values.reshape(3, -1) @ hidden.kernel.numpy())
    slopes = (1 - units**2) * (CLASSES @ head.kernel.numpy().T)
    gradients = (slopes @ hidden.kernel.numpy().T).reshape(values.shape)
    np.testing.assert_allclose(maps, by_formula(values, gradients), atol=1e-5)
    assert maps.max() == 1
    flat = keras.Model(inputs, layers.Dense(4)(layers.Flatten()(inputs)))
    assert class_maps(flat, tf.constant(IMAGES), CLASSES) is None


OPTIONS = {"name": "vit", "channels": 16, "depth": 2, "heads": 2, "patch_size": 4}


def with_random_head(**options):
    keras.utils.set_random_seed(0)
    model = vit.create_model(Builder(IMAGES.shape[1:], 4), **OPTIONS, **options)
    kernel = model.layers[-1].kernel
    kernel.assign(np.random.default_rng(1).standard_normal(kernel.shape))
    return model


def attention_and_gradients(model, images, classes):
    """A Vision Transformer of two blocks in float64, written out."""
    values = {x.path: tf.cast(x.value, tf.float64) for x in model.variables}
    patches = images.astype(np.float64).reshape(-1, 4, 4, 3, 4, 3)
    x = tf.einsum("nipjqc,pqcd->nijd", patches, values["patches/kernel"])
    x = tf.reshape(x, [len(images), 12, 16]) + values["patches/bias"]
    if "tokens/class_token" in values:
        token = tf.repeat(values["tokens/class_token"][None], len(images), 0)
        x = tf.concat([token, x], 1)
    x += tf.cast(tf.convert_to_tensor(model.get_layer("tokens").table), tf.float64)

    def norm(x, name):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        x = (x - mean) / tf.sqrt(variance + 1e-6)
        return x * values[f"{name}/gamma"] + values[f"{name}/beta"]

    def dense(x, name):
        return x @ values[f"{name}/kernel"] + values[f"{name}/bias"]

    def heads(x):
        return tf.transpose(tf.reshape(x, [len(images), -1, 2, 8]), [0, 2, 1, 3])

    weights = []
    with tf.GradientTape() as tape:
        for block in ("block1", "block2"):
            y = norm(x, f"{block}_norm1")
            q, k, v = (
                heads(dense(y, f"{block}_{z}")) for z in ("query", "key", "value")
            )
            weights.append(tf.nn.softmax(q @ tf.linalg.matrix_transpose(k) / 8**0.5))
            tape.watch(weights[-1])
            y = tf.reshape(tf.transpose(weights[-1] @ v, [0, 2, 1, 3]), x.shape)
            x += dense(y, f"{block}_out")
            y = dense(norm(x, f"{block}_norm2"), f"{block}_hidden")
            x += dense(tf.nn.gelu(y), f"{block}_mlp")
        x = norm(x, "last_norm")
        x = x[:, 0] if x.shape[1] == 13 else tf.reduce_mean(x, 1)
        chosen = tf.reduce_sum(tf.where(classes, dense(x, "logits"), 0))
    return weights, tape.gradient(chosen, weights)


@pytest.mark.parametrize("has_class_token", [True, False])
def test_maps_of_a_vision_transformer_equal_the_formula(has_class_token):
    """Chefer et al. 2021, equations 5 and 6."""
    model = with_random_head(has_class_token=has_class_token)
    found = class_maps(model, tf.constant(IMAGES), CLASSES)
    for image, heat in enumerate(found):
        relevance = np.eye(12 + has_class_token)
        for pair in zip(*attention_and_gradients(model, IMAGES, CLASSES), strict=True):
            attention, gradient = (x[image].numpy() for x in pair)
            step = (attention * gradient).clip(min=0).mean(0)
            relevance += step @ relevance
        expected = relevance[0, 1:] if has_class_token else relevance.sum(0) - 1
        expected = expected.reshape(4, 3) / expected.max()
        np.testing.assert_allclose(heat, expected, atol=1e-4)


@pytest.mark.parametrize("is_rotary", [True, False])
def test_maps_leave_registers_out(is_rotary):
    options = {"num_registers": 2, "initial_scale": 1.0, "is_rotary": is_rotary}
    model = with_random_head(has_class_token=not is_rotary, **options)
    maps = class_maps(model, tf.constant(IMAGES), CLASSES)
    assert maps.shape == (3, 4, 3) and maps.max((1, 2)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", [slow("tiny_vit_5m"), "resnet20"])
def test_networks_with_noise_have_maps_of_their_last_cells(name):
    options = {"image_shape": (32, 64, 3), "num_classes": 4, "width": 0.25}
    model = without_noise(create_model(name, **options, stochastic_depth=0.5))
    images = np.random.default_rng(0).standard_normal((2, 32, 64, 3))
    maps = class_maps(model, tf.constant(images, tf.float32), CLASSES[:2])
    assert maps.shape == {"tiny_vit_5m": (2, 1, 2), "resnet20": (2, 8, 16)}[name]
    assert maps.min() >= 0 and maps.max() <= 1


def test_a_map_covers_its_part_of_an_image():
    heat = np.array([[0, 0.5], [1, 0]], np.float32)
    large = enlarged(heat, (40, 60), (10, 20, 20, 20))
    assert large.shape == (40, 60) and large.dtype == np.float32
    np.testing.assert_allclose(large[25:30, 20:25], 1)  # from the center of a cell on
    assert not large[:10].any() and not large[:, 40:].any()
    picture = overlay(np.full((40, 60, 1), 100, np.uint8), large)
    assert picture.shape == (40, 60, 3)
    assert picture[28, 22].tolist() == [193, 64, 40]
    assert picture[5, 5].tolist() == [100, 100, 100]
