"""How the step is compiled, chosen in one place.

A step on CPUs is a function that the loop calls: the rewriting for oneDNN follows the
topological order of operations, which a loop does not have, and occasionally misses
those that depend on their forward part, such as `MaxPoolGrad`. Grappler, TensorFlow's
graph optimizer, takes longer than everything else before the first step, and longer
with each tower; what a step gains by it is within a tower (bias and activation are
fused with the convolution before them). So it optimizes the one trace that all towers
share, where that is possible. On GPUs the step is part of the loop, because a call
would copy the batch through the host.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer

CPU = "/device:CPU:0"

OFF = rewriter_config_pb2.RewriterConfig.OFF


@dataclasses.dataclass(frozen=True)
class Compilation:
    """How the step is compiled.

    Attributes:
        calls_step: the loop calls the step, which is then optimized by itself.
        optimizes_towers: Grappler optimizes the towers' trace, and nothing else.
        waits: the host asks after each step whether it was taken. On CPUs that is
            cheaper than to select between old and new values.
        xla: XLA compiles the forward and backward part of each tower, and on GPUs the
            update, where it saves launches.
    """

    calls_step: bool
    optimizes_towers: bool
    waits: bool
    xla: bool = False

    def step_options(self):
        """A context in which the step is traced."""
        return disabled() if self.optimizes_towers else contextlib.nullcontext()

    def loop_options(self):
        """A context in which the loop is called: one of a call has nothing to
        optimize."""
        return disabled() if self.calls_step else contextlib.nullcontext()


CPU_TOWERS = Compilation(calls_step=True, optimizes_towers=True, waits=True)
CPU_STEP = Compilation(calls_step=True, optimizes_towers=False, waits=True)
GPU_LOOP = Compilation(calls_step=False, optimizes_towers=False, waits=False)


def choose(
    devices: Sequence[str],
    models: Sequence[keras.Model],
    *,
    inspects: bool = False,
    xla: bool = False,
) -> Compilation:
    """The compilation of a step.

    Args:
        devices: of the towers.
        models: the network of each phase.
        inspects: whether layers are computed one by one, see `sharding`.
        xla: whether XLA compiles the towers.
    """
    if not all("CPU" in device for device in devices):
        return dataclasses.replace(GPU_LOOP, xla=xla)
    # TensorFlow executes fused operations in 16 bits, and refuses to copy them.
    dtypes = {layer.compute_dtype for model in models for layer in model.layers}
    if xla or inspects or not dtypes <= {"float32", "float64"}:
        return dataclasses.replace(CPU_STEP, xla=xla)
    return CPU_TOWERS


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
