"""Losses against NumPy in float64 and against Keras' own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.optim.losses import WeightDecay, cross_entropy, pop_weight_decay
from towers.optim.vector import Layout


def example(n=50, classes=7, scale=3.0, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=scale, size=(n, classes))
    return logits, rng.integers(0, classes, n)


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def soft_labels(n=50, classes=7, seed=1):
    """float32 rows that add up to 1, most of them of two classes."""
    rng = np.random.default_rng(seed)
    pairs, shares = rng.integers(0, classes, (2, n)), rng.random((n, 1))
    one_hot = np.eye(classes)
    mixed = shares * one_hot[pairs[0]] + (1 - shares) * one_hot[pairs[1]]
    return mixed.astype(np.float32)


@pytest.mark.parametrize("dtype", [tf.float64, tf.float32, tf.bfloat16, tf.float16])
@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_cross_entropy_and_its_gradient_equal_their_formulas(smoothing, is_soft, dtype):
    """Logits of 16 bits are widened first."""
    values, labels = example()
    logits = tf.cast(tf.constant(values), dtype)
    target = soft_labels().astype(np.float64) if is_soft else np.eye(7)[labels]
    labels = soft_labels() if is_soft else labels
    target = (1 - smoothing) * target + smoothing / 7
    with tf.GradientTape() as tape:
        tape.watch(logits)
        found = cross_entropy(logits, tf.constant(labels), smoothing)
    gradient, exact = tape.gradient(found, logits), tf.cast(logits, tf.float64).numpy()
    assert found.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert gradient.dtype == dtype
    expected = -(target * np.log(softmax(exact))).sum(axis=1)
    rtol, atol = (1e-12, 1e-14) if dtype == tf.float64 else (1e-5, 1e-6)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)
    expected, atol = softmax(exact) - target, {8: 1e-12, 4: 1e-6, 2: 4e-3}[dtype.size]
    np.testing.assert_allclose(tf.cast(gradient, tf.float64), expected, atol=atol)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_give_large_but_finite_losses(smoothing):
    logits = tf.constant([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0]])
    found = cross_entropy(logits, tf.constant([0, 1]), smoothing).numpy()
    # The classes that are not right lie 2e4 and 1e4 below the first one.
    spread = smoothing / 3 * (2e4 + 1e4)
    np.testing.assert_allclose(
        found, [spread, (1 - smoothing) * 2e4 + spread], rtol=1e-5, atol=1e-6
    )


# Weight decay.

MARKED = {"decayed/kernel", "decayed_bias/bias"}


def decayed_network(weight):
    dense, regularizer = keras.layers.Dense, keras.regularizers.L2(weight)
    return keras.Sequential(
        [
            keras.Input((4,)),
            dense(3, kernel_regularizer=regularizer, name="decayed"),
            dense(2, name="free"),
            dense(2, bias_regularizer=regularizer, name="decayed_bias"),
        ]
    )


def with_decay(variables, params, gradients):
    """The penalty, and per parameter the gradient with weight decay."""
    layout = Layout({v.path: v for v in variables})
    vectors = [layout.pack([tf.constant(x) for x in xs]) for xs in (params, gradients)]
    decay, found = WeightDecay(variables, layout)(*vectors)
    return float(decay), list(layout.read([x.numpy() for x in found]).values())


def random_values(variables, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.shape).astype(np.float32) for v in variables]


@pytest.mark.parametrize("weight", [0.25, 0.0])
def test_weight_decay_is_that_of_keras_until_it_is_taken(weight):
    """By default that of the loss; an optimizer may take it."""
    model = decayed_network(weight)
    variables = model.trainable_variables
    params, gradients = (random_values(variables, seed) for seed in (0, 1))
    for variable, value in zip(variables, params, strict=True):
        variable.assign(value)
    decay, found = with_decay(variables, params, gradients)
    np.testing.assert_allclose(decay, sum(model.losses), rtol=1e-6)
    coefficients = pop_weight_decay(variables)
    names = ["/".join(v.path.split("/")[-2:]) for v in variables]
    assert dict(zip(names, coefficients, strict=True)) == {
        name: 2 * weight if name in MARKED else 0.0 for name in names
    }
    for c, p, g, ours in zip(coefficients, params, gradients, found, strict=True):
        np.testing.assert_allclose(ours, g + c * p, rtol=1e-5)
    decay, found = with_decay(variables, params, gradients)
    assert decay == 0 and model.losses == []
    for ours, gradient in zip(found, gradients, strict=True):
        np.testing.assert_array_equal(ours, gradient)


def test_other_penalties_see_their_parameter_alone_and_cannot_be_taken():
    layer = keras.layers.Dense(
        3,
        kernel_regularizer=keras.regularizers.L1(0.1),
        bias_regularizer=keras.regularizers.L2(0.5),
    )
    layer.build((None, 5))
    params, gradients = (random_values(layer.trainable_variables, s) for s in (0, 1))
    decay, found = with_decay(layer.trainable_variables, params, gradients)
    kernel, bias = params
    expected = 0.1 * np.abs(kernel).sum() + 0.5 * np.square(bias).sum()
    assert decay == pytest.approx(expected)
    np.testing.assert_allclose(found[0], gradients[0] + 0.1 * np.sign(kernel), 1e-5)
    np.testing.assert_allclose(found[1], gradients[1] + bias, rtol=1e-5)
    with pytest.raises(ValueError, match="L1 of .*kernel is no weight decay"):
        pop_weight_decay(layer.trainable_variables)
