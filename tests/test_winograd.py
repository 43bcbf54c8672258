"""Winograd's convolutions against the definition, in float64 and float32."""

import numpy as np
import pytest
import tensorflow as tf
from convolved import ours_and_theirs

from towers.models import winograd
from towers.models.convolution import LEAST_CHANNELS, LEAST_FILTERS


@pytest.mark.parametrize("size,bound", [(3, 1e-11), (5, 1e-10)])
@pytest.mark.parametrize("height", range(1, 10))
def test_outputs_and_gradients_equal_the_oracle(height, size, bound):
    for width in (1, 2, 4, 11):
        sizes = (height, width)
        for actual, theirs in ours_and_theirs(
            winograd.convolution, sizes, sizes, 3, 5, tf.float64, size
        ):
            np.testing.assert_allclose(actual, theirs, atol=bound)


@pytest.mark.parametrize("sizes,kept", [((7, 5), (6, 4)), ((15, 3), (14, 2))])
def test_the_first_rows_and_columns_alone_equal_the_oracle(sizes, kept):
    for actual, theirs in ours_and_theirs(
        winograd.convolution, sizes, kept, 4, 3, tf.float64
    ):
        np.testing.assert_allclose(actual, theirs, atol=1e-11)


@pytest.mark.parametrize(
    "length,channels", [*((n, LEAST_CHANNELS) for n in (4, 6, 7, 14)), (4, 512)]
)
@pytest.mark.parametrize("size,bound", [(3, 1e-5), (5, 5e-5)])
def test_in_float32_few_digits_are_lost(length, channels, size, bound):
    sizes, filters = (length, length), LEAST_FILTERS[size]
    for actual, theirs in ours_and_theirs(
        winograd.convolution, sizes, sizes, channels, filters, tf.float32, size
    ):
        error = np.max(np.abs(actual - theirs))
        assert error < bound * np.max(np.abs(theirs))


@pytest.mark.parametrize(
    "length,size,products",
    [(4, 3, 6), (3, 3, 5), (7, 3, 6 + 5), (14, 3, 6 + 5 + 6 + 5), (8, 5, 8 + 8)],
)
def test_a_tile_of_four_takes_six_products_for_twelve(length, size, products):
    assert len(winograd.transforms(length, length, size).kernel) == products
