"""Shares and weighted means, against NumPy."""

import networks
import numpy as np
import oracle
import pytest
import tensorflow as tf

from towers.parallel.reduce import (
    average_gradients,
    shares,
    split_batch,
    squared_norm,
    tower_weights,
    weighted_mean,
)

SHAPES = [(3, 2), (2,), ()]


def random_gradients(num_towers):
    rng = np.random.default_rng(0)
    return [[rng.normal(size=shape) for shape in SHAPES] for _ in range(num_towers)]


# Shares.


@pytest.mark.parametrize("batch_size", range(1, 40))
def test_shares_are_all_images_as_evenly_as_can_be_the_first_ones_larger(batch_size):
    for num_towers in range(1, batch_size + 1):
        sizes = shares(batch_size, num_towers)
        cut = oracle.shares(batch_size, num_towers)
        assert sizes == [piece.stop - piece.start for piece in cut]
        assert sum(sizes) == batch_size and max(sizes) - min(sizes) <= 1


def test_a_batch_is_cut_along_its_first_axis_without_a_gap():
    batch = {"images": np.arange(7 * 4).reshape(7, 2, 2), "labels": np.arange(7)}
    pieces = split_batch({k: tf.constant(v) for k, v in batch.items()}, [3, 2, 2])
    for piece, cut in zip(pieces, oracle.shares(7, 3), strict=True):
        assert set(piece) == {"images", "labels"}
        for name, value in batch.items():
            np.testing.assert_array_equal(piece[name], value[cut])


# Averages.


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [5 / 13, 4 / 13, 4 / 13]])
def test_average_is_weighted_by_the_towers_shares(weights):
    gradients = random_gradients(3)
    for i, average in enumerate(average_gradients(gradients, weights)):
        expected = sum(w * g[i] for w, g in zip(weights, gradients, strict=True))
        np.testing.assert_allclose(average, expected, rtol=1e-14)


@pytest.mark.row(25)
def test_uneven_shares_give_the_gradient_of_the_whole_batch():
    """The reason for the weights: 13 images on 3 towers, by the oracle."""
    network = networks.plain_network()
    (batch,) = oracle_batches = networks.oracle_batches(networks.random_batches(1, 13))
    towers = oracle.tower_gradients(
        network.described, network.params, network.state, oracle.Batch(*batch), 3
    )
    whole = oracle.loss_and_gradients(
        network.described,
        network.params,
        network.state,
        batch[0],
        batch[1],
        noise=oracle_batches[0][2],
    )
    tower_grads = [list(map(tf.constant, t.gradients.values())) for t in towers]
    weighted = average_gradients(tower_grads, tower_weights(shares(13, 3)))
    unweighted = average_gradients(tower_grads, [1 / 3] * 3)
    largest = 0
    for name, average, plain in zip(
        towers[0].gradients, weighted, unweighted, strict=True
    ):
        np.testing.assert_allclose(average, whole.gradients[name], atol=1e-12)
        largest = max(largest, np.abs(plain - whole.gradients[name]).max())
    assert largest > 1e-4, "equal weights would have done as well"


def test_one_towers_gradients_are_the_average():
    [gradient] = average_gradients([[tf.constant(2.0)]], [1.0])
    assert float(gradient) == 2.0


def test_towers_with_fewer_gradients_are_refused():
    tower_grads = random_gradients(2)
    tower_grads[1].pop()
    with pytest.raises(ValueError):
        average_gradients(tower_grads, [0.5, 0.5])


def test_as_many_weights_as_towers_are_wanted():
    with pytest.raises(ValueError, match="3 towers but 2 weights"):
        average_gradients(random_gradients(3), [0.5, 0.5])


# Means and norms.


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
def test_a_mean_keeps_its_dtype(dtype):
    tensors = [tf.constant([1.0, 2.0], dtype), tf.constant([3.0, 4.0], dtype)]
    found = weighted_mean(tensors, [0.25, 0.75])
    assert found.dtype == dtype
    np.testing.assert_allclose(tf.cast(found, tf.float32), [2.5, 3.5])


def test_squared_norm_is_that_of_all_elements_together():
    (gradients,) = random_gradients(1)
    found = squared_norm([tf.constant(g) for g in gradients])
    expected = sum(np.sum(np.square(g)) for g in gradients)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_squared_norm_tells_of_a_single_bad_element(bad, place):
    (gradients,) = random_gradients(1)
    gradients[place] = np.array(gradients[place], np.float32)
    gradients[place].flat[-1] = bad
    tensors = [tf.constant(g, tf.float32) for g in gradients]
    assert not np.isfinite(squared_norm(tensors))


def test_squared_norm_of_large_but_good_elements_is_finite():
    assert np.isfinite(squared_norm([tf.constant([1e18, -1e18])]))
