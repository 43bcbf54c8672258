"""Grappler optimizes a trace once, and leaves the rest of a step on a CPU alone."""

import networks
import pytest
import tensorflow as tf
from keras import layers
from marks import slow
from recipes import Recipe, create_trainer

from benchmarks.graphs.executed import partition_graphs, step_on_cpus
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.towers import towers


def dense_network(precision):
    model = networks.model_of(
        layers.Conv2D(8, 3, name="conv1", dtype=precision),
        layers.ReLU(name="relu1", dtype=precision),
        layers.Flatten(name="flatten"),
        layers.Dense(8, name="dense1", dtype=precision),
        layers.ReLU(name="relu2", dtype=precision),
        layers.Dense(networks.NUM_CLASSES, name="logits"),
        shape=networks.IMAGE_SHAPE,
    )
    return networks.Network(model, [], {})


def executed(trainer):
    return [node.op for graph in step_on_cpus(trainer) for node in graph.node]


def fused_by_tensorflow(dtype):
    """Return whether this CPU has a fused product; bfloat16 needs AVX-512."""

    @tf.function(autograph=False)
    def function(x):
        return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, x), x[0]))

    graphs = partition_graphs(lambda: function(tf.zeros([8, 8], dtype)))
    return any("FusedMatMul" in node.op for graph in graphs for node in graph.node)


@pytest.mark.parametrize(
    "cls,precision,options",
    [
        (towers, "float32", {}),
        slow(towers, "mixed_bfloat16", {}),
        slow(model_parallel, "float32", {"group_size": 2}),
    ],
)
def test_bias_and_activation_are_fused_in_the_step_that_is_executed(
    cls, precision, options
):
    if precision == "mixed_bfloat16" and not fused_by_tensorflow(tf.bfloat16):
        pytest.skip("TensorFlow fuses no products in bfloat16 on this CPU")
    batches, network = networks.random_batches(1, 8), dense_network(precision)
    trainer = create_trainer(cls, network, Recipe(), batches, 2, **options)
    operations = executed(trainer)
    assert sum("FusedMatMul" in op for op in operations) >= 2
    assert "Relu" not in operations
    assert fused_by_tensorflow(tf.float32)
