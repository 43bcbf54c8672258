"""Memory is accounted as it is used."""

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
