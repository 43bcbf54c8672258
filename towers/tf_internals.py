"""Private parts of TensorFlow 2.21, each in one function."""

import atexit
import contextlib
import functools
import queue
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies
from tensorflow.python.grappler import tf_optimizer


def configure_coordination_service(num_workers: int, heartbeat_secs: float) -> None:
    """Make the first worker serve the heartbeats of all workers."""
    jobs = context.coordination_config_pb2.CoordinatedJob(
        name="worker", num_tasks=num_workers
    )
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=int(1000 * heartbeat_secs),
        shutdown_barrier_timeout_in_ms=1000,
        coordinated_jobs=[jobs],
    )


def set_cluster_value(key: str, value: str) -> None:
    """Store a value in the coordination service."""
    context.context().set_config_key_value(key, value)


def cluster_value(key: str, timeout_ms: int) -> str:
    """Return a value of the coordination service, or raise OpError after a while."""
    return context.context().get_config_key_value(key, timeout_ms)


def report_error_to_cluster(code: int, message: str) -> None:
    """End the operations of the other workers with an error."""
    context.context().report_error_to_cluster(code, message)


def is_op_determinism_enabled() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def optimize_graph(
    options: config_pb2.ConfigProto, graph: meta_graph_pb2.MetaGraphDef
) -> graph_pb2.GraphDef:
    """Return the graph after Grappler."""
    return tf_optimizer.OptimizeGraph(options, graph, verbose=False)


def optimization_barrier(*tensors: tf.Tensor) -> list[tf.Tensor]:
    """Return the tensors, for XLA, once all of them are computed."""
    return gen_xla_ops.xla_optimization_barrier(tensors)


def copy_functions(source: tf.Graph, target: tf.Graph) -> None:
    """Add the functions that a graph calls to another graph.

    They keep their graphs, which `tf.graph_util.import_graph_def` would lose.
    """
    for function in source._functions.values():
        target._add_function_recursive(function)


def add_control_input(operation: tf.Operation, first: tf.Operation) -> None:
    """Make an operation of a traced graph wait for another one."""
    operation._add_control_input(first)


@contextlib.contextmanager
def around_loop(graph: tf.Graph) -> Iterator[None]:
    """Let the results of a loop body inside not wait for its side effects."""
    adds = graph._add_control_dependencies
    graph._add_control_dependencies = False
    try:
        yield
    finally:
        graph._add_control_dependencies = adds


@contextlib.contextmanager
def inside_of_loop(graph: tf.Graph) -> Iterator[None]:
    """Trace inside without the devices in scope, all side effects in order."""
    devices = graph._device_function_stack
    graph._device_function_stack = type(devices)()
    try:
        with AutomaticControlDependencies() as dependencies:
            yield
        graph.control_outputs.extend(dependencies.ops_which_must_run)
    finally:
        graph._device_function_stack = devices


def tflite_files() -> ModuleType:
    """Return functions that read and write .tflite files as objects of the schema."""
    from tensorflow.lite.tools import flatbuffer_utils  # slow to import

    return flatbuffer_utils


# Seconds between checks for other references to the iterators to be deleted, and of
# waiting for deletions before the interpreter ends.
_PAUSE_SECS, _END_SECS = 0.5, 30.0

_dropped: queue.SimpleQueue[Any] = queue.SimpleQueue()
_Iterator = TypeVar("_Iterator")


def delete_in_thread(iterator: _Iterator) -> _Iterator:
    """Return an iterator of `tf.data` that a thread deletes once it is dropped.

    Deleting waits for the reads of an iterator, so a reader in Python that collects it
    as garbage would wait for itself.
    """
    _start_deleting()
    owner: Any = getattr(iterator, "_iterator", iterator)  # of `as_numpy_iterator`
    weakref.finalize(owner, _dropped.put, owner._iterator_resource).atexit = False
    return iterator


@functools.cache
def _start_deleting():
    thread = threading.Thread(target=_delete_resources, daemon=True)
    thread.start()
    atexit.register(_finish_deleting, thread)


def _finish_deleting(thread):
    """Wait for deletions: a thread in TensorFlow breaks an interpreter that ends."""
    _dropped.put(None)
    thread.join(_END_SECS)


def _delete_resources():
    # The last reference deletes a resource. The traceback of a failed step has
    # references too, and may be garbage that a reader is collecting.
    resources = []
    while True:
        with contextlib.suppress(queue.Empty):
            resources.append(_dropped.get(timeout=_PAUSE_SECS if resources else None))
        # Three references: of the list, of x and of the argument.
        resources = [x for x in resources if sys.getrefcount(x) > 3]
        if resources and resources[-1] is None:
            return
