"""Grappler, TensorFlow's graph optimizer: once for a trace, not once for each copy.

Before the first step it takes longer than everything else, and longer with each tower:
its passes go over the operations of all towers, and over those of the loop. What a step
on a CPU gains by it is within a tower: bias and activation are fused with the
convolution or matrix product before them.
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer

CPU = "/device:CPU:0"

OFF = rewriter_config_pb2.RewriterConfig.OFF


def optimized_for_cpu(
    definition: graph_pb2.GraphDef, outputs: Sequence[str]
) -> graph_pb2.GraphDef:
    """The graph as Grappler optimizes it for a CPU.

    Args:
        definition: a graph without devices; the functions that it calls stay as they
            are.
        outputs: names of operations, which keep them.
    """
    graph = meta_graph_pb2.MetaGraphDef(graph_def=definition)
    for node in graph.graph_def.node:
        node.device = CPU
    # A batch normalization stays apart from its activation, as in a whole step: fused,
    # the two would want a multiple of 4 channels.
    kept = [x.name for x in definition.node if x.op.startswith("FusedBatchNorm")]
    graph.collection_def["train_op"].node_list.value.extend([*outputs, *kept])
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    options.min_graph_nodes = -1  # however small it is
    options.function_optimization = OFF
    optimized = tf_optimizer.OptimizeGraph(config, graph, verbose=False)
    for node in optimized.node:
        node.device = ""
    return optimized


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Functions that are called here, eagerly or in a graph that is traced, are not
    optimized. One thread at a time."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
        )
