"""Convolutions that leave things out, against the oracle and Keras."""

import functools
import itertools

import networks
import numpy as np
import pytest
import tensorflow as tf
from convolved import expected, random
from engines import oracle_layers

from towers.models.layers.core import (
    Conv2D,
    Dense,
    DepthwiseConv2D,
    GroupedConv2D,
    SameConv2D,
)
from towers.models.layers.device import set_device_kind
from towers.models.zoo.speedrun import Whitening

SIZES = [(7, 5), (5, 6), (6, 7), (6, 4), (3, 3), (2, 2), (2, 3)]


def assert_equal_to_the_oracle(layer, x, done):
    """Outputs and gradients; `done` computes the expected ones from the values."""
    layer.build(x.shape)
    values = [x, *(v.numpy() for v in layer.weights)]
    output, upstream, gradients = done(*values)
    sources = [tf.constant(value) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y, _ = layer.stateless_call(sources[1:], [], sources[0])
    np.testing.assert_allclose(y, output, atol=1e-12)
    assert layer.compute_output_shape(x.shape) == y.shape
    ours = tape.gradient(y, sources, tf.constant(upstream))
    for gradient, theirs in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(gradient, theirs, atol=1e-11)


def test_same_convolution_and_its_gradients_equal_the_oracle():
    """Before a pool of 2x2, rows and columns that it drops may be left out."""
    edges = [((1, 2), False), ((1, 1), False)]
    for sizes, before_pool in [*itertools.product(SIZES, [False, True]), *edges]:
        kept = [size - size % 2 * before_pool for size in sizes]
        layer = SameConv2D(
            4, before_pool=before_pool, bias_initializer="ones", dtype="float64"
        )
        assert_equal_to_the_oracle(
            layer, random((2, *sizes, 3)), functools.partial(expected, kept=kept)
        )


def operations_of(
    shape, filters, dtype, device_kind, *, size=3, before_pool=False, images=16
):
    """The types of operations in the graph of a layer and its gradient."""
    layer = SameConv2D(filters, size, before_pool, device_kind=device_kind, dtype=dtype)
    x = tf.constant(random((images, *shape)), layer.compute_dtype)
    layer.build(x.shape)

    @tf.function(autograph=False)
    def differentiated(x):
        with tf.GradientTape() as tape:
            y = layer(x)
        return tape.gradient(y, layer.trainable_variables)

    graph = differentiated.get_concrete_function(x).graph
    return {operation.type for operation in graph.get_operations()}


@pytest.mark.parametrize("size,before_pool", [(3, False), (3, True), (5, False)])
def test_many_channels_are_convolved_by_winograd(size, before_pool):
    options, most = {"size": size, "before_pool": before_pool}, 64 if size == 5 else 128
    for case, is_winograd in {
        ((7, 7, 64), most, "float32", "CPU"): True,
        ((7, 7, 64), most, "float64", "CPU"): True,
        ((7, 7, 64), most, "float32", "GPU"): False,
        ((7, 7, 64), most, "mixed_bfloat16", "CPU"): False,
        ((7, 7, 63), most, "float32", "CPU"): False,
        ((7, 7, 64), most - 1, "float32", "CPU"): False,
        ((33, 33, 64), most, "float32", "CPU"): False,
        ((5, 6, 64), most, "float32", "CPU"): False,  # 480 pixels
    }.items():
        assert ("Conv2D" not in operations_of(*case, **options)) == is_winograd, case


# Convolutions of 1x1 with strides.


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    "sizes,strides", [((6, 8), 2), ((5, 7), 2), ((9, 7), 3), ((1, 2), 2)]
)
def test_a_pointwise_convolution_with_strides_equals_the_oracle(
    sizes, strides, padding
):
    options = {"strides": strides, "padding": padding, "dtype": "float64"}
    layer = Conv2D(5, 1, bias_initializer="ones", **options)

    def done(*values):
        done = oracle_layers.conv(*values, stride=strides, padding=padding)
        upstream = random(done.output.shape, 2)
        (of_x,), of_params = done.pullback(upstream)
        return done.output, upstream, [of_x, *of_params.values()]

    assert_equal_to_the_oracle(layer, random((3, *sizes, 4)), done)


def test_on_a_cpu_the_strides_come_before_the_convolution():
    model = networks.model_of(Conv2D(24, 1, strides=2, name="conv"), shape=(8, 8, 16))
    x, results, strides = tf.constant(random((4, 8, 8, 16)), tf.float32), [], []
    for kind in ("GPU", "CPU"):
        set_device_kind(model, kind)

        @tf.function(autograph=False)
        def differentiated(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x)
            return [y, *tape.gradient(y, [x, *model.trainable_variables])]

        graph = differentiated.get_concrete_function(x).graph
        [op] = [op for op in graph.get_operations() if op.type == "Conv2D"]
        strides.append(op.get_attr("strides"))
        results.append(differentiated(x))
    assert strides == [[1, 2, 2, 1], [1, 1, 1, 1]]
    for theirs, ours in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


# Depthwise convolutions.


@pytest.mark.parametrize("precision,bound", [("float32", 1e-5), ("bfloat16", 2**-7)])
@pytest.mark.parametrize("size,strides", [(3, 1), (3, 2), (5, 2), (7, 1)])
def test_on_a_cpu_depthwise_gradients_equal_those_of_tensorflow(
    size, strides, precision, bound
):
    options = {"depth_multiplier": 2, "padding": "same", "strides": strides}
    layer = DepthwiseConv2D(size, device_kind="GPU", **options)
    model = networks.model_of(layer, shape=(9, 8, 3))
    x = tf.constant(random((4, 9, 8, 3)), tf.float32)
    upstream = tf.constant(random(model(x).shape, 1), tf.float32)

    def gradients(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            outputs, _ = layer.stateless_call([kernel, layer.bias.value], [], x)
        return tape.gradient(outputs, [x, kernel], tf.cast(upstream, outputs.dtype))

    theirs = gradients(x, layer.kernel.value)
    layer.dtype_policy = "float32" if precision == "float32" else "mixed_bfloat16"
    set_device_kind(model, "CPU")
    ours = gradients(x, layer.kernel.value)
    for actual, wanted in zip(ours, theirs, strict=True):
        error = np.max(np.abs(tf.cast(actual, tf.float32) - wanted))
        assert error < bound * np.max(np.abs(wanted))


# Biases.


@pytest.mark.parametrize(
    "layer",
    [
        SameConv2D(4, name="same"),
        GroupedConv2D(4, 3, groups=4, padding="same", name="grouped"),
        Conv2D(4, 1, strides=2, name="pointwise"),
        Conv2D(4, 3, name="stock"),
        Dense(4, name="dense"),
        DepthwiseConv2D(3, name="depthwise"),
        Whitening(2, name="whitening"),
    ],
    ids=lambda layer: layer.name,
)
def test_gradients_of_biases_in_bfloat16_are_sums_in_float32(layer):
    """Summed in bfloat16, numbers of one sign end at 256 times their size."""
    layer = type(layer).from_config(layer.get_config() | {"dtype": "mixed_bfloat16"})
    model = networks.model_of(layer, shape=(32, 32, 4))
    x = tf.constant(random((8, 32, 32, 4)), tf.float32)
    upstream = tf.cast(np.abs(random(model(x).shape, 1)), layer.compute_dtype)
    with tf.GradientTape() as tape:
        y = model(x, training=True)
    gradient = tape.gradient(y, layer.bias, upstream)
    rows = tf.cast(upstream, tf.float64).numpy().reshape(-1, y.shape[-1])
    np.testing.assert_allclose(gradient, rows.sum(0), rtol=0.01)
