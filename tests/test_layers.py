"""Layers against TensorFlow's own operations, finite differences and formulas."""

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf

from towers.models.layers import (
    Dropout,
    LocalResponseNormalization,
    local_response_normalization,
)

# depth_radius, bias, alpha, beta
CONSTANTS = [
    (4, 1.0, 0.001 / 9, 0.75),  # the tutorial's
    (2, 2.0, 1e-2, 0.75),  # Krizhevsky et al., with a larger alpha
    (5, 1.0, 1.0, 0.5),  # TensorFlow's defaults
    (1, 1.5, 0.3, 1.0),
    (0, 1.0, 0.3, 0.6),
    (100, 1.0, 0.1, 0.75),  # the band reaches over all channels
]
# Far enough from 0 that the order of the summands does not matter in 1e-5.
SHAPE = (2, 3, 4, 12)


def random_images(dtype=np.float32, shape=SHAPE, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(scale=2.0, size=shape).astype(dtype)


def value_and_gradient(function, x, upstream):
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = function(x)
        loss = tf.reduce_sum(value * upstream)
    return value.numpy(), tape.gradient(loss, x).numpy()


@pytest.mark.parametrize("constants", CONSTANTS)
def test_normalisation_and_its_gradient_equal_those_of_tensorflow(constants):
    x, upstream = random_images(), random_images(seed=1)
    found = value_and_gradient(
        lambda x: local_response_normalization(x, *constants), x, upstream
    )
    expected = value_and_gradient(
        lambda x: tf.nn.local_response_normalization(x, *constants), x, upstream
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("constants", CONSTANTS)
def test_normalisation_equals_its_formula_in_float64(constants):
    radius, bias, alpha, beta = constants
    x = random_images(np.float64)
    expected = np.empty_like(x)
    for channel in range(SHAPE[-1]):
        near = x[..., max(0, channel - radius) : channel + radius + 1]
        denominator = (bias + alpha * np.square(near).sum(axis=-1)) ** beta
        expected[..., channel] = x[..., channel] / denominator
    found = local_response_normalization(tf.constant(x), *constants)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("constants", CONSTANTS)
def test_its_gradient_equals_finite_differences_in_float64(constants):
    x = random_images(np.float64, (1, 1, 2, 7))
    upstream = random_images(np.float64, x.shape, seed=1)

    def loss(values):
        normalized = local_response_normalization(tf.constant(values), *constants)
        return float(tf.reduce_sum(normalized * upstream))

    expected = np.empty_like(x)
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-6
        expected[place] = (loss(x + step) - loss(x - step)) / 2e-6
    _, found = value_and_gradient(
        lambda x: local_response_normalization(x, *constants), x, upstream
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_normalisation_takes_any_number_of_axes_and_of_images():
    constants = CONSTANTS[0]

    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 12])])
    def normalize(x):
        return local_response_normalization(x, *constants)

    x = random_images()
    expected = local_response_normalization(tf.constant(x), *constants)
    np.testing.assert_allclose(normalize(x), expected, rtol=1e-6)
    flat = local_response_normalization(tf.constant(x.reshape(-1, 12)), *constants)
    np.testing.assert_allclose(flat, tf.reshape(expected, [-1, 12]), rtol=1e-6)


def test_half_width_images_stay_half_width():
    x = tf.cast(random_images(), tf.bfloat16)
    found = local_response_normalization(x, *CONSTANTS[0])
    assert found.dtype == tf.bfloat16
    expected = local_response_normalization(tf.cast(x, tf.float32), *CONSTANTS[0])
    np.testing.assert_allclose(tf.cast(found, tf.float32), expected, rtol=2e-2)


@pytest.mark.parametrize(
    "layer",
    [
        LocalResponseNormalization(3, 1.5, 0.1, 0.6, name="norm1"),
        Dropout(0.3, name="dropout1"),
    ],
)
def test_a_layer_can_be_built_again_from_its_config(layer):
    again = type(layer).from_config(layer.get_config())
    assert again.name == layer.name
    x, noise = random_images(), np.random.default_rng(1).random(SHAPE, np.float32)
    inputs = [x, noise] if isinstance(layer, Dropout) else x
    kwargs = {"training": True} if isinstance(layer, Dropout) else {}
    np.testing.assert_array_equal(again(inputs, **kwargs), layer(inputs, **kwargs))
    default = type(layer)(0.5) if isinstance(layer, Dropout) else type(layer)()
    assert np.any(np.not_equal(default(inputs, **kwargs), layer(inputs, **kwargs)))


def test_a_normalisation_layer_is_its_function():
    constants = (3, 1.5, 0.1, 0.6)
    layer = LocalResponseNormalization(*constants)
    x = random_images()
    np.testing.assert_array_equal(
        layer(x), local_response_normalization(tf.constant(x), *constants)
    )
    assert layer.compute_output_shape(SHAPE) == SHAPE
    assert layer.weights == []


# Dropout.


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 0.9])
def test_dropout_keeps_what_its_noise_says_and_scales_it(rate):
    x, rng = random_images(np.float64), np.random.default_rng(1)
    noise = rng.random(SHAPE, np.float32)
    layer = Dropout(rate, dtype="float64")
    found = layer([tf.constant(x), tf.constant(noise)], training=True)
    expected = np.where(noise >= np.float32(rate), x / (1 - rate), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    share = np.mean(np.equal(found, 0))
    assert share == pytest.approx(rate, abs=0.1)


def test_noise_equal_to_the_rate_keeps():
    noise = tf.constant([[0.0, 0.24999, 0.25, 0.25001, 0.99999]])
    found = Dropout(0.25)([tf.ones([1, 5]), noise], training=True)
    np.testing.assert_allclose(found * 0.75, [[0, 0, 1, 1, 1]])


def test_dropout_passes_everything_outside_of_training():
    x, noise = random_images(), np.zeros(SHAPE, np.float32)
    for kwargs in ({}, {"training": False}):
        np.testing.assert_array_equal(Dropout(0.5)([x, noise], **kwargs), x)


def test_its_gradient_is_masked_and_scaled_alike():
    x, upstream = random_images(), random_images(seed=1)
    noise = np.random.default_rng(2).random(SHAPE, np.float32)
    _, found = value_and_gradient(
        lambda x: Dropout(0.25)([x, tf.constant(noise)], training=True), x, upstream
    )
    np.testing.assert_allclose(found, np.where(noise < 0.25, 0, upstream / 0.75), 1e-6)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_mask_does_not_depend_on_the_precision(policy):
    """Noise that is rounded to eight bits would fall on the other side of the rate."""
    rate = 0.3
    noise = np.linspace(rate - 2e-3, rate + 2e-3, 101, dtype=np.float32)[None]
    dtype = keras.DTypePolicy(policy).compute_dtype
    x = tf.ones(noise.shape, dtype)
    found = Dropout(rate, dtype=policy)([x, tf.constant(noise)], training=True)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.numpy() != 0, noise >= np.float32(rate))


def test_dropout_keeps_no_state():
    model = networks.plain_network().model
    assert model.non_trainable_variables == []
    assert "dropout1" in {layer.name for layer in model.layers}
