"""Operations for CPUs against their formulas, the oracle, and TensorFlow's
own."""

import functools
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from convolved import ours_and_theirs, random
from marks import slow
from test_layers import random_images, value_and_gradient

from towers.models.layers.core import MIN_CHANNELS, MIN_FILTERS
from towers.models.layers.cpu_convolutions import (
    conv2d_cpu,
    transforms,
    winograd_conv2d,
)
from towers.models.layers.cpu_kernels import (
    FUSED_ACTIVATIONS,
    gelu,
    layer_normalization,
    local_response_normalization,
)

# Winograd.


@pytest.mark.parametrize("size,bound", [(3, 1e-11), (5, 1e-10)])
def test_outputs_and_gradients_equal_the_oracle(size, bound):
    for sizes in itertools.product(range(1, 10), (1, 2, 4, 11)):
        for actual, theirs in ours_and_theirs(
            winograd_conv2d, sizes, sizes, 3, 5, tf.float64, size
        ):
            np.testing.assert_allclose(actual, theirs, atol=bound, err_msg=sizes)


@pytest.mark.parametrize("num_images", [slow(1), 8, slow(10**6)])
@pytest.mark.parametrize("size", [3, 5])
def test_the_matrices_of_a_line_convolve_it(size, num_images):
    """Whatever the tiles are, which differ by how many images share the kernel."""
    for length, kept in itertools.product(range(1, 30), (0, 1)):
        outputs = max(1, length - kept)
        x, kernel = random([length]), random([size], 1)
        line = transforms(length, outputs, size, num_images)
        points = (line.inputs @ x).reshape(len(line.kernel), -1)
        y = (line.outputs @ (points * (line.kernel @ kernel)[:, None])).T.ravel()
        theirs = np.correlate(np.pad(x, size // 2), kernel)
        np.testing.assert_allclose(y[:outputs], theirs[:outputs], atol=1e-11)


@pytest.mark.parametrize(
    "length,channels", [*((n, MIN_CHANNELS) for n in (4, 6, 7, 14)), (4, 512)]
)
@pytest.mark.parametrize("size,bound", [(3, 1e-5), (5, 5e-5)])
def test_in_float32_few_digits_are_lost(length, channels, size, bound):
    sizes, filters = (length, length), MIN_FILTERS[size]
    for actual, theirs in ours_and_theirs(
        winograd_conv2d, sizes, sizes, channels, filters, tf.float32, size
    ):
        error = np.max(np.abs(actual - theirs))
        assert error < bound * np.max(np.abs(theirs))


# Other convolutions.


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
def test_gradients_in_other_words_equal_the_oracle(sizes, kept, size, by_products):
    convolve = functools.partial(conv2d_cpu, by_products=by_products)
    outputs, *gradients = ours_and_theirs(convolve, sizes, kept, 3, 4, tf.float64, size)
    np.testing.assert_allclose(*outputs, atol=1e-12)
    for ours, theirs in gradients:
        np.testing.assert_allclose(ours, theirs, atol=1e-11)


# Activations.


def of_gelu(x):
    """x times the normal distribution function, and the derivative."""
    cdf = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))(x)
    return x * cdf, cdf + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def of_silu(x):
    share = 1 / (1 + np.exp(-x))
    return x * share, share + x * share * (1 - share)


def of_hard_silu(x):
    value = x * np.clip(x + 3, 0, 6) / 6
    return value, np.where(np.abs(x) < 3, x / 3 + 0.5, x >= 3)


def of_relu6(x):
    return np.clip(x, 0, 6), (x > 0) & (x < 6)


@pytest.mark.parametrize(
    "dtype,tolerance",
    [("float64", 1e-14), slow("float32", 2e-6), slow("bfloat16", 0.01)]
    + [("float16", 2e-3)],
)
@pytest.mark.parametrize(
    "activate,of_formula",
    [
        (gelu, of_gelu),
        (functools.partial(gelu, device_kind="GPU"), of_gelu),
        (FUSED_ACTIVATIONS["silu"], of_silu),
        (FUSED_ACTIVATIONS["hard_silu"], of_hard_silu),
        (FUSED_ACTIVATIONS["relu6"], of_relu6),
    ],
    ids=["gelu", "gelu on a GPU", "silu", "hard_silu", "relu6"],
)
def test_activations_and_their_gradients_equal_the_formula(
    activate, of_formula, dtype, tolerance
):
    x = np.concatenate([np.linspace(-8, 8, 1001), [0.0, 1e-30, -10.0, 10.0]])
    upstream = np.random.default_rng(0).normal(size=x.shape)
    inputs, scales = tf.cast(x, dtype), tf.cast(upstream, dtype)

    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value = activate(inputs)
    gradient = tape.gradient(value, inputs, scales)
    assert value.dtype == gradient.dtype == dtype
    # What a narrow type makes of the inputs is not the function's.
    value_wanted, slope = of_formula(tf.cast(inputs, tf.float64).numpy())
    gradient_wanted = tf.cast(scales, tf.float64).numpy() * slope
    bounds = {"rtol": tolerance, "atol": tolerance}
    value, gradient = (tf.cast(t, tf.float64) for t in (value, gradient))
    np.testing.assert_allclose(value, value_wanted, **bounds)
    np.testing.assert_allclose(gradient, gradient_wanted, **bounds)


# Layer normalization.


@pytest.mark.parametrize(
    "dtype,tolerance",
    [("float64", 1e-12), slow("float32", 2e-5), slow("bfloat16", 0.03)]
    + [("float16", 4e-3)],
)
def test_layer_normalization_and_its_gradients_equal_the_formula(dtype, tolerance):
    rng = np.random.default_rng(0)
    wide = dtype if dtype == "float64" else "float32"
    x, upstream = (tf.cast(rng.normal(3, 2, (5, 7, 24)), dtype) for _ in range(2))
    scale, offset = (tf.cast(rng.normal(1, 1, 24), wide) for _ in range(2))
    arguments = [x, scale, offset]
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        y = layer_normalization(*arguments, 1e-3)
    actual = [y, *tape.gradient(y, arguments, upstream)]
    assert [a.dtype for a in actual] == [dtype, dtype, wide, wide]

    x, scale, offset, upstream = (
        tf.cast(a, tf.float64).numpy() for a in (*arguments, upstream)
    )
    factor = 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
    normalized = (x - x.mean(-1, keepdims=True)) * factor
    scaled = upstream * scale
    share = (scaled * normalized).mean(-1, keepdims=True)
    expected = [
        normalized * scale + offset,
        factor * (scaled - scaled.mean(-1, keepdims=True) - share * normalized),
        (upstream * normalized).sum((0, 1)),
        upstream.sum((0, 1)),
    ]
    for a, e in zip(actual, expected, strict=True):
        bounds = {"rtol": tolerance, "atol": tolerance * np.abs(e).max()}
        np.testing.assert_allclose(tf.cast(a, tf.float64), e, **bounds)


# Local response normalization.

# depth_radius, bias, alpha, beta
CONSTANTS = [
    (4, 1.0, 0.001 / 9, 0.75),  # the tutorial's
    (2, 2.0, 1e-2, 0.75),  # Krizhevsky et al., with a larger alpha
    (5, 1.0, 1.0, 0.5),  # TensorFlow's defaults
    (1, 1.5, 0.3, 1.0),
    (0, 1.0, 0.3, 0.6),
    (100, 1.0, 0.1, 0.75),  # the band reaches over all channels
]


@pytest.mark.parametrize("constants", CONSTANTS)
def test_normalization_and_its_gradient_equal_those_of_tensorflow(constants):
    x, upstream = random_images(), random_images(seed=1)
    actual = value_and_gradient(
        lambda x: local_response_normalization(x, *constants), x, upstream
    )
    expected = value_and_gradient(
        lambda x: tf.nn.local_response_normalization(x, *constants), x, upstream
    )
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
