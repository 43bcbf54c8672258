"""Layers against Keras' and formulas; convolutions are in test_convolution."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from marks import slow

from towers.models.layers.attention import Tokens
from towers.models.layers.core import (
    Conv2D,
    Dense,
    DepthwiseConv2D,
    Dropout,
    FusedActivation,
    Gelu,
    GroupedConv2D,
    PadChannels,
    SameConv2D,
    StandardizedConv2D,
    StandardizedSameConv2D,
)
from towers.models.layers.normalization import (
    BatchNormalization,
    FusedLayerNormalization,
    LocalResponseNormalization,
    ramping,
)
from towers.optim.update import ramp

# Far enough from 0 that the order of the summands does not matter in 1e-5.
SHAPE = (2, 3, 4, 12)


def random_images(dtype=np.float32, shape=SHAPE, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(scale=2.0, size=shape).astype(dtype)


ON_GPU = {"device_kind": "GPU"}
LAYERS = [
    Dense(4, activation="relu", **ON_GPU),
    Conv2D(4, 1, strides=2, **ON_GPU),
    DepthwiseConv2D(3, **ON_GPU),
    FusedActivation("gelu", **ON_GPU),
    FusedLayerNormalization(**ON_GPU),
    BatchNormalization(is_frozen=True, **ON_GPU),
    Gelu(**ON_GPU),
    LocalResponseNormalization(3, 1.5, 0.1, 0.6, 2),
    PadChannels(2, 3),
    SameConv2D(6, before_pool=True),
    GroupedConv2D(12, (3, 2), groups=3, padding="same", dilation_rate=2),
    Tokens(has_class_token=True),
    Tokens(first=4, channels=20),
    Tokens(positions="learned"),
    StandardizedConv2D(4, 1, strides=2),
    StandardizedSameConv2D(6),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_a_layer_can_be_built_again_from_its_config(layer):
    again, x = type(layer).from_config(layer.get_config()), random_images()
    again.build(x.shape)
    expected = layer(x)
    again.set_weights(layer.get_weights())
    assert again.get_config() == layer.get_config()
    np.testing.assert_array_equal(again(x), expected)


@pytest.mark.parametrize("policy", ["float64", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_dropout_keeps_what_its_noise_says_and_scales_it(rate, policy):
    """Noise that is rounded to eight bits would fall on the other side of the rate."""
    near = np.linspace(rate - 2e-3, rate + 2e-3, 101, dtype=np.float32)
    noise = np.concatenate([near, np.random.default_rng(1).random(99, np.float32)])
    layer, x = Dropout(rate, dtype=policy), random_images(shape=[200])
    x = tf.cast(x, layer.compute_dtype)
    actual = layer([x, tf.constant(noise)], training=True)
    assert actual.dtype == layer.compute_dtype
    expected = np.where(noise >= np.float32(rate), _wide(x) / (1 - rate), 0)
    np.testing.assert_allclose(_wide(actual), expected, rtol=0.02)
    np.testing.assert_array_equal(layer([x, noise]), x)


def _wide(x):
    return tf.cast(x, tf.float64).numpy()


# Batch normalization.

EPSILON = 1.001e-5


def trained(layer, x, upstream, params, state):
    """Outputs, gradients by inputs and parameters, and the new state; in a graph of
    images whose number is not known, and the operations of that graph."""
    layer.build(x.shape)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *x.shape[1:]], layer.compute_dtype),
            tf.TensorSpec([None, *x.shape[1:]], layer.compute_dtype),
        ],
        autograph=False,
    )
    def run(x, upstream):
        sources = [x, *(tf.constant(p) for p in params)]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(sources)
            y, new_state = layer.stateless_call(sources[1:], state, x, training=True)
            loss = tf.reduce_sum(y * upstream)
        return y, tape.gradient(loss, sources), new_state

    names = {op.type for op in run.get_concrete_function().graph.get_operations()}
    actual = run(*(tf.cast(v, layer.compute_dtype) for v in (x, upstream)))
    return tf.nest.map_structure(
        lambda v: tf.cast(v, tf.float64).numpy(), actual
    ), names


@pytest.mark.parametrize("policy,rtol", [("float32", 1e-5), ("mixed_bfloat16", 0.02)])
@pytest.mark.parametrize("options", [{}, {"scale": False, "center": False}])
def test_evaluations_of_gpus_normalize_as_keras_does(policy, rtol, options):
    params, state = params_and_state()
    params, x = params[: 0 if options else 2], random_images()
    outputs = []
    for kind in (BatchNormalization, keras.layers.BatchNormalization):
        layer = kind(epsilon=EPSILON, dtype=policy, **options)
        layer.build(x.shape)
        layer.device_kind = "GPU"
        y, new = layer.stateless_call(params, state, x, training=False)
        np.testing.assert_array_equal(new, state)
        outputs.append(tf.cast(y, tf.float32))
    np.testing.assert_allclose(*outputs, rtol=rtol, atol=rtol)


def params_and_state(dtype=np.float32, channels=SHAPE[-1]):
    rng = np.random.default_rng(3)
    gamma, beta, mean = rng.normal(size=(3, channels)).astype(dtype)
    return [gamma, beta], [mean, rng.random(channels).astype(dtype) + 1]


@pytest.mark.parametrize(
    "policy,options",
    [
        ("float32", {}),
        ("float32", {"scale": False, "momentum": 0.5}),
        ("float32", {"center": False, "epsilon": 0.1}),
        ("mixed_bfloat16", {}),
        ("mixed_float16", {}),
    ],
)
def test_fused_batch_normalization_equals_that_of_keras(policy, options):
    x, upstream = random_images() + 3, random_images(seed=1)
    options = {"epsilon": EPSILON, "dtype": policy} | options
    params, state = params_and_state()
    params = [
        value
        for value, name in zip(params, ("scale", "center"), strict=True)
        if options.get(name, True)
    ]
    actual, operations = trained(
        BatchNormalization(**options), x, upstream, params, state
    )
    expected, theirs = trained(
        keras.layers.BatchNormalization(**options), x, upstream, params, state
    )
    assert "FusedBatchNormV3" in operations and "FusedBatchNormV3" not in theirs
    # Images may be rounded to the neighboring number; all else is float32.
    rounding = {"float32": 1e-5, "mixed_float16": 1e-3, "mixed_bfloat16": 8e-3}[policy]
    for place, (ours, keras_own) in enumerate(
        zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True)
    ):
        rtol = rounding if place < 2 else 1e-5
        np.testing.assert_allclose(ours, keras_own, atol=1e-5, rtol=rtol)


@pytest.mark.parametrize("shape", [(8, 4, 4, 3), slow((24, 3))])
def test_a_ramped_momentum_forgets_the_initial_moments(shape):
    num_steps, momentum = 200, 0.95
    images = tf.constant(random_images(shape=shape) + 3)
    axes = tuple(range(len(shape) - 1))
    means, variance = images.numpy().mean(axes), images.numpy().var(axes)

    def train(momentum):
        layer = BatchNormalization(momentum=momentum)
        layer.build(shape)

        @tf.function(autograph=False)
        def step(number, *state):
            x = images + tf.sin(tf.cast(number, tf.float32))
            with ramping(ramp(number)):
                _, state = layer.stateless_call(
                    layer.trainable_variables, state, x, training=True
                )
            return state

        state, states = [tf.zeros(3), tf.ones(3)], []
        for number in tf.range(num_steps, dtype=tf.int64):
            state = step(number, *state)
            states.append(np.stack(state))
        return np.array(states)

    ours = train(momentum)
    expected = np.stack([np.zeros(3), np.ones(3)])
    for n in range(num_steps):
        m = min(momentum, (1 + n) / (10 + n))
        moments = np.stack([means + np.sin(n), variance])
        expected = m * expected + (1 - m) * moments
        np.testing.assert_allclose(ours[n], expected, rtol=2e-5)
    np.testing.assert_array_equal(train(1.0)[-1, 1], np.ones(3))
