"""Graphs that TensorFlow executed, per device: what runs where, after its rewrites."""

import collections
from collections.abc import Callable, Iterable, Mapping

import tensorflow as tf
from tensorflow.python.eager import context

from benchmarks.graphs.operations import called
from towers.parallel.devices import Devices

# Kinds of heavy operations, the first one counts that is part of a type's name: oneDNN
# and fusions wrap the name in theirs.
HEAVY = ("BackpropFilter", "BackpropInput", "Conv2D", "MatMul")
# They compute nothing, wherever they are.
NO_COMPUTE = ("NoOp", "Identity")


def partition_graphs(call: Callable[[], object]) -> list:
    """The graphs per device that TensorFlow executed during a call."""
    context.context().enable_graph_collection()
    try:
        call()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    return [g for f in metadata.function_graphs for g in f.partition_graphs]


def step_on_cpus(trainer) -> list:
    """The graphs of one executed step as the loop of a CPU calls it: as a function,
    whose graphs a call of the loop does not list."""
    batches = trainer.feed.batches_of(trainer.step)
    with trainer.compilation.step_options():
        metrics = trainer.train_step.zero_metrics()
        return partition_graphs(lambda: trainer.loop._step_call(0, batches, metrics))


def executed_step(trainer, devices: Devices) -> list:
    """The graphs of one executed step."""
    if devices.kind == "CPU" and hasattr(trainer, "loop"):
        return step_on_cpus(trainer)
    return partition_graphs(lambda: trainer.train(1))


def short_device(name: str) -> str:
    """CPU:0 of /job:localhost/replica:0/task:0/device:CPU:0; empty where it is open."""
    found = tf.DeviceSpec.from_string(name)
    return f"{found.device_type}:{found.device_index}" if found.device_type else ""


def heavy_operations(graphs: Iterable) -> dict[str, collections.Counter]:
    """Device -> the number of its convolutions and products of each kind."""
    counts = collections.defaultdict(collections.Counter)
    for graph in graphs:
        for node in graph.node:
            kind = next((kind for kind in HEAVY if kind in node.op), None)
            if kind:
                counts[short_device(node.device)][kind] += 1
    return dict(counts)


def requested_devices(graphs: Iterable[tf.Graph]) -> dict[str, set[str]]:
    """Name of an operation -> the devices that it is asked onto, of the graphs and of
    the functions that they call; without those that no device is asked for."""
    requested, to_visit, visited = collections.defaultdict(set), list(graphs), set()
    while to_visit:
        graph = to_visit.pop()
        if id(graph) in visited:
            continue
        visited.add(id(graph))
        for operation in graph.get_operations():
            requested[operation.name].add(short_device(operation.device))
            to_visit += called(graph, operation).values()
    return {name: devices for name, devices in requested.items() if "" not in devices}


def moved_operations(
    requested: Mapping[str, set[str]], graphs: Iterable
) -> collections.Counter:
    """Operations that run elsewhere than requested.

    Args:
        requested: of the traced step. In a graph that is executed the name of an
            operation may follow those of the functions around it.
        graphs: those that were executed.
    """
    moved = collections.Counter()
    for graph in graphs:
        for node in graph.node:
            parts, actual = node.name.split("/"), short_device(node.device)
            names = ["/".join(parts[i:]) for i in range(max(1, len(parts) - 1))]
            wanted = next((requested[name] for name in names if name in requested), "")
            if wanted and actual not in wanted and node.op not in NO_COMPUTE:
                moved[f"{node.op} {' or '.join(sorted(wanted))} to {actual}"] += 1
    return moved
