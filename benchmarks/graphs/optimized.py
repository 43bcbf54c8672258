"""The loop body of a step for GPUs as Grappler, TensorFlow's optimizer, leaves it.

Grappler takes a virtual cluster with the properties of an H100, so no GPU is needed. A
traced graph says less: kernels take some arguments from host memory, and Grappler moves
operations.
"""

import dataclasses

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler import cluster, tf_optimizer

from benchmarks.graphs.kernels import find_kernel, host_arguments
from benchmarks.graphs.operations import called, running
from benchmarks.graphs.traced import Traced

LOOPS = ("While", "StatelessWhile")
CALLS = ("If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
H100 = {"architecture": "9.0", "cuda": "12050", "cudnn": "9030"}
DEVICE = "/job:localhost/replica:0/task:0/device:"
# Batch normalization in NHWC, whose kernels for 16 bits compute in NCHW.
TRANSPOSES = {"FusedBatchNormV3": 2, "FusedBatchNormGradV3": 3}


@dataclasses.dataclass(frozen=True)
class Optimized:
    """An optimized loop body.

    Attributes:
        graph: of the operations.
        to_host, to_gpu: the tensors and control edges that go from a GPU to the host
            and back in a step, by what they are.
        between_gpus: control edges from a GPU to another one.
    """

    graph: tf.Graph
    to_host: list[str]
    to_gpu: list[str]
    between_gpus: list[str]

    def on_gpus(self, *types: str) -> list[tf.Operation]:
        """The operations of some types on GPUs; by default all."""
        operations = [op for op in self.graph.get_operations() if "GPU" in op.device]
        return [op for op in operations if not types or op.type in types]

    def num_hidden_transposes(self, persistent: bool) -> int:
        """Transposes within the kernels of batch normalization in training.

        Args:
            persistent: whether TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT is 1: for 16
                bits with a multiple of four channels cuDNN then takes NHWC.
        """
        count = 0
        for op in self.on_gpus(*TRANSPOSES):
            channels, is_half = op.inputs[0].shape[-1], op.get_attr("T").size == 2
            is_nhwc = op.get_attr("data_format") == b"NHWC" and is_half
            if is_nhwc and op.get_attr("is_training"):
                is_free = persistent and channels is not None and channels % 4 == 0
                count += 0 if is_free else TRANSPOSES[op.type]
        return count


def optimized(trained: Traced) -> Optimized:
    """The loop body of the last phase of a synchronous trainer."""
    graph = trained.calls()[-1].graph
    [loop] = [op for op in graph.get_operations() if op.type in LOOPS]
    body = called(graph, loop)["body"]
    kept, whole = {op.name for op in running(body)}, body.as_graph_def()
    nodes = [node for node in whole.node if node.name in kept]
    before = graph_pb2.GraphDef(
        node=nodes, library=whole.library, versions=whole.versions
    )
    devices = {_place("CPU", 0), *(_place("GPU", i) for i in range(trained.num_gpus))}
    # A variable of the loop lies where its initial value does, an argument on the host.
    homes = {
        x.op.name: begin.op.device or (begin.op.type == "Placeholder") * "/CPU:0"
        for x, begin in zip(body.inputs, loop.inputs, strict=True)
    }
    for node in before.node:
        spec = tf.DeviceSpec.from_string(homes.get(node.name) or node.device)
        node.device = _place(spec.device_type or "GPU", spec.device_index or 0)
    outputs = {x.op.name for x in body.outputs} | {x.name for x in body.control_outputs}
    meta = meta_graph_pb2.MetaGraphDef(graph_def=before)
    meta.collection_def["train_op"].node_list.value.extend(sorted(outputs))
    settings = config_pb2.ConfigProto()
    settings.graph_options.rewrite_options.min_graph_nodes = -1
    after = tf_optimizer.OptimizeGraph(
        settings, meta, verbose=False, cluster=_cluster(devices)
    )
    return _read(after)


def _place(device_type, index):
    return f"{DEVICE}{device_type}:{index if device_type == 'GPU' else 0}"


def _cluster(names):
    gpu = device_properties_pb2.DeviceProperties(
        type="GPU",
        vendor="NVIDIA",
        model="H100",
        frequency=1980,
        num_cores=132,
        bandwidth=3350 * 10**6,
        memory_size=78 << 30,
        shared_memory_size_per_multiprocessor=233472,
        environment=H100,
    )
    cpu = device_properties_pb2.DeviceProperties(
        type="CPU", frequency=3000, num_cores=16, memory_size=100 << 30
    )
    return cluster.Cluster(
        devices=[
            device_properties_pb2.NamedDevice(
                name=name, properties=gpu if "GPU" in name else cpu
            )
            for name in sorted(names)
        ]
    )


def _read(graph_def):
    for node in graph_def.node:  # it may name an operation outside of the body
        node.attr.pop("_class", None)
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    on_host, to_host, to_gpu, between = {}, {}, {}, {}
    for op in graph.get_operations():
        kept = _memory(op)[1]
        for index, tensor in enumerate(op.outputs):
            on_host[tensor.ref()] = index in kept
    for op in graph.get_operations():
        wanted, on_gpu = _memory(op)[0], "GPU" in op.device
        for index, x in enumerate(op.inputs):
            is_handle = x.dtype in (tf.resource, tf.variant)
            if not is_handle and on_host[x.ref()] != (index in wanted):
                edges = to_host if index in wanted else to_gpu
                edges[f"{x.dtype.name}{x.shape} of {x.name} for {op.type}"] = None
        for source in op.control_inputs:
            edge = f"control edge from {source.name} to {op.name}"
            if source.type == "Placeholder" or source.device == op.device:
                continue
            from_gpu = "GPU" in source.device
            edges = between if from_gpu and on_gpu else to_gpu if on_gpu else to_host
            edges[edge] = None
    return Optimized(graph, list(to_host), list(to_gpu), list(between))


def _memory(op):
    """Places of the inputs that an operation takes from host memory, and of the outputs
    that it leaves there."""
    if op.type == "Placeholder" and op.outputs[0].dtype == tf.int32:
        return (), {0}
    if "GPU" not in op.device:
        return range(len(op.inputs)), range(len(op.outputs))
    kernel = find_kernel(op)
    if kernel is None:
        assert op.type in (*CALLS, "Placeholder"), (
            f"{op.type} {op.name} has no kernel on a GPU"
        )
        return (), ()
    return host_arguments(op, kernel)
