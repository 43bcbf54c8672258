"""Activation functions against their formulas and Keras."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.models.activations import Gelu, gelu


def of_formula(x):
    """x times the normal distribution function, and the derivative."""
    cdf = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))(x)
    return x * cdf, cdf + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(
    "dtype,tolerance",
    [("float64", 1e-14), ("float32", 2e-6), ("bfloat16", 0.01), ("float16", 2e-3)],
)
def test_gelu_and_its_gradient_equal_the_formula(dtype, tolerance):
    x = np.concatenate([np.linspace(-8, 8, 1001), [0.0, 1e-30, -10.0, 10.0]])
    upstream = np.random.default_rng(0).normal(size=x.shape)
    inputs, scales = tf.cast(x, dtype), tf.cast(upstream, dtype)

    @tf.function
    def value_and_gradient():
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            value = gelu(inputs)
        return value, tape.gradient(value, inputs, scales)

    value, gradient = value_and_gradient()
    assert value.dtype == gradient.dtype == dtype
    # What a narrow type makes of the inputs is not the function's.
    value_wanted, slope = of_formula(tf.cast(inputs, tf.float64).numpy())
    gradient_wanted = tf.cast(scales, tf.float64).numpy() * slope
    bounds = {"rtol": tolerance, "atol": tolerance}
    value, gradient = (tf.cast(t, tf.float64) for t in (value, gradient))
    np.testing.assert_allclose(value, value_wanted, **bounds)
    np.testing.assert_allclose(gradient, gradient_wanted, **bounds)


def test_the_layer_is_that_of_keras():
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    theirs = keras.layers.Activation("gelu")
    np.testing.assert_allclose(Gelu()(x), theirs(x), rtol=1e-5, atol=1e-6)
    symbolic = Gelu(name="gelu1")(keras.Input((3, 4, 5)))
    assert symbolic.shape == (None, 3, 4, 5)


@pytest.mark.parametrize("device", ["/CPU:0", "/CPU:1"])
def test_gelu_runs_where_it_is_put(device):
    with tf.device(device):
        value = gelu(tf.ones([4]))
    assert value.device.endswith(device.replace("/CPU", "CPU"))
