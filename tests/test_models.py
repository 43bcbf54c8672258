"""The networks: what they compute, how they begin, and that nothing global moves them.

Every network of the table stands in COUNTS.
"""

import keras
import networks
import numpy as np
import oracle
import pytest
import tensorflow as tf
from oracle import layer

from towers.config import MODELS as MODEL_NAMES
from towers.config import PRECISIONS
from towers.models import MODELS, create_model, initialize, noise_shapes

# (network, image shape, classes, width) -> number of parameters.
COUNTS = {
    ("cnn", (24, 24, 3), 10, 1.0): 1_068_298,
    ("cnn", (24, 24, 3), 10, 0.25): 68_170,
    ("cnn", (32, 32, 3), 100, 1.0): 1_773_796,
}

# What the first issue says of the tutorial's network: initial deviation, bias.
CNN = {
    "conv1": (0.05, 0.0),
    "conv2": (0.05, 0.1),
    "local3": (0.04, 0.1),
    "local4": (0.04, 0.1),
    "softmax_linear": (1 / 192, 0.0),
}
LRN = {"depth_radius": 4, "bias": 1.0, "alpha": 0.001 / 9, "beta": 0.75}
CNN_DESCRIBED = [
    layer("conv", "conv1"),
    layer("relu", "relu1"),
    layer("max_pool", "pool1", size=3, stride=2),
    layer("local_response_norm", "norm1", **LRN),
    layer("conv", "conv2"),
    layer("relu", "relu2"),
    layer("local_response_norm", "norm2", **LRN),
    layer("max_pool", "pool2", size=3, stride=2),
    layer("flatten", "flatten"),
    layer("dense", "local3"),
    layer("relu", "relu3"),
    layer("dense", "local4"),
    layer("relu", "relu4"),
    layer("dense", "softmax_linear"),
]

# A normal distribution cut off at two deviations has this deviation.
TRUNCATED = 0.87962566


def create(name="cnn", image_shape=(24, 24, 3), num_classes=10, **kwargs):
    return create_model(
        name, image_shape=image_shape, num_classes=num_classes, **kwargs
    )


def arrays(model):
    return {v.path: v.numpy() for v in model.variables}


@pytest.fixture(scope="module")
def cnn():
    return create(weight_decay=0.004)


def test_every_network_is_in_the_table_of_counts():
    assert {name for name, *_ in COUNTS} == set(MODELS) == set(MODEL_NAMES)


@pytest.mark.parametrize("name,image_shape,num_classes,width", COUNTS)
def test_number_of_parameters(name, image_shape, num_classes, width):
    model = create(name, image_shape, num_classes, width=width)
    count = COUNTS[name, image_shape, num_classes, width]
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == count


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_with_variables_is_named_and_no_name_is_keras_own(name):
    first, second = create(name), create(name)
    assert list(arrays(first)) == list(arrays(second))
    assert [x.name for x in first.layers] == [x.name for x in second.layers]
    assert "images" in {x.name for x in first.inputs}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_depend_on_the_seed_alone(name):
    keras.utils.set_random_seed(1)
    first = arrays(create(name, width=0.25, seed=5))
    keras.utils.set_random_seed(2)
    second = arrays(create(name, width=0.25, seed=5))
    for path, values in first.items():
        np.testing.assert_array_equal(second[path], values, err_msg=path)


@pytest.mark.parametrize("name", MODELS)
def test_another_seed_draws_every_kernel_anew(name):
    first, second = (arrays(create(name, width=0.25, seed=s)) for s in (0, 1))
    kernels = [path for path in first if path.endswith("/kernel")]
    assert kernels
    for path in kernels:
        correlation = np.corrcoef(first[path].ravel(), second[path].ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(first[path].size), path


@pytest.mark.parametrize("name", MODELS)
def test_global_settings_of_keras_change_nothing(name):
    expected = create(name, width=0.25)
    before = (
        keras.config.floatx(),
        keras.config.image_data_format(),
        keras.config.dtype_policy(),
    )
    try:
        keras.config.set_floatx("float64")
        keras.config.set_image_data_format("channels_first")
        keras.config.set_dtype_policy("float64")
        found = create(name, width=0.25)
        after = (
            keras.config.floatx(),
            keras.config.image_data_format(),
            keras.config.dtype_policy().name,
        )
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_image_data_format(before[1])
        keras.config.set_dtype_policy(before[2])
    assert after == ("float64", "channels_first", "float64"), "the user's are restored"
    for path, values in arrays(expected).items():
        assert values.dtype == arrays(found)[path].dtype == np.float32
        np.testing.assert_array_equal(arrays(found)[path], values)
    images = np.random.default_rng(0).normal(size=(2, 24, 24, 3)).astype(np.float32)
    np.testing.assert_array_equal(found(images), expected(images))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_are_float32_in_every_precision(precision):
    model = create(width=0.25, precision=precision)
    exact = create(width=0.25)
    for path, values in arrays(exact).items():
        assert arrays(model)[path].dtype == np.float32
        np.testing.assert_array_equal(arrays(model)[path], values)
    images = np.random.default_rng(0).normal(size=(4, 24, 24, 3)).astype(np.float32)
    logits = model(images)
    assert logits.dtype == precision
    np.testing.assert_allclose(
        tf.cast(logits, tf.float32), exact(images), atol=0.02, rtol=0.1
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_lies_on_the_cpu(name):
    for variable in create(name, width=0.25).variables:
        assert "CPU:0" in variable.value.device


# The tutorial's network.


@pytest.mark.parametrize("name", CNN)
def test_initial_parameters_of_cnn_are_the_tutorials(cnn, name):
    deviation, bias = CNN[name]
    kernel, biases = arrays(cnn)[f"{name}/kernel"], arrays(cnn)[f"{name}/bias"]
    np.testing.assert_array_equal(biases, np.float32(bias))
    error = 1 / np.sqrt(kernel.size)  # of the mean, in deviations
    assert np.std(kernel) == pytest.approx(TRUNCATED * deviation, rel=4 * error)
    assert abs(np.mean(kernel)) < 5 * error * deviation
    assert 1.9 * deviation < np.abs(kernel).max() <= 2 * deviation * (1 + 1e-6)


def test_two_layers_of_one_shape_begin_differently():
    dense = keras.layers.Dense
    model = keras.Sequential(
        [keras.Input((8,)), dense(8, name="first"), dense(8, name="second")]
    )
    initialize(model, seed=0)
    first, second = (x.kernel.numpy() for x in model.layers)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.5


def test_cnn_computes_what_the_issue_describes(cnn):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(3, 24, 24, 3)).astype(np.float32)
    # Larger kernels than the initial ones, so that every layer matters.
    params = {
        path: (5 * values if path.endswith("kernel") else values + 0.05)
        for path, values in arrays(cnn).items()
    }
    expected = oracle.forward(CNN_DESCRIBED, params, {}, images, training=False).logits
    assert np.std(expected) > 0.1
    found, _ = cnn.stateless_call(list(params.values()), [], images)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.std(expected))


def test_the_two_hidden_dense_kernels_decay_by_half_the_sum_of_squares(cnn):
    values = arrays(cnn)
    decayed = {
        v.path: float(v.regularizer(v.value))
        for v in cnn.variables
        if v.regularizer is not None
    }
    assert set(decayed) == {"local3/kernel", "local4/kernel"}
    for path, penalty in decayed.items():
        half_square = 0.5 * np.square(values[path], dtype=np.float64).sum()
        assert penalty == pytest.approx(0.004 * half_square, rel=1e-5)


def test_without_weight_decay_nothing_decays():
    assert all(v.regularizer is None for v in create(width=0.25).variables)


def test_a_narrow_cnn_is_as_loud_as_a_wide_one():
    """Initial deviations grow as the layers' inputs get fewer."""
    images = np.random.default_rng(0).normal(size=(16, 24, 24, 3)).astype(np.float32)
    scales = []
    for width in (1.0, 0.25):
        model = create(width=width)
        hidden = keras.Model(model.inputs[0], model.get_layer("relu3").output)
        scales.append(np.std(hidden(images)))
    assert scales[1] == pytest.approx(scales[0], rel=0.3)


# Noise.


def test_noise_shapes_are_the_inputs_beside_the_images(cnn):
    assert noise_shapes(cnn) == {}
    assert noise_shapes(networks.plain_network().model) == {"dropout1_noise": (12,)}
