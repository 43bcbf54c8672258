"""Memory is accounted as it is used."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from benchmarks.graphs.memory import step_memory

KB = 250 * 4  # bytes of a float32 vector of 250 elements


def traced(function, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return tf.function(function, autograph=False).get_concrete_function(*specs).graph


def of_cpu(counts):
    return {device: size // KB for device, size in counts.items() if size >= KB}


def test_what_the_backward_part_reads_is_kept():
    weight = tf.Variable(tf.ones([250, 250]))

    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.linalg.matmul(x, weight)  # read by the backward part of cosh
            unread = tf.math.ceil(x) * 3.0
            loss = tf.reduce_sum(tf.math.cosh(hidden)) + tf.reduce_sum(unread)
        return tape.gradient(loss, weight)

    graph = traced(step, [8, 250])
    kept, most = step_memory(graph)
    assert of_cpu(kept) == {"/CPU:0": 8}
    # hidden, its gradient (first sinh, then the product) and that of the weight.
    assert of_cpu(most)["/CPU:0"] >= 8 + 250
    kept, most = step_memory(graph, owns_arguments=True)
    assert of_cpu(kept) == {"/CPU:0": 16}  # x as well


def test_loops_and_branches_count_what_is_inside():
    def loop(x):
        return tf.while_loop(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, tf.reduce_mean(tf.tile(y, [10])) + y),
            (0, x),
        )[1]

    def branch(x):
        return tf.cond(x[0] > 0, lambda: tf.reduce_sum(tf.tile(x, [10])), lambda: 0.0)

    for function in (loop, branch):
        _, most = step_memory(traced(function, [250]))
        assert 10 <= of_cpu(most)["/CPU:0"] <= 12


# A fresh child, whose peak is the training's, not that of other tests. Allocators that
# keep what was freed (oneDNN's, and the C library's where it does not map) would show
# what was ever reserved; and towers that share two threads reach their peaks in turn.
ALONE = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "TF_NUM_INTEROP_THREADS": "4",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy,num_towers,group_size",
    [
        ("towers", 4, 1),
        ("replicated", 4, 1),
        ("async_towers", 4, 1),
        ("model_parallel", 4, 2),
    ],
)
def test_the_accounts_agree_with_the_peak_of_the_process(
    strategy, num_towers, group_size
):
    child = pathlib.Path(__file__).with_name("peak_memory.py")
    found = subprocess.run(
        [sys.executable, child, strategy, str(num_towers), str(group_size)],
        env=os.environ | ALONE,
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["accounted"] > 5e8, "too little to tell from what else is allocated"
    assert result["accounted"] == pytest.approx(result["peak"], rel=0.2), result
