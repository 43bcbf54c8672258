"""What keeps a step from being one program of XLA, and the lines to blame."""

import collections
import os

import tensorflow as tf

import towers
from benchmarks.graphs.kernels import XLA_ON_GPU, find_kernel
from benchmarks.graphs.operations import called, running
from benchmarks.graphs.optimized import LOOPS
from benchmarks.graphs.traced import Traced

PACKAGE = os.path.dirname(towers.__file__)
SKIPPED = {"Const", "Identity", "NoOp", "Placeholder"}  # they hold or name a value


def interruptions(trained: Traced) -> dict[tuple[str, str, str], collections.Counter]:
    """Group operations that XLA cannot compile with a step: (part, reason, line of the
    package) -> their types, counted."""
    call, groups = trained.calls()[-1], collections.defaultdict(collections.Counter)
    [loop] = [op for op in call.graph.get_operations() if op.type in LOOPS]
    parts = called(call.graph, loop)  # "cond" and "body"
    if trained.config.input == "resident":
        orders = tf.function(trained.trainer.feed._batches[0].orders, autograph=False)
        epoch = tf.TensorSpec([], tf.int64)
        parts = {"orders": orders.get_concrete_function(epoch, 1).graph} | parts
    for part, graph in parts.items():
        for op in running(graph):
            reason = "" if op.type in SKIPPED else _reason(op, part)
            if reason:
                groups[part, reason, _line(op)][op.type] += 1
    return groups


def _reason(op, part):
    tensors = [x for x in (*op.inputs, *op.outputs) if x.dtype != tf.resource]
    if find_kernel(op, XLA_ON_GPU) is None:
        return "XLA has no kernel"
    if part == "orders" or all(x.shape.is_fully_defined() for x in tensors):
        return "on the host" if "CPU" in op.device else ""
    return "its shape changes between calls"


def _line(op):
    """Return the innermost line of the package that made an operation."""
    lines = [
        f"{x.filename}:{x.lineno}" for x in op.traceback or () if PACKAGE in x.filename
    ]
    return os.path.relpath(lines[-1], os.path.dirname(PACKAGE)) if lines else "?"
