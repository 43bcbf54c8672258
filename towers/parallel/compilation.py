"""Compilation of the step, and of what towers share.

A step on CPUs is a function that the loop calls: the rewriting for oneDNN follows the
topological order of operations, which a loop does not have, and occasionally misses
operations that depend on their forward part, such as `MaxPoolGrad`. Grappler,
TensorFlow's graph optimizer, takes most of the time before the first step, and more
with each tower; a step gains only from rewriting within a tower (bias and activation
are fused with the convolution before them). So it optimizes the one trace that all
towers share, if possible. On GPUs the step is part of the loop, because a call would
copy the batch through the host.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2

from towers import tf_internals
from towers.messages import one_line
from towers.models.layers.cpu_kernels import xla_fault
from towers.parallel.devices import CPU, GPU, Device

OFF = rewriter_config_pb2.RewriterConfig.OFF


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Compilation options of the step."""

    device: Device  # CPU or GPU, for which the step is traced.
    optimizes_towers: bool = False  # Grappler optimizes the towers, and nothing else.
    # XLA compiles the forward and backward part of each tower, and the update if
    # `device.updates_by_xla`.
    xla: bool = False
    whole_step: bool = False  # Input, tower and update are one program of XLA.

    def step_options(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the step is traced."""
        return (
            grappler_disabled() if self.optimizes_towers else contextlib.nullcontext()
        )

    def loop_options(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the loop is called."""
        # A loop that only calls the step has nothing to optimize.
        return (
            grappler_disabled()
            if self.device.waits_for_host
            else contextlib.nullcontext()
        )


CPU_TOWERS = Compilation(CPU, optimizes_towers=True)
CPU_STEP = Compilation(CPU)
GPU_LOOP = Compilation(GPU)


def choose(
    devices: Sequence[str],
    models: Sequence[keras.Model],
    *,
    inspects: bool = False,
    xla: bool = False,
    whole_step: bool = False,
) -> Compilation:
    """Choose how the step of some networks is compiled.

    `inspects` says that layers are computed one by one, see `sharding`.
    """
    if not CPU.has(devices):
        return dataclasses.replace(GPU_LOOP, xla=xla, whole_step=whole_step)
    # TensorFlow executes fused operations in 16 bits, and refuses to copy them.
    dtypes = {layer.compute_dtype for model in models for layer in model.layers}
    if xla or inspects or not dtypes <= {"float32", "float64"}:
        return dataclasses.replace(CPU_STEP, xla=xla, whole_step=whole_step)
    return CPU_TOWERS


def why_not_xla(
    model: keras.Model,
    loss_fn: Callable[..., tf.Tensor],
    labels: tf.TensorSpec,
    device: str,
    deterministic: bool = False,
) -> str:
    """Return why XLA cannot compile a network on the device of a tower, "" if it can.

    The forward and backward part is tried on two images; `labels` is the type of the
    label of one image.
    """

    def gradients(params, state, inputs, labels):
        with tf.GradientTape() as tape:
            tape.watch(params)
            logits, _ = model.stateless_call(params, state, inputs, training=True)
            loss = tf.reduce_mean(loss_fn(logits, labels))
        return tape.gradient(loss, params)

    def zeros(x, *batch):
        return tf.zeros([*batch, *x.shape[len(batch) :]], x.dtype)

    trial = tf.function(gradients, jit_compile=True, autograph=False)
    kind = tf.DeviceSpec.from_string(device).device_type
    if not tf.config.list_logical_devices(kind):
        return f"TensorFlow has no {kind} here"
    if fault := xla_fault(kind):
        return fault
    try:
        with tf.device(device):
            inputs = [zeros(x, 2) for x in model.inputs]
            arguments = (
                [zeros(x) for x in model.trainable_variables],
                [zeros(x) for x in model.non_trainable_variables],
                inputs if len(inputs) > 1 else inputs[0],
                tf.zeros([2, *labels.shape], labels.dtype),
            )
            graph = trial.get_concrete_function(*arguments).graph
            pools = any(op.type == "MaxPoolGrad" for op in graph.get_operations())
            if deterministic and pools:
                return "its gradient of max pooling is not deterministic on GPUs"
            return why_not_lowered(trial, arguments, kind)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        return one_line(str(error), 120)


def why_not_lowered(function: Any, arguments: Sequence[Any], device_kind: str) -> str:
    """Return why XLA cannot compile a `tf.function`, "" if it can."""
    try:
        lower = function.experimental_get_compiler_ir(*arguments)
        lower(stage="hlo", platform_name=device_kind)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        return one_line(str(error).split("_JIT: ")[-1], 120)
    return ""


def optimized_for_cpu(
    definition: graph_pb2.GraphDef, outputs: Sequence[str]
) -> graph_pb2.GraphDef:
    """Return a graph without devices as Grappler optimizes it for a CPU.

    Operations whose names are `outputs` stay, and functions do not change.
    """
    graph = meta_graph_pb2.MetaGraphDef(graph_def=definition)
    for node in graph.graph_def.node:
        node.device = "/device:CPU:0"
    # Batch normalization is not fused with its activation, as in a whole step: fused,
    # it needs a multiple of 4 channels.
    kept = [x.name for x in definition.node if x.op.startswith("FusedBatchNorm")]
    graph.collection_def["train_op"].node_list.value.extend([*outputs, *kept])
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    options.min_graph_nodes = -1  # No graph is too small.
    options.function_optimization = OFF
    optimized = tf_internals.optimize_graph(config, graph)
    for node in optimized.node:
        node.device = ""
    return optimized


@contextlib.contextmanager
def grappler_disabled() -> Iterator[None]:
    """Switch Grappler off for functions that are called inside; not thread-safe."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
        )


class TracedOnce:
    """A pure function of structures of tensors or None, traced once per signature.

    Tracing a tower's forward and backward part takes Python much longer than copying
    the operations, and the parts of the towers differ only in their devices. A call
    adds the operations to the graph that is traced, on the device in scope, except
    those that no result needs, which is faster than a call of a `tf.function`.
    `optimize` is applied once, for all copies.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        optimize: Callable[..., graph_pb2.GraphDef] | None = None,
    ):
        self._function = tf.function(function, autograph=False)
        self._optimize = optimize
        self._read = functools.cache(self._read_trace)

    def __call__(self, *arguments: Any, name: str) -> Any:
        """Return the results for structures of tensors; `name` is their scope."""
        trace = self._function.get_concrete_function(*specs(arguments))
        results, computed, definition = self._read(trace)
        graph = tf.compat.v1.get_default_graph()
        inputs = [x for x in tf.nest.flatten(arguments) if x is not None]
        inputs += trace.captured_inputs
        values = {
            placeholder.name: graph.capture(value)
            for placeholder, value in zip(trace.inputs, inputs, strict=True)
        }
        # The import would create other function objects, without their graphs.
        tf_internals.copy_functions(trace.graph, graph)
        read = {x for node in definition.node for x in node.input}
        copies = tf.graph_util.import_graph_def(
            definition,
            input_map={k: v for k, v in values.items() if k.split(":")[0] in read},
            return_elements=computed,
            name=name,
        )
        values |= zip(computed, copies, strict=True)
        return tf.nest.map_structure(lambda x: values[x], results)

    def _read_trace(self, trace):
        """Return names of the results, of those computed, and all needed operations."""
        # The outputs are identities, which a copy does not need.
        sources = [_source(x) for x in trace.outputs]
        results = [x.name for x in sources]
        inputs = {x.name: x.op.name for x in trace.inputs}
        computed = [x for x in dict.fromkeys(results) if x not in inputs]

        graph = trace.graph
        wanted = [graph.get_tensor_by_name(x).op for x in computed]
        wanted += graph.control_outputs
        names = tuple(op.name for op in wanted)
        needed = {op.name for op in needed_operations(wanted)}
        whole = graph.as_graph_def()
        definition = graph_pb2.GraphDef(
            node=[node for node in whole.node if node.name in needed],
            library=whole.library,
            versions=whole.versions,
        )
        if self._optimize is not None:
            definition = self._optimize(definition, names)
        given = set(inputs.values())
        nodes = [node for node in definition.node if node.name not in given]
        definition = graph_pb2.GraphDef(
            node=_merge_constants(nodes, names, given), versions=definition.versions
        )
        structure = trace.structured_outputs
        return tf.nest.pack_sequence_as(structure, results), computed, definition


def specs(arguments: Any) -> Any:
    """Return the types of a structure of tensors or None."""
    return tf.nest.map_structure(
        lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), arguments
    )


def needed_operations(
    operations: Iterable[tf.Operation], known: Set[tf.Operation] = frozenset()
) -> set[tf.Operation]:
    """Return operations and all that they need, except known ones and their inputs."""
    pending: list[Any] = list(operations)
    needed: set[tf.Operation] = set()
    while pending:
        op = pending.pop()
        if op not in needed and op not in known:
            needed.add(op)
            pending += [x.op for x in op.inputs]
            pending += op.control_inputs
    return needed


def compute_in_order(tensors: Sequence[tf.Tensor]) -> None:
    """Let the graph that is traced compute tensors one after the other.

    TensorFlow may begin with any operation whose inputs are there, and leaves the
    gradients of parameters for the end of the backward pass. With these control edges
    an operation that only later tensors need waits for earlier ones.
    """
    done: set[tf.Operation] = set()
    for before, tensor in zip([None, *tensors], tensors, strict=False):
        needed = needed_operations([tensor.op], done)
        done |= needed
        if before is None:
            continue
        for op in needed:
            inputs = [x.op for x in op.inputs]
            if inputs and not any(x in needed and x.inputs for x in inputs):
                tf_internals.add_control_input(op, before.op)


def _merge_constants(nodes, outputs, given):
    """Merge constants of the same value, except outputs; do not wait for `given`."""
    first, same, kept = {}, {}, []
    for node in nodes:
        waits_for_given = [x for x in node.input if x[0] == "^" and x[1:] in given]
        for name in waits_for_given:
            node.input.remove(name)
        if node.op == "Const" and not node.input and node.name not in outputs:
            value = node.attr["value"].SerializeToString()
            same[node.name] = first.setdefault(value, node.name)
        if same.get(node.name, node.name) == node.name:
            kept.append(node)
    for node in kept:
        for index, name in enumerate(node.input):
            plain = name.removeprefix("^")
            mark = name[: len(name) - len(plain)]  # "^" of a control dependency
            node.input[index] = mark + same.get(plain, plain)
    return kept


def _source(tensor):
    op = tensor.op
    return op.inputs[0] if op.type == "Identity" and not op.control_inputs else tensor
