"""Dense layers and attention for CPUs against the oracle."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from engines import oracle_layers
from marks import slow

from towers.models.layers.attention import attention, head_by_head
from towers.models.layers.cpu_kernels import dense

every_type = pytest.mark.parametrize(
    "dtype,tolerance",
    [("float64", 1e-12), slow("float32", 1e-5), slow("bfloat16", 0.02)]
    + [("float16", 3e-3)],
)


def assert_equal_to_oracle(function, oracle, shapes, output_shape, dtype, tolerance):
    """Outputs and gradients, within a part of the largest."""
    rng = np.random.default_rng(0)
    # Sums over many rows lose digits where all have one sign.
    *inputs, upstream = (
        tf.cast(rng.normal(0.5, 1, shape), dtype) for shape in (*shapes, output_shape)
    )
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = function(*inputs)
    actual = [y, *tape.gradient(y, inputs, upstream)]
    assert all(x.dtype == dtype for x in actual)
    wide = [tf.cast(x, tf.float64).numpy() for x in (*inputs, upstream)]
    applied = oracle(*wide[:-1])
    of_inputs, of_params = applied.pullback(wide[-1])
    expected = [applied.output, *of_inputs, *of_params.values()]
    for ours, theirs in zip(actual, expected, strict=True):
        error = np.abs(tf.cast(ours, tf.float64) - theirs).max()
        assert error < tolerance * np.abs(theirs).max()


@every_type
@pytest.mark.parametrize("rows", [(3,), (5, 7), (128, 64)])
def test_dense_and_its_gradients_equal_the_oracle(rows, dtype, tolerance):
    shapes = [(*rows, 6), (6, 4), (4,)]
    assert_equal_to_oracle(
        dense, oracle_layers.dense, shapes, (*rows, 4), dtype, tolerance
    )


@every_type
@pytest.mark.parametrize("function", [attention, head_by_head])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_and_its_gradients_equal_the_oracle(
    heads, function, dtype, tolerance
):
    assert_equal_to_oracle(
        functools.partial(function, heads=heads),
        functools.partial(oracle_layers.attention, heads=heads),
        3 * [(2, 5, 12)],
        (2, 5, 12),
        dtype,
        tolerance,
    )


@pytest.mark.parametrize("function", [attention, head_by_head])
def test_large_scores_do_not_overflow_in_float16(function):
    """Before they are divided by the root of the channels they are beyond 65,504."""
    x = tf.fill([1, 2, 64], tf.constant(40, tf.float16))
    np.testing.assert_array_equal(function(x, x, x, heads=1), x)
