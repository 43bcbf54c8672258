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


def targets(labels, classes, smoothing):
    return (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_cross_entropy_equals_its_formula(smoothing):
    logits, labels = example()
    expected = -(targets(labels, 7, smoothing) * np.log(softmax(logits))).sum(axis=1)
    found = cross_entropy(tf.constant(logits), tf.constant(labels), smoothing)
    assert found.dtype == tf.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    narrow = cross_entropy(tf.constant(logits, tf.float32), labels, smoothing)
    assert narrow.dtype == tf.float32
    np.testing.assert_allclose(narrow, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_that_of_keras(smoothing):
    logits, labels = example()
    logits = logits.astype(np.float32)
    keras_loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=smoothing, reduction=None
    )
    expected = keras_loss(np.eye(7, dtype=np.float32)[labels], logits)
    found = cross_entropy(tf.constant(logits), tf.constant(labels), smoothing)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_its_gradient_is_softmax_less_target(smoothing):
    values, labels = example()
    logits = tf.constant(values)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = tf.reduce_sum(cross_entropy(logits, tf.constant(labels), smoothing))
    expected = softmax(values) - targets(labels, 7, smoothing)
    np.testing.assert_allclose(tape.gradient(loss, logits), expected, atol=1e-12)


def soft_labels(n=50, classes=7, seed=1):
    """float32 rows that add up to 1, most of them of two classes."""
    rng = np.random.default_rng(seed)
    pairs, shares = rng.integers(0, classes, (2, n)), rng.random((n, 1))
    one_hot = np.eye(classes)
    mixed = shares * one_hot[pairs[0]] + (1 - shares) * one_hot[pairs[1]]
    return mixed.astype(np.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_soft_labels_equals_its_formula_and_that_of_keras(smoothing):
    logits, _ = example()
    labels = soft_labels()
    smooth = (1 - smoothing) * labels.astype(np.float64) + smoothing / 7
    expected = -(smooth * np.log(softmax(logits))).sum(axis=1)
    found = cross_entropy(tf.constant(logits), tf.constant(labels), smoothing)
    assert found.dtype == tf.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for dtype in (tf.float32, tf.bfloat16):
        narrow = tf.cast(tf.constant(logits), dtype)
        found = cross_entropy(narrow, tf.constant(labels), smoothing)
        keras_loss = keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=smoothing, reduction=None
        )
        expected = keras_loss(labels, tf.cast(narrow, tf.float32))
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_that_are_hard_are_the_labels(smoothing):
    logits, labels = example()
    one_hot = tf.one_hot(labels, 7, dtype=tf.float32)
    gradients = []
    for target in (tf.constant(labels), one_hot):
        x = tf.constant(logits)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = cross_entropy(x, target, smoothing)
        gradients.append((loss, tape.gradient(loss, x)))
    for hard, soft in zip(*gradients, strict=True):
        np.testing.assert_allclose(soft, hard, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_width_logits_are_widened_first(dtype, smoothing):
    logits, labels = example()
    rounded = tf.cast(tf.constant(logits), dtype)
    found = cross_entropy(rounded, tf.constant(labels), smoothing)
    assert found.dtype == tf.float32
    exact = np.log(softmax(tf.cast(rounded, tf.float64).numpy()))
    expected = -(targets(labels, 7, smoothing) * exact).sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


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


def decayed_network(weight=0.5):
    dense = keras.layers.Dense
    regularizer = keras.regularizers.L2(weight)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            dense(3, kernel_regularizer=regularizer, name="decayed"),
            dense(2, name="free"),
            dense(2, bias_regularizer=regularizer, name="decayed_bias"),
        ]
    )
    return model


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
def test_weight_decay_is_added_to_the_gradients_of_the_mean_loss(weight):
    variables = decayed_network(weight).trainable_variables
    params, gradients = (random_values(variables, seed) for seed in (0, 1))
    decay, found = with_decay(variables, params, gradients)
    coefficients = pop_weight_decay(variables)
    assert sum(coefficients) == 4 * weight
    expected = sum(
        c / 2 * np.square(p, dtype=np.float64).sum()
        for c, p in zip(coefficients, params, strict=True)
    )
    assert decay == pytest.approx(expected)
    for c, p, g, ours in zip(coefficients, params, gradients, found, strict=True):
        np.testing.assert_allclose(ours, g + c * p, rtol=1e-5)


def test_other_penalties_see_their_parameter_alone():
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


def test_weight_decay_of_the_models_own_values_equals_the_losses_of_keras():
    model = decayed_network(weight=0.25)
    values = [v.numpy() for v in model.trainable_variables]
    decay, _ = with_decay(model.trainable_variables, values, values)
    np.testing.assert_allclose(decay, sum(model.losses), rtol=1e-6)


def test_weight_decay_that_is_taken_is_no_longer_in_the_loss():
    model = decayed_network(weight=0.25)
    values = [v.numpy() for v in model.trainable_variables]
    coefficients = pop_weight_decay(model.trainable_variables)
    names = ["/".join(v.path.split("/")[-2:]) for v in model.trainable_variables]
    taken = dict(zip(names, coefficients, strict=True))
    assert taken == {name: 0.5 if name in MARKED else 0.0 for name in names}
    decay, found = with_decay(model.trainable_variables, values, values)
    assert decay == 0
    for ours, value in zip(found, values, strict=True):
        np.testing.assert_array_equal(ours, value)
    assert model.losses == []
    assert set(pop_weight_decay(model.trainable_variables)) == {0.0}


def test_a_penalty_that_is_no_weight_decay_cannot_be_taken():
    layer = keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L1(0.1))
    layer.build((None, 3))
    with pytest.raises(ValueError, match="L1 of .*kernel is no weight decay"):
        pop_weight_decay(layer.trainable_variables)
