"""Convolutions against the oracle."""

import functools
import itertools

import networks
import numpy as np
import pytest
import tensorflow as tf
from compared import assert_equal_to_oracle, conv, random
from engines import oracle_layers

from towers.models.layers.core import (
    MIN_CHANNELS,
    MIN_FILTERS,
    Conv2D,
    Dense,
    DepthwiseConv2D,
    GroupedConv2D,
    SameConv2D,
)
from towers.models.layers.cpu_convolutions import (
    conv2d_cpu,
    depthwise_conv2d_cpu,
    winograd_conv2d,
)
from towers.models.zoo.speedrun import Whitening

SIZES = [(7, 5), (5, 6), (6, 7), (6, 4), (3, 3), (2, 2), (2, 3)]


def assert_layer_equals(oracle, layer, x):
    """Compare outputs and gradients of a layer in float64."""
    layer = type(layer).from_config(layer.get_config() | {"dtype": "float64"})
    layer.build(x.shape)
    values = [x, *(random(v.shape, i) for i, v in enumerate(layer.weights, 1))]

    def call(x, *weights):
        y, _ = layer.stateless_call(weights, [], x)
        assert layer.compute_output_shape(x.shape) == y.shape
        return y

    assert_equal_to_oracle(call, oracle, values, 1e-11)


def test_same_convolution_and_its_gradients_equal_the_oracle():
    """Before a pool of 2x2, rows and columns that it drops may be left out."""
    edges = [((1, 2), False), ((1, 1), False)]
    for sizes, before_pool in [*itertools.product(SIZES, [False, True]), *edges]:
        kept = [size - size % 2 if before_pool else size for size in sizes]
        layer = SameConv2D(4, before_pool=before_pool)
        assert_layer_equals(
            functools.partial(conv, kept=kept), layer, random((2, *sizes, 3))
        )


@pytest.mark.parametrize(
    "kind,size,options,sizes",
    [
        (GroupedConv2D, 3, {"filters": 6}, (6, 5)),
        (GroupedConv2D, 3, {"filters": 8, "groups": 2, "strides": 2}, (6, 5)),
        (GroupedConv2D, 1, {"filters": 8, "groups": 2, "strides": 2}, (6, 5)),
        (GroupedConv2D, 3, {"filters": 8, "groups": 4}, (6, 5)),
        (GroupedConv2D, 3, {"filters": 12, "groups": 12}, (6, 5)),
        (GroupedConv2D, 3, {"filters": 12, "groups": 12, "strides": 2}, (6, 5)),
        (GroupedConv2D, 5, {"filters": 12, "groups": 12, "strides": 2}, (6, 5)),
        *[
            (Conv2D, 1, {"filters": 5, "strides": strides}, sizes)
            for sizes, strides in [((6, 8), 2), ((5, 7), 2), ((9, 7), 3), ((1, 2), 2)]
        ],
    ],
)
@pytest.mark.parametrize("padding", ["valid", "same"])
def test_convolutions_and_their_gradients_equal_the_oracle(
    kind, size, options, sizes, padding
):
    layer = kind(kernel_size=size, padding=padding, **options)
    known = {"padding": padding, "groups": options.get("groups", 1)}
    oracle = functools.partial(
        oracle_layers.conv, stride=options.get("strides", 1), **known
    )
    assert_layer_equals(oracle, layer, random((2, *sizes, 12)))


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-5), ("bfloat16", 0.02)])
@pytest.mark.parametrize("size,strides", [(3, 1), (3, 2), (5, 2), (7, 1)])
def test_depthwise_gradients_equal_the_oracle(size, strides, dtype, tolerance):
    def convolve(x, kernel):
        kernel = tf.reshape(kernel, [size, size, 3, 2])
        return depthwise_conv2d_cpu(x, kernel, (strides, strides), "SAME")

    oracle = functools.partial(oracle_layers.conv, stride=strides, groups=3)
    values = random((4, 9, 8, 3)), random((size, size, 1, 6), 1)
    assert_equal_to_oracle(convolve, oracle, values, tolerance, dtype)


def test_on_a_cpu_the_strides_come_before_the_convolution():
    """The gradient of oneDNN overwrites memory otherwise."""
    strides = []
    for kind in ("GPU", "CPU"):
        layer = Conv2D(24, 1, strides=2, device_kind=kind)
        call = tf.function(lambda x, layer=layer: layer(x), autograph=False)
        graph = call.get_concrete_function(tf.TensorSpec([4, 8, 8, 16])).graph
        [op] = [op for op in graph.get_operations() if op.type == "Conv2D"]
        strides.append(op.get_attr("strides"))
    assert strides == [[1, 2, 2, 1], [1, 1, 1, 1]]


# Convolutions for CPUs.


@pytest.mark.parametrize("size,tolerance", [(3, 1e-11), (5, 1e-10)])
def test_winograd_and_its_gradients_equal_the_oracle(size, tolerance):
    for sizes in itertools.product(range(1, 10), (1, 2, 4, 11)):
        values = random((2, *sizes, 3)), random((size, size, 3, 5), 1)
        convolve = functools.partial(winograd_conv2d, height=sizes[0], width=sizes[1])
        oracle = functools.partial(conv, kept=sizes)
        assert_equal_to_oracle(convolve, oracle, values, tolerance)


@pytest.mark.parametrize(
    "length,channels", [*((n, MIN_CHANNELS) for n in (4, 6, 7, 14)), (4, 512)]
)
@pytest.mark.parametrize("size,tolerance", [(3, 1e-5), (5, 5e-5)])
def test_winograd_loses_few_digits_in_float32(length, channels, size, tolerance):
    values = (
        random((2, length, length, channels)),
        random((size, size, channels, MIN_FILTERS[size]), 1),
    )
    convolve = functools.partial(winograd_conv2d, height=length, width=length)
    oracle = functools.partial(conv, kept=(length, length))
    assert_equal_to_oracle(convolve, oracle, values, tolerance, "float32")


@pytest.mark.parametrize(
    "device_kind,dtype,is_winograd",
    [("CPU", "float32", True), ("GPU", "float32", False), ("CPU", "bfloat16", False)],
)
def test_many_channels_are_convolved_by_winograd(device_kind, dtype, is_winograd):
    layer = SameConv2D(128, device_kind=device_kind, dtype=dtype)
    call = tf.function(layer.__call__, autograph=False)
    graph = call.get_concrete_function(tf.TensorSpec([16, 7, 7, 64], dtype)).graph
    operations = {operation.type for operation in graph.get_operations()}
    assert ("Conv2D" not in operations) == is_winograd


@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize(
    "sizes,kept,size",
    [
        ((7, 5), (6, 4), 3),
        ((4, 6), (4, 6), 3),
        ((5, 6), (5, 6), 5),
        ((1, 2), (1, 2), 3),
    ],
)
def test_other_gradients_equal_the_oracle(sizes, kept, size, by_products):
    options = {"height": kept[0], "width": kept[1], "by_products": by_products}
    convolve = functools.partial(conv2d_cpu, **options)
    values = random((2, *sizes, 3)), random((size, size, 3, 4), 1)
    assert_equal_to_oracle(convolve, functools.partial(conv, kept=kept), values, 1e-11)


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
