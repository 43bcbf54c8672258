"""Strategy `multi_worker`: `replicated` over several processes.

In each step the towers of a worker compute the gradients of their share of the batch,
each with its own copy of the parameters; the gradients are all-reduced over the towers
of all workers by TensorFlow's MultiWorkerMirroredStrategy, and every copy updates
itself. Each GPU takes part in that by itself; the towers of a CPU add up first.

Elsewhere: MultiWorkerMirroredStrategy, Horovod, PyTorch's DistributedDataParallel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.errors import ConfigError
from towers.optim.update import Update
from towers.parallel.devices import HOST, to_device
from towers.parallel.gradients import (
    all_average_states,
    average_gradients,
    shares,
    tower_weights,
)
from towers.parallel.replicated import Replicated
from towers.parallel.strategy import Mean
from towers.parallel.variables import Initial
from towers.parallel.workers import ALONE, COMMUNICATIONS, Workers

# Gradients travel in buffers of so many megabytes: the first one leaves while the
# others are still computed.
PACK_MB = 25.0


class MultiWorker:
    """Implements the protocol `Strategy`.

    Args:
        initial, update_fn, devices: as in the protocol.
        micro_batch_size: images over the towers of all workers.
        workers: all of them.
        all_reduce: one of COMMUNICATIONS.
        all_reduce_pack_mb: megabytes of a buffer; 0 for a single one, -1 for PACK_MB.
        all_reduce_dtype: what travels and is added up, such as bfloat16; empty for the
            gradients' type.
    """

    num_shards = 1

    def __init__(
        self,
        initial: Initial,
        update_fn: Update,
        devices: Sequence[str],
        micro_batch_size: int,
        *,
        workers: Workers = ALONE,
        all_reduce: str = "auto",
        all_reduce_pack_mb: float = -1.0,
        all_reduce_dtype: str = "",
    ):
        if all_reduce not in COMMUNICATIONS:
            raise ConfigError(
                f"all_reduce={all_reduce} adds up within one process; with "
                f"strategy=multi_worker choose one of {', '.join(COMMUNICATIONS)}"
            )
        count = len(devices)
        self._first = workers.index * count
        self._num_towers = workers.size * count
        sizes = shares(micro_batch_size, self._num_towers)
        self.sizes = sizes[self._first : self._first + count]
        self._batch_size = micro_batch_size
        self._workers, self._devices = workers, devices
        self._towers = Replicated(initial, update_fn, devices, sum(self.sizes))
        self.variables = self._towers.variables
        self.fetch, self.update = self._towers.fetch, self._towers.update
        self.named_variables = self._towers.named_variables
        self.load = self._towers.load
        # The towers that meet on each of the devices between workers.
        num_meeting = count // len(workers.devices)
        self._meetings = [
            slice(first, first + num_meeting) for first in range(0, count, num_meeting)
        ]
        pack_mb = PACK_MB if all_reduce_pack_mb < 0 else all_reduce_pack_mb
        self._options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=int(pack_mb * 2**20)
        )
        self._dtype = tf.as_dtype(all_reduce_dtype) if all_reduce_dtype else None
        self.description = [
            f"{workers.size} worker(s) with {count} tower(s) each; a copy on every "
            f"device, all-reduce {all_reduce}"
        ]
        if workers.size == 1:
            self.description = [
                f"1 worker with {count} tower(s): as replicated; the options of the "
                "all-reduce between workers have no effect"
            ]

    def average(self, results):
        if self._workers.size == 1:
            return self._towers.average(results)
        old = [replica.fetch().state for replica in self.variables]
        sent = [
            self._part(results, meeting, old[meeting.start])
            for meeting in self._meetings
        ]
        sums = self._workers.sums([tf.nest.flatten(x) for x in sent], self._options)
        gradients, states = [], []
        for meeting, part, flat in zip(self._meetings, sent, sums, strict=True):
            total = tf.nest.pack_sequence_as(part, flat)
            for tower in range(meeting.start, meeting.stop):
                device, result = self._devices[tower], results[tower]
                with tf.device(device):
                    gradients.append(_as_types_of(total.gradients, result.gradients))
                    states.append(_changed(old[tower], total.changes, result.state))
        # Whether a step is taken depends on the metrics: by then all has arrived.
        with tf.device(HOST), tf.control_dependencies(tf.nest.flatten(sums)):
            losses, correct = map(tf.identity, total.metrics)
        return Mean(gradients, states, losses=losses, correct=correct)

    def _part(self, results, meeting, old):
        """The part of some towers in the sums over all towers, on one device."""
        own, sizes = results[meeting], self.sizes[meeting]
        devices, weights = self._devices[meeting], tower_weights(sizes)
        target, share = devices[0], sum(sizes) / self._batch_size
        [states] = all_average_states(
            [result.state for result in own], devices, weights, [target]
        )
        with tf.device(target):
            gradients = average_gradients([r.gradients for r in own], weights)
            gradients = [_scaled(x, share) for x in gradients]
            changes = [
                _scaled(new - to_device(before, target), share)
                for new, before in zip(states, old, strict=True)
                if new.dtype.is_floating
            ]
            if self._dtype is not None:
                gradients = [tf.cast(x, self._dtype) for x in gradients]
            after = self._num_towers - self._first - meeting.stop
            losses = tf.pad(
                tf.stack([result.loss for result in own]),
                [[self._first + meeting.start, after]],
            )
            correct = tf.add_n([result.correct for result in own])
        return _Sent(gradients, changes, [losses, correct])


class _Sent(NamedTuple):
    """What travels between workers: a part of sums over all towers.

    Attributes:
        gradients: weighted by images.
        changes: of the model state, weighted alike. What no training changes, such as
            frozen filters, so stays what it is to the last bit.
        metrics: the loss of every tower, and the number of correct predictions.
    """

    gradients: list[tf.Tensor]
    changes: list[tf.Tensor]
    metrics: list[tf.Tensor]


def _scaled(tensor, factor):
    return tensor * tf.constant(factor, tensor.dtype)


def _as_types_of(tensors, others):
    return [tf.cast(x, other.dtype) for x, other in zip(tensors, others, strict=True)]


def _changed(old, changes, new):
    """The state after its changes; entries that are no floats are the tower's own."""
    changes = iter(changes)
    return [
        before + next(changes) if after.dtype.is_floating else after
        for before, after in zip(old, new, strict=True)
    ]
