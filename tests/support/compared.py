"""Functions of TensorFlow against layers of the oracle."""

import numpy as np
import tensorflow as tf
from engines import oracle_layers


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def assert_equal_to_oracle(function, oracle, values, tolerance, dtype="float64"):
    """Compare outputs and gradients, within a part of the largest value."""
    inputs = [tf.cast(x, dtype) for x in values]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = function(*inputs)
    upstream = tf.cast(0.5 + random(y.shape, 9), dtype)
    actual = [y, *tape.gradient(y, inputs, upstream)]
    # The rounding of inputs to a narrow type is not the function's.
    applied, wide = oracle(*map(_wide, inputs)), _wide(upstream)
    of_inputs, of_params = applied.pullback(wide)
    expected = [applied.output, *of_inputs, *of_params.values()]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        error = np.abs(_wide(ours) - theirs).max()
        assert error <= tolerance * np.abs(theirs).max()


def _wide(x):
    return tf.cast(x, tf.float64).numpy()


def conv(x, kernel, bias=None, *, kept):
    """The oracle's convolution, of which the first rows and columns are kept."""
    done = oracle_layers.conv(x, kernel, bias, stride=1, padding="same")
    part = oracle_layers.crop(done.output, height=kept[0], width=kept[1])
    return part._replace(pullback=lambda x: done.pullback(*part.pullback(x)[0]))
