"""Operations for CPUs against the oracle."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from compared import assert_equal_to_oracle, random
from engines import oracle_layers
from marks import slow

from towers.models.layers.attention import (
    WindowAttention,
    attention,
    head_by_head,
    pair_biases,
)
from towers.models.layers.cpu_kernels import (
    FUSED_ACTIVATIONS,
    dense,
    gelu,
    layer_normalization,
    local_response_normalization,
)

TOKENS, LINE = [(2, 5, 12)] * 3, [(1001,)]
of = functools.partial
CONSTANTS = [  # depth_radius, bias, alpha, beta, groups
    (4, 1.0, 0.001 / 9, 0.75, 1),  # the tutorial's
    (2, 2.0, 1e-2, 0.75, 2),  # Krizhevsky et al., with a larger alpha
    (1, 1.5, 0.3, 1.0, 1),
    (100, 1.0, 0.1, 0.6, 1),  # the band reaches over all channels
]
NAMES = ("depth_radius", "bias", "alpha", "beta", "groups")


def windows(x, biases, function):
    return WindowAttention(2, 3).attend(x, pair_biases(biases, 3), function)


# Name -> function, that of the oracle, shapes of the arguments.
KERNELS = {
    "dense": (dense, oracle_layers.dense, [(5, 7, 6), (6, 4), (4,)]),
    "dense of many rows": (dense, oracle_layers.dense, [(128, 64, 6), (6, 4), (4,)]),
    "gelu": (gelu, oracle_layers.gelu, LINE),
    "gelu on a GPU": (of(gelu, device_kind="GPU"), oracle_layers.gelu, LINE),
    "layer normalization": (
        of(layer_normalization, epsilon=1e-3),
        oracle_layers.layer_norm,
        [(5, 7, 24), (24,), (24,)],
    ),
}
for name in ("silu", "hard_silu", "relu6"):
    KERNELS[name] = FUSED_ACTIVATIONS[name], getattr(oracle_layers, name), LINE
for heads in (1, 3):
    for function in (attention, head_by_head):
        KERNELS[f"{function.__name__} {heads}"] = (
            of(function, heads=heads),
            of(oracle_layers.attention, heads=heads),
            TOKENS,
        )
for function in (attention, head_by_head):
    KERNELS[f"{function.__name__} in windows"] = (
        of(windows, function=function),
        of(oracle_layers.window_attention, heads=2, size=3),
        [(2, 6, 3, 24), (9, 2)],
    )
for number, constants in enumerate(CONSTANTS):
    options = dict(zip(NAMES, constants, strict=True))
    KERNELS[f"local response normalization {number}"] = (
        of(local_response_normalization, **options),
        of(oracle_layers.local_response_norm, **options),
        [(2, 3, 4, 12)],
    )


@pytest.mark.parametrize(
    "dtype,tolerance",
    [
        ("float64", 1e-12),
        ("float16", 5e-3),
        slow("float32", 2e-5),
        slow("bfloat16", 0.04),
    ],
)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_and_their_gradients_equal_the_oracle(name, dtype, tolerance):
    function, oracle, shapes = KERNELS[name]
    values = [3 * random(shape, i) for i, shape in enumerate(shapes)]
    if "attention" in name or "dense" in name:
        values = [x / 3 for x in values]
    assert_equal_to_oracle(function, oracle, values, tolerance, dtype)


@pytest.mark.parametrize("function", [attention, head_by_head])
def test_large_scores_do_not_overflow_in_float16(function):
    """Before they are divided by the root of the channels they are beyond 65,504."""
    x = tf.fill([1, 2, 64], tf.constant(40, tf.float16))
    np.testing.assert_array_equal(function(x, x, x, heads=1), x)
