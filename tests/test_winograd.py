"""Winograd's convolutions against the definition, in float64 and float32."""

import numpy as np
import oracle_layers
import pytest
import tensorflow as tf

from towers.models import winograd


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def ours_and_theirs(sizes, kept, channels, filters, dtype):
    """Outputs and both gradients: those of `winograd`, and the oracle's."""
    x, kernel = random((2, *sizes, channels)), random((3, 3, channels, filters), 1)
    done = oracle_layers.conv(x, kernel, stride=1, padding="same")
    upstream = np.zeros(done.output.shape)
    inner = (slice(None), slice(kept[0]), slice(kept[1]))
    upstream[inner] = random(done.output[inner].shape, 2)
    (of_x,), of_params = done.pullback(upstream)
    sources = [tf.constant(x, dtype), tf.constant(kernel, dtype)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = winograd.convolution(*sources, *kept)
    found = [y, *tape.gradient(y, sources, tf.constant(upstream[inner], dtype))]
    return zip(found, (done.output[inner], of_x, of_params["kernel"]), strict=True)


@pytest.mark.parametrize("height", range(1, 10))
def test_outputs_and_gradients_equal_the_oracle(height):
    for width in (1, 2, 4, 11):
        for found, expected in ours_and_theirs(
            (height, width), (height, width), 3, 5, tf.float64
        ):
            np.testing.assert_allclose(found, expected, atol=1e-11)


@pytest.mark.parametrize("sizes,kept", [((7, 5), (6, 4)), ((15, 3), (14, 2))])
def test_the_first_rows_and_columns_alone_equal_the_oracle(sizes, kept):
    for found, expected in ours_and_theirs(sizes, kept, 4, 3, tf.float64):
        np.testing.assert_allclose(found, expected, atol=1e-11)


@pytest.mark.parametrize("size", [4, 6, 7, 14])
def test_in_float32_few_digits_are_lost(size):
    sizes = (size, size)
    for found, expected in ours_and_theirs(sizes, sizes, 64, 128, tf.float32):
        error = np.max(np.abs(found - expected))
        assert error < 1e-5 * np.max(np.abs(expected))


def test_a_tile_of_four_takes_six_products_for_twelve():
    for size, products in ((4, 6), (3, 5), (7, 6 + 5), (14, 6 + 5 + 6 + 5)):
        assert len(winograd.transforms(size, size).kernel) == products
