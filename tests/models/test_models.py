"""The networks: what they compute, how they begin, and that nothing global moves them.

Every network stands in the table of docs/networks.md and, with one of each family, in
the oracle's words.
"""

import functools
import math
import pathlib
import re

import described
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from engines import oracle
from keras.src.backend.common import global_state
from marks import slow
from networks import KINDS, NAMES
from recipes import Recipe, assert_equal_to_oracle, create_trainer

from benchmarks.operations import flops_per_image
from towers.config import Config, factories
from towers.config.choices import MODELS, PRECISIONS
from towers.errors import ConfigError
from towers.models.create import adapt, create_model, noise_shapes
from towers.models.layers.blocks import Builder
from towers.models.variables import keras_settings
from towers.models.zoo import (
    alexnet,
    bit,
    cnn,
    convmixer,
    convnext,
    densenet,
    efficientnet,
    lenet,
    mobilenet_v3,
    mobilenet_v4,
    resnet,
    speedrun,
    tiny_vit,
    vgg,
    vit,
    wide_resnet,
)
from towers.models.zoo.speedrun import Whitening
from towers.optim.losses import cross_entropy
from towers.optim.phases import Phase
from towers.parallel.sharding.split import Shards
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.towers import tower_gradients

CIFAR10, MNIST = ((32, 32, 3), 10), ((28, 28, 1), 10)
IMAGENET = ((224, 224, 3), 1000)

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "networks.md"
ROW = re.compile(
    r"^\| `(\w+)` \| (\d+)x(\d+)x(\d+), (\d+) \| ([\d,]+) \| ([\d,.]+) \|", re.MULTILINE
)
# (network, image shape, classes) -> number of parameters, million operations on one
# image, as the page says them, with the sources of the first; test_flops has formulas
# for the second.
TABLE = {
    (name, (int(height), int(width), int(channels)), int(classes)): (params, flops)
    for name, height, width, channels, classes, params, flops in ROW.findall(
        PAGE.read_text()
    )
}

# What the papers say, in millions: table 6 of He et al. 2015; Zagoruyko and Komodakis
# 2016; table 2 of Huang et al. 2016.
PUBLISHED = {
    "resnet20": "0.27",
    "resnet32": "0.46",
    "resnet44": "0.66",
    "resnet56": "0.85",
    "resnet110": "1.7",
    "wide_resnet_28_10": "36.5",
    "densenet_bc_100_12": "0.8",
}
# Krizhevsky et al. 2012, section 5.
BIASES_OF_ONE = ["conv2", "conv4", "conv5", "fc6", "fc7"]

# Networks with more layers are in the slow suite.
FEW_LAYERS = ("cnn", "lenet", "alexnet", "resnet20", "vgg", "speedrun")
is_small = [x.startswith(FEW_LAYERS) for x in KINDS]
each_family = pytest.mark.parametrize(
    "name", [x if y else slow(x) for x, y in zip(KINDS, is_small, strict=True)]
)

SPEEDRUNS = ("speedrun", "speedrun_deep")
NARROW = 0.125

# The tutorial's network: initial standard deviation, bias.
CNN = {
    "conv1": (0.05, 0.0),
    "conv2": (0.05, 0.1),
    "local3": (0.04, 0.1),
    "local4": (0.04, 0.1),
    "softmax_linear": (1 / 192, 0.0),
}
# The standard deviation of a normal distribution cut off at two of its own.
TRUNCATED = 0.87962566


def create(name="cnn", image_shape=(24, 24, 3), num_classes=10, **kwargs):
    return create_model(
        name, image_shape=image_shape, num_classes=num_classes, **kwargs
    )


@functools.cache
def narrow(name):
    return create(name, width=NARROW)


@functools.cache
def build_model(name, image_shape, num_classes, width=1.0, decay=0.0, **options):
    """A network whose variables have shapes only."""
    try:
        with keras_settings(), keras.StatelessScope(initialize_variables=False):
            regularizer = keras.regularizers.L2(decay) if decay else None
            build = Builder(image_shape, num_classes, width, regularizer)
            return factories.create("model", name, build=build, **options)
    finally:
        # Else Keras gives them values when it next leaves a scope.
        global_state.set_global_attribute("uninitialized_variables", [])


def num_params(model):
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def arrays(model):
    return {v.path: v.numpy() for v in model.variables}


# The table.


def test_every_network_is_in_the_table():
    assert {name for name, *_ in TABLE} == set(NAMES)


def params_of(name):
    """Of the network on CIFAR-10, by the page."""
    shape = (24, 24, 3) if name == "cnn" else (32, 32, 3)
    return int(TABLE[name, shape, 10][0].replace(",", ""))


def test_the_list_of_networks_has_their_parameters():
    assert {x: MODELS[x].num_params for x in NAMES} == {x: params_of(x) for x in NAMES}


SMALL_IMAGES = {key: row for key, row in TABLE.items() if key[2] != 1000}


@pytest.mark.parametrize(
    "names,table",
    [(KINDS, SMALL_IMAGES), slow(KINDS, TABLE), slow({*NAMES} - {*KINDS}, TABLE)],
)
def test_parameters_operations_and_shapes(names, table):
    for (name, image_shape, num_classes), expected in table.items():
        if name in names:
            model = build_model(name, image_shape, num_classes)
            flops = f"{flops_per_image(model) / 1e6:,.1f}"
            assert (f"{num_params(model):,}", flops) == expected, name
            assert model.output.shape == (None, num_classes)
            assert model.inputs[0].name == "images"
            assert model.inputs[0].shape == (None, *image_shape)
            assert model.name == name


def test_parameters_are_as_many_as_published():
    for name, published in PUBLISHED.items():
        digits = len(published.partition(".")[2])
        assert f"{params_of(name) / 1e6:.{digits}f}" == published


@each_family
def test_any_width_gives_a_network(name):
    whole = channels_of(build_model(name, *CIFAR10))
    for width in (0.01, 0.3):
        channels = channels_of(build_model(name, *CIFAR10, width))
        assert channels[:-1] == pytest.approx(whole[:-1] * width, abs=1.5)
        assert channels[-1] == whole[-1] == 10


def test_numbers_of_channels_are_rounded_as_in_mobilenet_v2():
    theirs = keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None)
    names = ["Conv1", "expanded_conv_project", *(f"block_{i}_project" for i in (1, 6))]
    expected = [theirs.get_layer(name).filters for name in names]
    ours = [efficientnet.multiple_of_8(0.35 * count) for count in (32, 16, 24, 64)]
    assert ours == expected


def channels_of(model):
    """Of the outputs of layers whose kernels are trained."""
    trained = [x for x in model.layers if not isinstance(x, Whitening)]
    return np.array([x.kernel.shape[-1] for x in trained if hasattr(x, "kernel")])


@pytest.mark.parametrize(
    "name,size", [("lenet", 14), ("convnext_tiny", 32), ("speedrun", 9)]
)
def test_images_that_are_too_small_are_refused(name, size):
    build_model(name, (size, size, 3), 10, NARROW)
    with pytest.raises(
        ConfigError, match=f"{name} needs .* {size}x{size}, not {size}x{size - 1};"
    ):
        create(name, (size, size - 1, 3))


# How networks begin.


@each_family
def test_a_network_depends_on_its_arguments_alone(name):
    """Neither Keras' generator nor its settings nor names given before move it; another
    seed draws every kernel anew."""
    shape = (32, 32, 3)
    expected = create(name, shape, width=NARROW)
    keras.utils.set_random_seed(1)
    config = keras.config
    with keras_settings():  # which it restores
        config.set_floatx("float64")
        config.set_image_data_format("channels_first")
        config.set_dtype_policy("float64")
        actual = create(name, shape, width=NARROW)
        after = config.floatx(), config.image_data_format(), config.dtype_policy().name
        assert after == ("float64", "channels_first", "float64")
    assert [x.name for x in actual.layers] == [x.name for x in expected.layers]
    ours, wanted = arrays(actual), arrays(expected)
    assert list(ours) == list(wanted)
    for path, values in wanted.items():
        assert values.dtype == ours[path].dtype == np.float32
        np.testing.assert_array_equal(ours[path], values, err_msg=path)
    for variable in actual.variables:
        assert "CPU:0" in variable.value.device
    for own in actual.layers:
        assert getattr(own, "data_format", "channels_last") == "channels_last"
        assert own.dtype_policy.name == "float32"
    other = create(name, shape, width=NARROW, seed=1)
    drawn = drawn_kernels(name, arrays(other))
    for path, values in drawn_kernels(name, wanted).items():
        correlation = np.corrcoef(values.ravel(), drawn[path].ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(values.size), path


def drawn_kernels(name, values):
    """Of speedrun those filters that do not hand an input on, and the head."""
    kernels = {k: v for k, v in values.items() if k.endswith("/kernel")}
    if name.startswith(("vit", "deit", "dinov")):  # whose head begins with zeros
        del kernels["logits/kernel"]
    if name not in SPEEDRUNS:
        return kernels
    filters = {k: v[..., v.shape[2] :] for k, v in kernels.items() if v.ndim == 4}
    drawn = {k: v for k, v in filters.items() if v.size and k != "whitening/kernel"}
    return drawn | {"logits/kernel": values["logits/kernel"]}


@each_family
def test_kernels_decay_and_nothing_else(name):
    """Of speedrun those that Muon leaves to momentum."""
    model = build_model(name, *CIFAR10, NARROW, decay=0.1)
    decayed = {v.path for v in model.trainable_variables if v.regularizer is not None}
    if name in SPEEDRUNS:
        expected = {v.path for v in model.trainable_variables if len(v.shape) != 4}
    elif name == "cnn":
        expected = {"local3/kernel", "local4/kernel"}
    else:
        expected = {v.path for v in model.trainable_variables if v.name == "kernel"}
    assert decayed == expected


def test_convolutions_of_speedrun_begin_as_the_identity():
    model = create("speedrun", (32, 32, 3), width=0.25)
    images = np.random.default_rng(0).normal(size=(2, 31, 31, 24)).astype(np.float32)
    first = model.get_layer("conv1_1")
    assert first.kernel.shape == (3, 3, 24, 16)
    # What the pools would drop is not computed.
    kept = images[:, :30, :30, :16]
    np.testing.assert_array_equal(first(images), kept)
    wider = model.get_layer("conv2_1")
    outputs = wider(images[..., :16])
    np.testing.assert_allclose(outputs[..., :16], kept, rtol=1e-6)
    others = wider.kernel.numpy()[..., 16:]
    assert np.std(others) == pytest.approx(uniform_stddev(others), rel=0.05)
    head = model.get_layer("logits").kernel.numpy()
    assert np.std(head) == pytest.approx(1 / 64, rel=0.1)


def test_whitening_makes_patches_independent_of_each_other():
    """Second moments of the outputs: one matrix of ones on the diagonal and, for the
    negated filters, its negative."""
    rng = np.random.default_rng(0)
    smooth = rng.normal(size=(200, 9, 11, 3)).cumsum(axis=1).cumsum(axis=2)
    images = (smooth / smooth.std()).astype(np.float32)
    model = create("speedrun", (9, 11, 3), width=NARROW)
    adapt(model, lambda: [images[:130], images[130:]])
    own = model.get_layer("whitening")
    assert not own.kernel.trainable and own.bias.trainable
    outputs = own(images).numpy().reshape(-1, 24).astype(np.float64)
    moments = outputs.T @ outputs / len(outputs)
    half = moments[:12, :12]
    np.testing.assert_allclose(half, np.diag(np.diag(half)), atol=1e-5)
    assert np.all(np.diag(half) < 1 + 1e-5) and np.diag(half)[-1] > 0.99
    signs = np.block([[half, -half], [-half, half]])
    np.testing.assert_allclose(moments, signs, atol=1e-5)
    before = own.kernel.numpy()
    adapt(model, lambda: [images[:130], images[130:]])
    np.testing.assert_array_equal(own.kernel, before)


def he_stddev(kernel):
    return np.sqrt(2 / np.prod(kernel.shape[:-1]))


def uniform_stddev(kernel):
    """Of numbers within 1 / sqrt(inputs)."""
    return np.sqrt(1 / 3 / np.prod(kernel.shape[:-1]))


def paper_stddev(kernel):
    """AlexNet's and LeNet's, grown where layers but the first have fewer inputs."""
    is_first = kernel.shape[:-1] in [(3, 3, 3), (11, 11, 3)]
    return 0.01 * (1 if is_first else NARROW**-0.5)


@pytest.mark.parametrize(
    "name,size,std,biases",
    [
        ("lenet", 24, paper_stddev, 0),
        ("alexnet", 24, he_stddev, 0),
        ("alexnet_two_columns", 64, paper_stddev, 1),
        ("resnet20", 24, he_stddev, None),
        slow("convmixer_256_8", 24, uniform_stddev, None),
    ],
)
def test_initial_kernels_have_the_standard_deviation_of_their_paper(
    name, size, std, biases
):
    model = narrow(name) if size == 24 else create(name, (size, size, 3), width=NARROW)
    for own in model.layers:
        if not hasattr(own, "kernel"):
            continue
        kernel, is_last = own.kernel.numpy(), own is model.layers[-1]
        wanted = std(kernel)
        if is_last:
            wanted = (uniform_stddev if biases is None else paper_stddev)(kernel)
        error = 4 / np.sqrt(2 * kernel.size)
        assert np.std(kernel) == pytest.approx(wanted, rel=error), own.name
        assert abs(np.mean(kernel)) < 5 * wanted / np.sqrt(kernel.size), own.name
    if biases is not None:
        ones = {x.name for x in model.layers if getattr(x, "use_bias", 0) and x.bias[0]}
        assert ones == (set(BIASES_OF_ONE) if biases else set())


def test_convnext_begins_as_in_timm():
    model = create("convnext_tiny", (32, 32, 3), width=0.25)
    for path, values in arrays(model).items():
        if path.endswith("/kernel"):
            error = 4 / np.sqrt(2 * values.size)
            assert np.std(values) == pytest.approx(0.02, rel=error), path
            assert np.abs(values).max() < 6 * 0.02, path
            assert abs(np.mean(values)) < 5 * 0.02 / np.sqrt(values.size), path


@pytest.mark.slow
def test_tiny_vit_begins_as_in_timm():
    for path, values in arrays(create("tiny_vit_5m", (32, 32, 3), width=0.5)).items():
        is_zero = re.search("/(bias|beta|moving_mean|attention_biases)$", path)
        wanted, error = 0.0, 1e-9
        if path.endswith("/kernel"):
            wanted = 0.02 if values.ndim == 2 else uniform_stddev(values)
            error = 4 / np.sqrt(2 * values.size)
        elif is_zero or re.search(r"stage1_block\d_conv3_norm/gamma$", path):
            assert not values.any(), path
        else:
            assert np.all(values == 1), path
        assert np.std(values) == pytest.approx(wanted, rel=error), path


def test_vit_begins_as_in_big_vision():
    for path, values in arrays(create("deit_tiny", width=0.5)).items():
        wanted = 0.0
        if path == "patches/kernel":
            wanted = np.prod(values.shape[:-1]) ** -0.5  # LeCun
        elif path.endswith("/kernel") and path != "logits/kernel":
            wanted = (2 / sum(values.shape)) ** 0.5  # Glorot
        elif path == "tokens/positions":
            wanted = values.shape[-1] ** -0.5
        assert np.std(values) == pytest.approx(wanted, rel=0.05), path
        assert np.mean(values) == pytest.approx(float("gamma" in path), abs=0.01), path


@pytest.mark.parametrize(
    "name,precision",
    [
        *(("cnn", x) for x in PRECISIONS),
        slow("convmixer_256_8", "bfloat16"),
        ("speedrun", "bfloat16"),
        slow("speedrun", "float16"),
        slow("speedrun_deep", "bfloat16"),
    ],
)
def test_parameters_are_float32_in_every_precision(name, precision):
    model = create(name, width=NARROW, precision=precision)
    exact = narrow(name)
    ours = arrays(model)
    for path, values in arrays(exact).items():
        assert ours[path].dtype == np.float32
        np.testing.assert_array_equal(ours[path], values)
    images = np.random.default_rng(0).normal(size=(4, 24, 24, 3)).astype(np.float32)
    logits = model(images)
    assert logits.dtype == precision
    np.testing.assert_allclose(
        tf.cast(logits, tf.float32), exact(images), atol=0.02, rtol=0.1
    )


# Dropout and stochastic depth.

WIDE = [(32, 32, 160), (16, 16, 320), (8, 8, 640)]


@pytest.mark.parametrize(
    "name,option,shapes",
    [
        ("resnet20", "stochastic_depth", 9 * [(1, 1, 1)]),
        slow("vit_tiny", "stochastic_depth", 24 * [(1, 1)]),
        slow("tf_efficientnet_lite0", "stochastic_depth", 9 * [(1, 1, 1)]),
        ("mobilenet_v3_small", "dropout", [(1024,)]),
        slow("tiny_vit_5m", "stochastic_depth", 22 * [(1, 1, 1)]),
        slow("convnext_tiny", "stochastic_depth", 18 * [(1, 1, 1)]),
        ("vgg16_bn", "dropout", [(512,)]),
        ("wide_resnet_28_10", "dropout", [x for x in WIDE for _ in range(4)]),
    ],
)
def test_noise_is_what_the_option_of_a_run_asks_for(name, option, shapes):
    given = Config(model=name, **{option: 0.5}).options_of("model") | {"width": 1.0}
    model = build_model(name, *CIFAR10, **given)
    assert list(noise_shapes(model).values()) == shapes
    assert not noise_shapes(build_model(name, *CIFAR10))
    assert num_params(model) == params_of(name)


def test_blocks_begin_as_their_shortcuts():
    model = create("resnet50", (32, 32, 3), num_classes=3, width=0.1)
    lasts = {x.name for x in model.layers if re.search("block._norm3$", x.name)}
    zeros = {
        x.name
        for x in model.layers
        if isinstance(x, keras.layers.BatchNormalization) and not np.any(x.gamma)
    }
    assert len(lasts) == 16 and zeros == lasts


# The tutorial's network.


def test_cnn_begins_as_the_tutorials():
    cnn = create(weight_decay=0.004)
    values = arrays(cnn)
    for name, (std, bias) in CNN.items():
        kernel = values[f"{name}/kernel"]
        np.testing.assert_array_equal(values[f"{name}/bias"], np.float32(bias))
        error = 1 / np.sqrt(kernel.size)  # of the mean, in deviations
        assert np.std(kernel) == pytest.approx(TRUNCATED * std, rel=4 * error)
        assert abs(np.mean(kernel)) < 5 * error * std
        assert 1.9 * std < np.abs(kernel).max() <= 2 * std * (1 + 1e-6)
    kernel = cnn.get_layer("local3").kernel
    half_square = 0.5 * np.square(kernel.numpy(), dtype=np.float64).sum()
    penalty = float(kernel.regularizer(kernel.value))
    assert penalty == pytest.approx(0.004 * half_square, rel=1e-5)


# Every family in the oracle's words. Networks that may have fewer blocks do.


def case(described, function, image_shape, width=1.0, **options):
    return described, function, image_shape, width, options


alexnets, resnets = alexnet.create_model, resnet.create_imagenet_resnet
nets, DROP = efficientnet.create_model, {"dropout": 0.2, "stochastic_depth": 0.5}
SMALL = {
    "cnn": case(described.cnn(), cnn.create_model, (10, 9, 3), 1 / 16),
    "lenet": case(described.lenet(), lenet.create_model, (15, 14, 1), 0.2),
    "alexnet_two_columns": case(
        described.alexnet(2), alexnets, (16, 16, 3), 1 / 32, columns=2
    ),
    "alexnet_large": case(
        described.alexnet(2, large=True), alexnets, (64, 66, 3), 1 / 32, columns=2
    ),
    "resnet18": case(described.resnet18(), resnet.create_resnet18, (9, 8, 3), 1 / 16),
    "resnet14": case(
        described.imagenet_resnet((1, 1, 2), (1, 3, 1), stochastic_depth=0.5),
        *(resnets, (33, 30, 3), 1 / 16),
        **{"blocks": (1, 1, 2), "stochastic_depth": 0.5},
    ),
    "resnet6": case(
        described.imagenet_resnet((1, 1), (3, 3)),
        *(resnets, (18, 17, 3), 1 / 16),
        **{"blocks": (1, 1), "has_bottlenecks": False},
    ),
    "resnet8": case(
        described.cifar_resnet(depth=8, channels=4),
        *(resnet.create_cifar_resnet, (8, 7, 3), 0.25),
        depth=8,
    ),
    "wide_resnet_10_2": case(
        described.wide_resnet(depth=10, dropout=0.3),
        *(wide_resnet.create_model, (8, 7, 3), 0.125),
        **{"depth": 10, "widening": 2, "dropout": 0.3},
    ),
    "vgg7": case(
        described.vgg((1, 2), dropout=0.3),
        *(vgg.create_model, (9, 8, 3), 0.5),
        **{"stages": ((1, 8), (2, 16)), "dropout": 0.3},
    ),
    "densenet_16": case(
        described.densenet(2, dropout=0.2),
        *(densenet.create_model, (9, 8, 3)),
        **{"depth": 16, "growth": 4, "dropout": 0.2},
    ),
    "convmixer_8_1": case(
        described.convmixer(depth=1, channels=8),
        *(convmixer.create_model, (8, 9, 3)),
        **{"depth": 1, "channels": 8},
    ),
    "efficientnet_b": case(
        described.efficientnet((1, 1, 1, 2, 2, 2, 1), "silu", dropout=0.2, rate=0.5),
        *(nets, (19, 16, 3), 1 / 2),
        **{"name": "efficientnet", "deeper": 0.5} | DROP,
    ),
    "tf_efficientnet_lite": case(
        described.efficientnet((1, 1, 1, 1, 1, 1, 1), "relu6", as_tensorflow=True),
        *(nets, (18, 15, 3), 1 / 8),
        **{"name": "lite", "deeper": 0.25, "is_lite": True, "as_tensorflow": True},
    ),
    "mobilenet_v3": case(
        described.mobilenet_v3(False, dropout=0.2, rate=0.5),
        *(mobilenet_v3.create_model, (37, 32, 3), 1 / 4),
        **{"name": "mobilenet", "size": "small"} | DROP,
    ),
    "mobilenet_v4": case(
        described.mobilenet_v4(dropout=0.2, rate=0.5),
        *(mobilenet_v4.create_model, (35, 64, 3), 1 / 16),
        **{"name": "mobilenet", "size": "small"} | DROP,
    ),
    "tiny_vit": case(
        described.tiny_vit((3, 5), window=2, heads=2, dropout=0.2, rate=0.5),
        *(tiny_vit.create_model, (18, 36, 3), 1 / 4),
        **{"name": "tiny_vit", "channels": (32, 256), "depths": (1, 1)} | DROP,
        windows=(0, 2),
    ),
    "convnext": case(
        described.convnext((1, 2), dropout=0.2, rate=0.5),
        *(convnext.create_model, (17, 20, 3)),
        **{"name": "convnext", "channels": (6, 8), "depths": (1, 2)} | DROP,
    ),
    "convnextv2": case(
        described.convnext((1, 1), version=2),
        *(convnext.create_model, (17, 20, 3)),
        **{"name": "v2", "channels": (6, 8), "depths": (1, 1), "is_v2": True},
    ),
    "speedrun_deep": case(
        described.speedrun(depth=3, momentum=0.9),
        *(speedrun.create_model, (17, 18, 3), 1 / 64),
        **{"depth": 3, "momentum": 0.9, "widths": (128, 384, 512)},
    ),
    "vit_mean": case(
        described.vit(1, heads=4, dropout=0.2, stochastic_depth=0.5),
        *(vit.create_model, (8, 13, 3)),
        **{"name": "vit", "channels": 12, "heads": 4, "depth": 1} | DROP,
    ),
    "deit_token": case(
        described.vit(2, heads=2, pool="first_token"),
        *(vit.create_model, (12, 8, 1)),
        **{"name": "deit", "channels": 8, "heads": 2, "depth": 2},
        has_class_token=True,
    ),
    "dinov2_registers": case(
        described.vit(2, 2, "first_token", registers=3, has_scales=True, **DROP),
        *(vit.create_model, (9, 12, 3)),
        **{"name": "dinov2", "channels": 8, "heads": 2, "depth": 2} | DROP,
        **{"num_registers": 3, "initial_scale": 0.5, "patch_size": 4},
        has_class_token=True,
    ),
    "dinov3": case(
        described.vit(1, 2, patch=16, registers=4, has_scales=True, grid=(2, 3)),
        *(vit.create_model, (35, 48, 1)),
        **MODELS["dinov3_small"].options
        | {"name": "dinov3", "channels": 16, "heads": 2, "depth": 1},
    ),
    "bit": case(
        described.bit((1, 2), groups=(2, 2, 8, 4, 16), rate=0.5),
        *(bit.create_model, (33, 30, 3), 3 / 32),
        **{"depths": (1, 2), "stochastic_depth": 0.5},
    ),
}


def small_network(name, dtype="float32"):
    """A network of few channels, with other values than the initial ones, so that
    every variable matters."""
    description, function, image_shape, width, options = SMALL[name]
    with keras_settings(dtype), tf.device("CPU:0"):
        decay = keras.regularizers.L2(networks.WEIGHT_DECAY / 2)
        build = Builder(image_shape, networks.NUM_CLASSES, width, decay)
        model = function(build, **options)
    rng, decay = np.random.default_rng(5), {}
    for variable in model.variables:
        noise = rng.normal(size=variable.shape)
        if variable.name == "kernel":
            fan_in = np.prod(variable.shape[:-1])
            variable.assign(noise / np.sqrt(fan_in))
        elif variable.name == "moving_variance":
            variable.assign(1 + noise**2)
        else:
            variable.assign(variable.numpy() * 0.5 + 0.3 * noise)
        if getattr(variable, "regularizer", None) is not None:
            decay[variable.path] = networks.WEIGHT_DECAY
    return networks.Network(model, description, decay)


def small_batches(network, num_steps, batch_size):
    return networks.random_batches(
        num_steps,
        batch_size,
        image_shape=network.model.inputs[0].shape[1:],
        noise_shapes=noise_shapes(network.model),
    )


def test_every_family_is_in_the_oracles_words():
    families = [
        {name.partition("_")[0].rstrip("0123456789") for name in names}
        for names in (SMALL, NAMES)
    ]
    assert families[0] == families[1]


# Those that take seconds to trace, and whose layers others have too.
TRACED_LONG = (
    "resnet18",
    "speedrun_deep",
    "efficientnet_b",
    "convnext",
    "mobilenet_v4",
)


@pytest.mark.parametrize("name", [slow(x) if x in TRACED_LONG else x for x in SMALL])
def test_outputs_and_gradients_equal_the_oracle_in_float64(name):
    network = small_network(name, "float64")
    [batch], model = small_batches(network, 1, 5), network.model
    [(images, labels, noise)] = networks.oracle_batches([batch])
    expected = oracle.loss_and_gradients(
        network.described, network.params, network.state, images, labels, noise=noise
    )
    layout, values = networks.values_of(network.params, network.state)
    result = tower_gradients(
        Phase(math.inf, model),
        values,
        {k: v if k == "labels" else v.astype(np.float64) for k, v in batch.items()},
        loss_fn=cross_entropy,
        layout=layout,
    )
    tolerance = 1e-9
    assert result.loss.numpy() == pytest.approx(expected.loss, rel=tolerance)
    gradients = layout.params.views(result.gradients)
    for path, ours in zip(network.params, gradients, strict=True):
        theirs = expected.gradients[path]
        np.testing.assert_allclose(
            ours, theirs, rtol=tolerance, atol=tolerance, err_msg=path
        )
    state = layout.state_views(values._replace(state=result.state))
    for ours, theirs in zip(state, expected.state.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    logits = oracle.forward(
        network.described, network.params, network.state, images, training=False
    ).logits
    inputs = [images, *(np.zeros_like(n) for n in noise.values())]
    actual = model(inputs if len(inputs) > 1 else images, training=False)
    assert np.std(logits) > 1e-3
    np.testing.assert_allclose(actual, logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name,steps",
    [
        ("alexnet_two_columns", 4),
        slow("convmixer_8_1", 2),
        slow("mobilenet_v3", 2),
        slow("tiny_vit", 2),
        slow("convnext", 2),
        slow("resnet14", 2),
        slow("deit_token", 2),
        slow("dinov2_registers", 2),
        slow("dinov3", 2),
        slow("bit", 2),
    ],
)
def test_two_devices_that_hold_half_each_equal_the_oracle(name, steps):
    network = small_network(name)
    batches, recipe = small_batches(network, steps, 6), Recipe(clip_norm=0.5)
    halves = create_trainer(model_parallel, network, recipe, batches, 2, group_size=2)
    halves.train(steps)
    assert_equal_to_oracle(halves.state(), recipe.oracle(network, batches, 1))


def test_columns_and_heads_are_not_split_between_devices():
    with pytest.raises(ConfigError, match="2 groups of channels"):
        Shards(build_model("alexnet_two_columns", *CIFAR10, NARROW), 3)
    with pytest.raises(ConfigError, match="stage3_block1_attention has 5 heads, "):
        Shards(build_model("tiny_vit_5m", *CIFAR10), 2)
    for width, heads in (1.0, 3), (0.5, 1):
        with pytest.raises(ConfigError, match=f"block1_attention has {heads} heads, "):
            Shards(build_model("vit_tiny", *CIFAR10, width), 2)
