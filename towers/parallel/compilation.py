"""Compilation of the step, chosen in one place.

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
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2

from towers import tf_internals
from towers.messages import one_line
from towers.models.layers.cpu_kernels import xla_fault

CPU = "/device:CPU:0"

OFF = rewriter_config_pb2.RewriterConfig.OFF


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Compilation options of the step."""

    # The loop calls the step, which is then optimized by itself, and the host asks
    # after each step whether it was taken: cheaper there than to select between values.
    on_cpus: bool
    # Grappler optimizes the towers' trace, and nothing else.
    optimizes_towers: bool = False
    # XLA compiles the forward and backward part of each tower, and the update on GPUs.
    xla: bool = False

    def step_options(self):
        """A context in which the step is traced."""
        return disabled() if self.optimizes_towers else contextlib.nullcontext()

    def loop_options(self):
        """A context in which the loop is called: a loop that only calls the step has
        nothing to optimize.
        """
        return disabled() if self.on_cpus else contextlib.nullcontext()


CPU_TOWERS = Compilation(on_cpus=True, optimizes_towers=True)
CPU_STEP = Compilation(on_cpus=True)
GPU_LOOP = Compilation(on_cpus=False)


def choose(
    devices: Sequence[str],
    models: Sequence[keras.Model],
    *,
    inspects: bool = False,
    xla: bool = False,
) -> Compilation:
    """The compilation of a step with the network of each phase; `inspects` says whether
    layers are computed one by one, see `sharding`.
    """
    if not all("CPU" in device for device in devices):
        return dataclasses.replace(GPU_LOOP, xla=xla)
    # TensorFlow executes fused operations in 16 bits, and refuses to copy them.
    dtypes = {layer.compute_dtype for model in models for layer in model.layers}
    if xla or inspects or not dtypes <= {"float32", "float64"}:
        return dataclasses.replace(CPU_STEP, xla=xla)
    return CPU_TOWERS


def why_not_xla(
    model: keras.Model,
    loss_fn: Callable[..., tf.Tensor],
    labels: tf.TensorSpec,
    device: str,
    deterministic: bool = False,
) -> str:
    """Why XLA cannot compile the forward and backward part of a network on the device
    of a tower, in a line; empty where it can. Found by a trial on two images; `labels`
    is the type of one image's.
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
        return f"there is no {kind}"
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
            lower = trial.experimental_get_compiler_ir(*arguments)
            lower(stage="hlo", platform_name=kind)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        return one_line(str(error).split("_JIT: ")[-1], 120)  # the first operation
    return ""


def optimized_for_cpu(
    definition: graph_pb2.GraphDef, outputs: Sequence[str]
) -> graph_pb2.GraphDef:
    """A graph without devices as Grappler optimizes it for a CPU. `outputs` are names
    of operations that stay; the functions that it calls do not change.
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
    optimized = tf_internals.optimize_graph(config, graph)
    for node in optimized.node:
        node.device = ""
    return optimized


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Functions that are called here, eagerly or in a graph that is traced, are not
    optimized. One thread at a time.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
        )


class TracedOnce:
    """A pure function of (key, *structures of tensors or None) that is traced once per
    key and signature; `optimize` is applied once, for all copies.

    Tracing a tower's forward and backward part takes Python much longer than copying
    the operations, and the towers' parts differ in their devices alone. A call in a
    graph copies the operations there, without those that no result needs, onto the
    device in scope. They are part of that graph, so a step is as fast as if they had
    been traced there; a call of a `tf.function` would make it slower. An eager call is
    one of the function itself.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        optimize: Callable[..., graph_pb2.GraphDef] | None = None,
    ):
        self._function, self._optimize, self._traces = function, optimize, {}

    def __call__(self, key: Hashable, *arguments: Any, name: str) -> Any:
        """The results of the function of a plain value and tensors; `name` is the scope
        of the copied operations.
        """
        if tf.executing_eagerly():
            return self._function(key, *arguments)
        specs = tf.nest.map_structure(_spec, arguments)
        signature = key, tuple(tf.nest.flatten(specs))
        if signature not in self._traces:
            call = tf.function(functools.partial(self._function, key), autograph=False)
            self._traces[signature] = self._read(call.get_concrete_function(*specs))
        function, results, computed, definition = self._traces[signature]

        graph = tf.compat.v1.get_default_graph()
        inputs = [x for x in tf.nest.flatten(arguments) if x is not None]
        inputs += function.captured_inputs
        values = {
            placeholder.name: graph.capture(value)
            for placeholder, value in zip(function.inputs, inputs, strict=True)
        }
        # The import would make other objects of them, which have no graph.
        tf_internals.copy_functions(function.graph, graph)
        read = {x for node in definition.node for x in node.input}
        copies = tf.graph_util.import_graph_def(
            definition,
            input_map={k: v for k, v in values.items() if k.split(":")[0] in read},
            return_elements=computed,
            name=name,
        )
        values |= zip(computed, copies, strict=True)
        return tf.nest.map_structure(lambda x: values[x], results)

    def _read(self, function):
        """The function; names of its results and of the computed ones; the operations
        that these need, and operations with side effects.
        """
        # The outputs are identities, which a copy does without.
        sources = [_source(x) for x in function.outputs]
        results = [x.name for x in sources]
        inputs = {x.name: x.op.name for x in function.inputs}
        computed = [x for x in dict.fromkeys(results) if x not in inputs]

        graph = function.graph
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
        structure = function.structured_outputs
        return (
            function,
            tf.nest.pack_sequence_as(structure, results),
            computed,
            definition,
        )


def needed_operations(
    operations: Iterable[tf.Operation], known: Set[tf.Operation] = frozenset()
) -> set[tf.Operation]:
    """All that run where these are wanted, these included, but for the known ones and
    what those need.
    """
    pending, needed = list(operations), set()
    while pending:
        op = pending.pop()
        if op not in needed and op not in known:
            needed.add(op)
            pending += [x.op for x in op.inputs]
            pending += op.control_inputs
    return needed


def compute_in_order(tensors: Sequence[tf.Tensor]) -> None:
    """Has operations of a graph that is traced compute tensors one after the other.

    TensorFlow may begin with any operation whose inputs are there, and leaves the
    gradients of parameters for the end of the backward pass. Here what a later tensor
    needs, and none before it, waits for those before it.
    """
    done, before = set(), None
    for operation in [tensor.op for tensor in tensors]:
        needed = needed_operations([operation], done)
        for op in needed if before else ():
            inputs = [x.op for x in op.inputs]
            if inputs and not any(x in needed and x.inputs for x in inputs):
                tf_internals.add_control_input(op, before)
        done |= needed
        before = operation


def _merge_constants(nodes, outputs, given):
    """The nodes with one constant for each value, besides those that are outputs.

    Grappler has a constant wait for the inputs that it was made of; not for those that
    are given.
    """
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
            mark = "^" if name.startswith("^") else ""  # of a control dependency
            name = name.removeprefix("^")
            node.input[index] = mark + same.get(name, name)
    return kept


def _spec(tensor):
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)


def _source(tensor):
    op = tensor.op
    return op.inputs[0] if op.type == "Identity" and not op.control_inputs else tensor
