"""Grad-CAM of convolutional networks and Vision Transformers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from towers.models.create import create_model, without_noise
from towers.models.grad_cam import enlarged, grad_cam, overlay
from towers.models.zoo import vit

IMAGES = np.random.default_rng(0).standard_normal((3, 16, 12, 3)).astype(np.float32)
CLASSES = np.array([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 1]], bool)


def by_formula(activations, gradients):
    """Selvaraju et al. 2017, equations 1 and 2, in float64, divided by the maximum."""
    activations, gradients = activations.astype(np.float64), np.array(gradients)
    weights = gradients.astype(np.float64).mean((1, 2))
    maps = np.maximum(np.einsum("nhwc,nc->nhw", activations, weights), 0)
    return maps / maps.max((1, 2), keepdims=True)


def test_maps_equal_the_formula_in_numpy():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input(IMAGES.shape[1:])
    x = layers.Conv2D(5, 3, padding="same", strides=2, activation="relu")(x)
    features = keras.Model(inputs, x)
    hidden = layers.Dense(7, activation="tanh", use_bias=False)
    head = layers.Dense(4)
    model = keras.Model(inputs, head(hidden(layers.Flatten()(x))))
    maps = grad_cam(model, tf.constant(IMAGES), CLASSES)
    values = features(IMAGES).numpy()
    units = np.tanh(values.reshape(3, -1) @ hidden.kernel.numpy())
    slopes = (1 - units**2) * (CLASSES @ head.kernel.numpy().T)
    gradients = (slopes @ hidden.kernel.numpy().T).reshape(values.shape)
    np.testing.assert_allclose(maps, by_formula(values, gradients), atol=1e-5)
    flat = keras.Sequential([keras.Input((16, 12, 3)), layers.Flatten(), head])
    assert grad_cam(flat, tf.constant(IMAGES), CLASSES) is None


TRANSFORMERS = {
    "deit": {"has_class_token": True},
    "mean": {},
    "dinov2": {"has_class_token": True, "num_registers": 2, "initial_scale": 1.0},
    "dinov3": {"num_registers": 4, "is_rotary": True, "initial_scale": 1.0},
}


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_maps_of_a_vision_transformer_are_of_its_patches(kind):
    keras.utils.set_random_seed(0)
    model = vit.create_model(
        name=kind,
        **{"channels": 16, "depth": 2, "heads": 2, "width": 1.0, "patch_size": 4},
        **{"image_shape": IMAGES.shape[1:], "num_classes": 4, "regularizer": None},
        **TRANSFORMERS[kind],
    )
    kernel = model.layers[-1].kernel
    kernel.assign(np.random.default_rng(1).standard_normal(kernel.shape))
    maps = grad_cam(model, tf.constant(IMAGES), CLASSES)
    tokens = keras.Model(model.inputs, model.get_layer("block2_norm1").output)(IMAGES)
    before = keras.Model(model.inputs, model.get_layer("block1_add2").output)(IMAGES)
    # The gradient of the rest of the network, from the tokens that enter it.
    rest = keras.Model(
        [model.get_layer(f"block{x}").output for x in ("2_norm1", "1_add2")],
        model.outputs[0],
    )
    with tf.GradientTape() as tape:
        tape.watch(tokens)
        chosen = tf.reduce_sum(rest([tokens, before]) * CLASSES)
    gradients = tape.gradient(chosen, tokens)
    cells = (x.numpy()[:, -12:].reshape(3, 4, 3, -1) for x in (tokens, gradients))
    np.testing.assert_allclose(maps, by_formula(*cells), atol=1e-4)
    assert maps.max((1, 2)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["tiny_vit_5m", "resnet20"])
def test_networks_with_noise_have_maps_of_their_last_cells(name):
    options = {"image_shape": (32, 64, 3), "num_classes": 4, "width": 0.25}
    model = without_noise(create_model(name, **options, stochastic_depth=0.5))
    images = np.random.default_rng(0).standard_normal((2, 32, 64, 3))
    maps = grad_cam(model, tf.constant(images, tf.float32), CLASSES[:2])
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
