"""Workers of a cluster: processes, on one machine or on many, that train together.

TensorFlow moves all data between them: `MultiWorkerMirroredStrategy` starts its server
and adds tensors up, its coordination service notices a lost worker.
"""

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.errors import WorkerLostError, out_of_memory
from towers.messages import one_line
from towers.parallel.workers import Workers
from towers.threads import JobThread

_PIECE_BYTES = 2**26  # bytes per message when a state is broadcast; a multiple of 8

# The message with which a worker reports a lost one to the others.
_REPORTED = re.compile(r"lost: (worker (\d+) \([^)]*\) (?:ended|does not answer))\.")

_CHIEF = "towers/chief"  # a key that exists while the chief's coordination service runs

# Part of the errors of calls to the coordination service, which the chief runs.
_CALL_TO_CHIEF = "RPC: /tensorflow.CoordinationService/"

_TASK = re.compile(r"/job:worker/(?:replica:0/)?task:(\d+)")

# Errors of NCCL, which name no worker.
_NCCL = re.compile(
    r"nccl(?: operation .* failed)?: |nccl(?:Remote|System)Error|ncclCommAbort"
    r"|nccl\w* (?:already )?aborted|remote process exited|closed by remote peer",
    re.IGNORECASE,
)

# Errors of this worker's own GPU, or invalid calls of NCCL.
_OWN_NCCL = re.compile(
    r"nccl(?: operation .* failed)?: (?:unhandled cuda|invalid)", re.IGNORECASE
)


class ClusterWorkers(Workers):
    """Several workers, connected by TensorFlow's collective runtime, the `engine`."""

    def __init__(
        self,
        engine: tf.distribute.MultiWorkerMirroredStrategy,
        addresses: Sequence[str],
        index: int,
    ):
        super().__init__(addresses, index)
        self._engine, self._thread = engine, JobThread("workers")
        self.devices = engine.extended.worker_devices
        if self.is_chief:
            tf_internals.set_cluster_value(_CHIEF, "")
        self._add = {
            dtype: tf.function(
                self.sum,
                autograph=False,
                input_signature=[[tf.TensorSpec([None], dtype)]],
            )
            for dtype in (np.int64, np.float64)
        }

    def sums(self, tensors, options=None):
        """Return the sums over all workers and devices."""
        results = [list(own) for own in tensors]
        # One buffer has one type.
        for dtype in dict.fromkeys(x.dtype for x in tensors[0]):
            indices = [i for i, x in enumerate(tensors[0]) if x.dtype == dtype]
            same = [[own[i] for i in indices] for own in tensors]
            values = self._all_reduce(same, options)
            for index, value in zip(indices, values, strict=True):
                local = self._engine.experimental_local_results(value)
                for result, x in zip(results, local, strict=True):
                    result[index] = tf.ensure_shape(x, tensors[0][index].shape)
        return results

    def _all_reduce(self, tensors, options):
        placed = []
        for device, own in zip(self.devices, tensors, strict=True):
            with tf.device(device):
                placed.append([tf.identity(x) for x in own])

        def values_of(replica):
            return placed[replica.replica_id_in_sync_group % len(placed)]

        def all_reduce(values):
            replica = tf.distribute.get_replica_context()
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, values, options)

        values = self._engine.experimental_distribute_values_from_function(values_of)
        return self._engine.run(all_reduce, args=(values,))

    def sum(self, tensors):
        """Return sums over workers; gradients are those of the sum of all losses."""

        @tf.custom_gradient
        def add(*values):
            zeros = [[tf.zeros_like(x) for x in values] for _ in self.devices[1:]]
            added = self.sums([values, *zeros])[0]
            return added, lambda *gradients: self.sum(gradients)

        return list(add(*tensors))

    def gather(self, tensor):
        """Concatenate the tensors of all workers along the first axis."""

        def all_gather():
            replica = tf.distribute.get_replica_context()
            number = tf.get_static_value(replica.replica_id_in_sync_group)
            index = number % len(self.devices)
            with tf.device(self.devices[index]):
                own = tf.identity(tensor if index == 0 else tensor[:0])
            return replica.all_gather(own, axis=0)

        gathered = self._engine.experimental_local_results(self._engine.run(all_gather))
        return tf.ensure_shape(gathered[0], [None, *tensor.shape[1:]])

    def add(self, values):
        """Return the sum of an array over all workers."""

        def added():
            with self.raising_worker_lost():
                [total] = self._add[values.dtype.type]([tf.constant(values.ravel())])
                return total.numpy().reshape(values.shape)

        if threading.current_thread() is not threading.main_thread():
            return added()
        # The main thread serves signals while it waits for another thread, but not
        # while it waits in TensorFlow.
        return self._thread.submit(added).result()

    def agree(self, num_steps, save, summarize, stop):
        """Agree on the next actions of all workers."""
        own = [num_steps, save, summarize] if self.is_chief else [0, 0, 0]
        *chief, num_stopping = self.add(np.array([*own, stop], np.int64))
        num_steps, save, summarize = chief
        return 0 if num_stopping else int(num_steps), bool(save), bool(summarize)

    def broadcast(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the chief's arrays, bit for bit, in place of this worker's."""
        content = b"".join(x.tobytes() for x in state.values())
        if not self.is_chief:
            content = bytes(len(content))
        received = b"".join(
            self._add_bytes(content[first : first + _PIECE_BYTES])
            for first in range(0, len(content), _PIECE_BYTES)
        )
        arrays, first = {}, 0
        for name, array in state.items():
            flat = np.frombuffer(received, array.dtype, array.size, first)
            arrays[name] = flat.reshape(array.shape)
            first += array.nbytes
        return arrays

    def exchange(self, own: Any) -> list[Any]:
        """Gather a JSON value from each worker, in their order."""
        content = json.dumps(own).encode()
        is_own = np.arange(self.size) == self.index
        sizes = self.add(np.where(is_own, len(content), 0))
        rows = [content if x else bytes(n) for x, n in zip(is_own, sizes, strict=True)]
        received = self._add_bytes(b"".join(rows))
        # All have received everything when this returns: then any worker may end.
        with contextlib.suppress(WorkerLostError):
            self.add(np.zeros(1, np.int64))
        ends = np.cumsum(sizes)
        spans = zip(ends, sizes, strict=True)
        return [json.loads(received[end - size : end]) for end, size in spans]

    def _add_bytes(self, content):
        """Add bytes up as integers; only one worker has other bytes than zeros."""
        padded = content + bytes(-len(content) % 8)
        return self.add(np.frombuffer(padded, np.int64)).tobytes()[: len(content)]

    @contextlib.contextmanager
    def raising_worker_lost(self) -> Iterator[None]:
        """Raise WorkerLostError if an error of TensorFlow names a lost worker."""
        try:
            yield
        except tf.errors.OpError as error:
            lost = lost_worker(error.message, self.addresses, self.index)
            if lost is None:
                raise
            report_lost_worker(lost)
            raise WorkerLostError(lost.text) from None


class LostWorker(NamedTuple):
    """A lost worker: its number, None if unknown, and a message about it."""

    number: int | None
    text: str


def lost_worker(error: str, addresses: Sequence[str], index: int) -> LostWorker | None:
    """Return the lost worker that an error of TensorFlow names to worker `index`."""
    if match := _REPORTED.search(error):
        return LostWorker(int(match[2]), match[1])
    is_collective = "Collective" in error or "oordination" in error
    if not is_collective and not _NCCL.search(error):
        return None
    named = [int(number) for number in _TASK.findall(error)]
    others = [i for i in named if i != index and i < len(addresses)]
    if _CALL_TO_CHIEF in error or (not others and "CoordinationService" in error):
        others = [0]  # The chief did not answer, even if another worker is named.
    if others == [0] and not index:
        return LostWorker(None, "other workers do not answer")
    if not others:
        if out_of_memory(error) or _OWN_NCCL.search(error):
            return None
        lines = [line for line in error.splitlines() if _NCCL.search(line)]
        text = one_line(lines[0] if lines else error, 200)
        return LostWorker(None, f"a worker is lost: {text}")
    number, how = others[0], "does not answer"
    if "onnection reset" in error or "Socket closed" in error:
        how = "ended"
        if number and not _chief_answers():
            # The other worker ended because the chief is lost.
            number, how = 0, "does not answer"
    return LostWorker(number, f"worker {number} ({addresses[number]}) {how}")


def _chief_answers():
    try:
        tf_internals.cluster_value(_CHIEF, 2000)
    except tf.errors.OpError:
        return False
    return True


def report_lost_worker(lost: LostWorker) -> None:
    """Report a lost worker to the others, which may not be connected to it."""
    if lost.number == 0 or not _chief_answers():
        return  # Without the chief's service the report would block forever.
    with contextlib.suppress(tf.errors.OpError):
        text = f"lost: {lost.text}."
        tf_internals.report_error_to_cluster(tf.errors.UNAVAILABLE, text)
