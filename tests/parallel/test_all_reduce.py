"""Shares and means over towers, against NumPy; every device gets the same bits."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from engines import oracle
from marks import slow

from towers.errors import ConfigError
from towers.parallel import reduce
from towers.parallel.reduce import (
    ALGORITHMS,
    all_reduce,
    average_gradients,
    average_states,
    check_algorithm,
    shares,
    split_batch,
    squared_norm,
    weighted_mean,
)

HERE = [name for name in ALGORITHMS if name != "nccl"]  # that one needs two GPUs
SHAPES = [(3, 3, 4, 5), (7,), (), (11, 13), (1,)]
WEIGHTS = [[0.25] * 4, [0.5, 0.2, 0.3], *map(slow, [[0.5, 0.2, 0.2, 0.1], [1.0]])]


def values_of(num_devices, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
        for _ in range(num_devices)
    ]


def run(values, **options):
    devices = [f"/CPU:{i}" for i in range(len(values))]

    @tf.function
    def reduced():
        tensors = []
        for of_device, device in zip(values, devices, strict=True):
            with tf.device(device):
                tensors.append([tf.identity(value) for value in of_device])
        return all_reduce(tensors, devices, **options)

    return [[t.numpy() for t in of_device] for of_device in reduced()]


def assert_mean(results, values, weights):
    """Compare with NumPy; all devices have the same bits."""
    for place, value in enumerate(values[0]):
        addends = [v[place].astype(np.float64) for v in values]
        expected = np.tensordot(weights, addends, 1)
        for of_device in results:
            assert np.asarray(of_device[place]).dtype == value.dtype
            np.testing.assert_array_equal(of_device[place], results[0][place])
        np.testing.assert_allclose(results[0][place], expected, rtol=1e-5, atol=1e-5)


# Shares.


def test_shares_are_all_images_as_evenly_as_can_be_the_first_ones_larger():
    for batch_size, num_towers in itertools.product(range(1, 40), repeat=2):
        if num_towers <= batch_size:
            sizes = shares(batch_size, num_towers)
            assert sum(sizes) == batch_size and max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


def test_a_batch_is_cut_along_its_first_axis_without_a_gap():
    batch = {"images": np.arange(7 * 4).reshape(7, 2, 2), "labels": np.arange(7)}
    pieces = split_batch({k: tf.constant(v) for k, v in batch.items()}, [3, 2, 2])
    for piece, cut in zip(pieces, oracle.shares(7, 3), strict=True):
        assert set(piece) == {"images", "labels"}
        for name, value in batch.items():
            np.testing.assert_array_equal(piece[name], value[cut])


# All-reduce.


@pytest.mark.parametrize("num_devices", [4, *map(slow, [1, 2, 3, 5, 8])])
@pytest.mark.parametrize("algorithm", HERE)
def test_the_sum_is_numpys_and_the_same_everywhere(algorithm, num_devices):
    values = values_of(num_devices)
    if num_devices == 4:
        values[1][0][0, 0, 0, 0] = np.nan  # survives
    results = run(values, algorithm=algorithm)
    assert_mean(results, values, [1.0] * num_devices)


@pytest.mark.row(25)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("algorithm", HERE)
def test_weights_make_it_a_mean(algorithm, weights):
    values = values_of(len(weights))
    assert_mean(run(values, algorithm=algorithm, weights=weights), values, weights)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_other_means_are_weighted_too(weights):
    values = values_of(len(weights))
    devices = [f"/CPU:{i}" for i in range(len(weights))]
    tensors = [[tf.constant(value) for value in of_device] for of_device in values]
    assert_mean(average_states(tensors, weights, devices), values, weights)
    assert_mean([average_gradients(tensors, weights)], values, weights)


@pytest.mark.parametrize("num_towers", [3, 7])
def test_states_on_which_all_agree_stay_what_they_are_to_the_bit(num_towers):
    """A mean that is repeated thousands of times must not drift."""
    rng = np.random.default_rng(0)
    frozen = [rng.normal(size=n).astype(np.float32) for n in (1000, 7)]
    weights = np.random.default_rng(1).dirichlet(np.ones(num_towers)).tolist()
    states = [[tf.constant(x) for x in frozen]] * num_towers
    [means] = average_states(states, weights, ["/CPU:1"])
    for mean, value in zip(means, frozen, strict=True):
        np.testing.assert_array_equal(mean, value)
    plain = weighted_mean([tf.constant(frozen[0])] * num_towers, weights)
    assert np.any(plain != frozen[0])


@pytest.mark.parametrize("algorithm", HERE)
@pytest.mark.parametrize("num_devices", [3, slow(8)])
def test_half_width_rounds_no_more_than_bfloat16_does(algorithm, num_devices):
    values = values_of(num_devices)
    results = run(values, algorithm=algorithm, dtype=tf.bfloat16)
    rounded = False
    for place in range(len(SHAPES)):
        addends = [v[place].astype(np.float64) for v in values]
        # Each addend and each partial sum is rounded at most once on its way, by half a
        # unit in the eighth binary digit.
        bound = 2.0**-8 * (num_devices + 1) * np.sum(np.abs(addends), axis=0)
        exact = np.sum(addends, axis=0)
        for of_device in results:
            assert of_device[place].dtype == np.float32
            np.testing.assert_array_equal(of_device[place], results[0][place])
            assert np.all(np.abs(of_device[place] - exact) <= bound)
        rounded |= np.any(np.abs(results[0][place] - exact) > 2.0**-16 * np.abs(exact))
    assert rounded, "the narrow type did not travel"


# NCCL.


def test_nccl_is_refused_without_two_gpus_and_in_bfloat16_which_it_does_not_add():
    for devices in (["/GPU:0"], ["/CPU:0", "/CPU:1"]):
        with pytest.raises(ConfigError, match=r"nccl with [01] GPU"):
            check_algorithm("nccl", devices, None)
    with pytest.raises(ConfigError, match="all_reduce_dtype=bfloat16"):
        check_algorithm("nccl", ["/GPU:0", "/GPU:1"], tf.bfloat16)
    check_algorithm("nccl", ["/GPU:0", "/GPU:1"], tf.float32)
    check_algorithm("ring", ["/CPU:0"], tf.bfloat16)


@pytest.mark.parametrize("most_bytes", [0, 100, 700, 10**6])
def test_vectors_of_a_bucket_are_added_up_at_once(most_bytes, monkeypatch):
    calls, star = [], ALGORITHMS["star"]

    def counted(tensors, *args):
        calls.append(tensors[0].shape.num_elements() * 4)
        return star(tensors, *args)

    monkeypatch.setitem(ALGORITHMS, "nccl", counted)
    monkeypatch.setattr(reduce, "BUCKET_BYTES", most_bytes)
    values, weights = values_of(3), [0.5, 0.2, 0.3]
    assert_mean(run(values, algorithm="nccl", weights=weights), values, weights)
    sizes = [4 * max(1, math.prod(shape)) for shape in SHAPES]  # 720, 28, 4, 572, 4
    assert sum(calls) == sum(sizes)
    assert all(size <= most_bytes or size in sizes for size in calls)
    for one, other in itertools.pairwise(calls):
        assert one + other > most_bytes


# Norms.


def test_squared_norm_is_that_of_all_elements_and_tells_of_a_single_bad_one():
    [gradients] = values_of(1)
    found = squared_norm([tf.constant(g) for g in gradients])
    expected = sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isfinite(squared_norm([tf.constant([1e18, -1e18])]))
    for place, bad in itertools.product(range(len(SHAPES)), [np.nan, np.inf, -np.inf]):
        spoiled = [np.array(g) for g in gradients]
        spoiled[place].flat[-1] = bad
        assert not np.isfinite(squared_norm([tf.constant(g) for g in spoiled]))
