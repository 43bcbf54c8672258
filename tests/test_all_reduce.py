"""Every algorithm adds up as NumPy does, and gives every device the same bits."""

import numpy as np
import pytest
import tensorflow as tf
from marks import slow

from towers.errors import ConfigError
from towers.parallel.reduce import (
    ALGORITHMS,
    all_reduce,
    average_states,
    check_algorithm,
    weighted_mean,
)

HERE = [name for name in ALGORITHMS if name != "nccl"]  # that one needs two GPUs
SHAPES = [(3, 3, 4, 5), (7,), (), (11, 13), (1,)]


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


@pytest.mark.parametrize("num_devices", [1, 3, 4, *map(slow, [2, 5, 8])])
@pytest.mark.parametrize("algorithm", HERE)
def test_the_sum_is_numpys_and_the_same_everywhere(algorithm, num_devices):
    values = values_of(num_devices)
    results = run(values, algorithm=algorithm)
    for place, shape in enumerate(SHAPES):
        expected = np.sum([v[place].astype(np.float64) for v in values], axis=0)
        for of_device in results:
            assert of_device[place].shape == shape
            np.testing.assert_array_equal(of_device[place], results[0][place])
        np.testing.assert_allclose(results[0][place], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.5, 0.2, 0.2, 0.1]])
@pytest.mark.parametrize("algorithm", HERE)
def test_weights_make_it_a_mean(algorithm, weights):
    values = values_of(4)
    results = run(values, algorithm=algorithm, weights=weights)
    for place in range(len(SHAPES)):
        expected = np.average(
            [v[place].astype(np.float64) for v in values], axis=0, weights=weights
        )
        for of_device in results:
            np.testing.assert_array_equal(of_device[place], results[0][place])
        np.testing.assert_allclose(results[0][place], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_averaged_states_are_the_same_everywhere(num_devices):
    values = values_of(num_devices)
    weights = [0.5, 0.3, 0.2] if num_devices == 3 else [1.0]
    devices = [f"/CPU:{i}" for i in range(num_devices)]
    tensors = [[tf.constant(value) for value in of_device] for of_device in values]
    results = average_states(tensors, weights, devices)
    for place, value in enumerate(values[0]):
        expected = np.average([v[place] for v in values], axis=0, weights=weights)
        for of_device in results:
            assert of_device[place].dtype == value.dtype
            np.testing.assert_array_equal(of_device[place], results[0][place])
        np.testing.assert_allclose(results[0][place], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_towers", [3, 5, 7])
def test_states_on_which_all_agree_stay_what_they_are_to_the_bit(num_towers):
    """A thousandfold mean of what never changes must not wander."""
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
@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_half_width_rounds_no_more_than_bfloat16_does(algorithm, num_devices):
    values = values_of(num_devices)
    results = run(values, algorithm=algorithm, dtype=tf.bfloat16)
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
    assert any(
        np.any(results[0][place] != np.sum([v[place] for v in values], axis=0))
        for place in range(len(SHAPES))
    ), "nothing was rounded: the narrow type did not travel"


@pytest.mark.parametrize("algorithm", HERE)
def test_not_finite_numbers_survive(algorithm):
    values = values_of(3)
    values[1][0][0, 0, 0, 0] = np.nan
    results = run(values, algorithm=algorithm)
    for of_device in results:
        assert np.isnan(of_device[0][0, 0, 0, 0])


@pytest.mark.parametrize("weights", [[1 / 3] * 3, [0.5, 0.2, 0.3]])
def test_a_star_may_end_on_one_device_that_is_no_tower(weights):
    values = values_of(3)
    devices = [f"/CPU:{i}" for i in range(3)]
    tensors = [[tf.constant(x) for x in of_device] for of_device in values]
    [mean] = all_reduce(tensors, devices, weights=weights, targets=["/CPU:7"])
    for place, found in enumerate(mean):
        expected = np.average([v[place] for v in values], axis=0, weights=weights)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_nccl_is_refused_without_two_gpus():
    with pytest.raises(ConfigError, match="nccl with 1 GPU"):
        check_algorithm("nccl", ["/GPU:0"], None)
    with pytest.raises(ConfigError, match="nccl with 0 GPU"):
        check_algorithm("nccl", ["/CPU:0", "/CPU:1"], None)
    check_algorithm("nccl", ["/GPU:0", "/GPU:1"], tf.float32)
    check_algorithm("ring", ["/CPU:0"], tf.bfloat16)


def test_nccl_is_refused_in_bfloat16_which_it_does_not_add():
    with pytest.raises(ConfigError, match="all_reduce_dtype=bfloat16"):
        check_algorithm("nccl", ["/GPU:0", "/GPU:1"], tf.bfloat16)


@pytest.mark.parametrize("read", range(3))
def test_who_reads_one_result_of_nccl_runs_all_of_its_operations(read):
    """TensorFlow prunes those that nobody reads; the others would wait for ever."""
    devices = [f"/GPU:{i}" for i in range(3)]

    def first_copy_alone():
        tensors = [[tf.ones([4])] for _ in devices]
        return all_reduce(tensors, devices, algorithm="nccl")[read]

    graph = tf.function(first_copy_alone).get_concrete_function().graph
    pruned = tf.compat.v1.graph_util.extract_sub_graph(
        graph.as_graph_def(), [graph.outputs[0].op.name]
    )
    assert sum(node.op == "NcclAllReduce" for node in pruned.node) == len(devices)


def test_results_of_one_operation_are_added_by_nccl_under_names_of_their_own():
    """A tower that XLA compiles is one operation, whatever its vectors."""
    devices = [f"/GPU:{i}" for i in range(2)]

    def means():
        tensors = [tf.split(tf.ones([4]), 2) for _ in devices]
        return all_reduce(tensors, devices, algorithm="nccl")

    graph = tf.function(means, autograph=False).get_concrete_function().graph
    every = [op for op in graph.get_operations() if op.type == "NcclAllReduce"]
    names = [op.get_attr("shared_name") for op in every]
    assert sorted(map(names.count, set(names))) == [2, 2]
