"""The synchronous strategies: where copies of the vectors live, which copy a tower
reads, and where the mean goes.

All mean the same by a step: one update with the gradient of the mean loss over the
whole batch. `towers` and `replicated` differ in two arguments: one copy on the
parameter device, which all towers read and which alone gets the mean, or a copy on
every device, read by its own tower, and the mean for all.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.errors import ConfigError
from towers.optim.update import Update
from towers.parallel.copies import Copy, Initial, Values
from towers.parallel.devices import HOST, share_memory, to_device
from towers.parallel.reduce import (
    all_reduce,
    average_gradients,
    average_states,
    check_algorithm,
    shares,
    tower_weights,
)
from towers.parallel.sharding.split import channel_slice
from towers.parallel.tower import TowerResult
from towers.parallel.workers import ALONE, COMMUNICATIONS, Workers

# Megabytes of the buffers in which gradients travel between workers: the first one
# leaves while the others are still computed.
WORKER_PACK_MB = 25.0


class Mean(NamedTuple):
    """The mean over the towers, once for each of `Strategy.copies`.

    Attributes:
        gradients, states: [copy] vectors, of the mean loss over the whole batch and of
            the new model state.
        losses: [tower], of all processes.
        correct: number of correct predictions over these towers.
    """

    gradients: list[list[tf.Tensor]]
    states: list[list[tf.Tensor]]
    losses: tf.Tensor
    correct: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """Created as `strategy(initial, update_fn, devices, micro_batch_size, **options)`.

    The keyword-only options are those of the run, by their names in Config.

    Attributes:
        devices: of the towers; `num_shards` neighbors hold one network together.
        sizes: images of a (micro-)batch per tower of this process.
        copies: all copies of the variables; a whole copy has `num_shards` entries.
        readers: per device the place of its copy in `copies`.
        mean_fn: per device results -> their image-weighted mean.
        description: lines for the start banner.
        num_shards: devices that hold one network together.
    """

    devices: Sequence[str]
    sizes: Sequence[int]
    copies: Sequence[Copy]
    readers: Sequence[int]
    mean_fn: Callable[[Sequence[TowerResult]], Mean]
    description: Sequence[str]
    num_shards: int = 1

    def fetch(self, use_averages: bool = False) -> list[Values]:
        """Per device parameters and model state (or the moving averages of both, which
        the first copy keeps), next to the compute."""
        fetched = []
        for device, reader in zip(self.devices, self.readers, strict=True):
            copy = self.copies[reader % self.num_shards if use_averages else reader]
            values = copy.fetch(use_averages)
            if not share_memory(device, copy.device):
                values = values.copied_to(device)
            fetched.append(values)
        return fetched

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Assigns a canonical state to all copies."""
        for place, copy in enumerate(self.copies):
            shard = place % self.num_shards
            copy.load(
                {
                    name: channel_slice(array, shard, self.num_shards)
                    for name, array in state.items()
                    if name.startswith(("params/", "state/", "slots/", "averages/"))
                }
            )
            copy.step.assign(state["step"])

    @property
    def shards(self) -> Sequence[Copy]:
        """The entries of the first copy."""
        return self.copies[: self.num_shards]

    @property
    def home(self) -> str:
        """The device where a step is decided on."""
        return self.copies[0].device


def towers(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    parameter_device: str = "auto",
) -> Strategy:
    """One copy on the parameter device, by default the CPU; every tower fetches it in
    every step, and the mean goes there.

    Elsewhere: TensorFlow's CIFAR-10 multi-GPU tutorial, CentralStorageStrategy,
    tf_cnn_benchmarks' `parameter_server`, tensorpack's
    SyncMultiGPUTrainerParameterServer.

    Args:
        parameter_device: cpu, gpu (that of the first tower), the name of a device, or
            auto: the CPU, or of a single tower its own device.
    """
    automatic = devices[0] if len(devices) == 1 else HOST
    named = {"auto": automatic, "cpu": HOST, "gpu": devices[0]}
    home = named.get(parameter_device, parameter_device)
    sizes = shares(micro_batch_size, len(devices))
    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=[Copy(initial, update_fn, home)],
        readers=[0] * len(devices),
        mean_fn=functools.partial(
            _mean, devices=devices, weights=tower_weights(sizes), targets=[home]
        ),
        description=[f"variables on {home}"],
    )


def replicated(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    all_reduce: str = "auto",
    all_reduce_dtype: str = "",
) -> Strategy:
    """A copy on every device, read by its tower; the mean goes to all, and every copy
    updates itself. As all see the same sums, bit for bit, they stay the same.

    Elsewhere: the from-scratch multi-GPU chapter of Dive into Deep Learning (its
    `get_params`, `split_and_load`, `allreduce`, `train_batch`), MirroredStrategy,
    tf_cnn_benchmarks' `replicated`, tensorpack's SyncMultiGPUTrainerReplicated.

    Args:
        all_reduce: a key of `reduce.ALGORITHMS`, or auto for star.
        all_reduce_dtype: what travels, such as bfloat16; empty for the gradients' type.
    """
    algorithm = "star" if all_reduce == "auto" else all_reduce
    dtype = tf.as_dtype(all_reduce_dtype) if all_reduce_dtype else None
    check_algorithm(algorithm, devices, dtype)
    sizes = shares(micro_batch_size, len(devices))
    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=_copies(initial, update_fn, devices),
        readers=range(len(devices)),
        mean_fn=functools.partial(
            _mean,
            devices=devices,
            weights=tower_weights(sizes),
            targets=devices,
            algorithm=algorithm,
            dtype=dtype,
        ),
        description=[f"a copy on every device, all-reduce {algorithm}"],
    )


def model_parallel(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    group_size: int,
) -> Strategy:
    """A worker group of devices holds one copy, split by channels; the mean goes, shard
    by shard, to all groups, which are data-parallel to each other.

    Where a layer needs all its inputs, a transfer brings the slices of the other
    devices next to the compute (see `sharding`).

    Elsewhere: the worker groups of Tencent's multi-GPU framework (Mariana, Zou et al.
    2014), the two columns of AlexNet (Krizhevsky et al. 2012).

    Args:
        devices: neighbors make a group; a multiple of group_size.
        group_size: devices that hold one network.

    Raises:
        ConfigError: the devices do not divide, or the update needs whole parameters.
    """
    if len(devices) % group_size:
        raise ConfigError(
            f"num_towers={len(devices)} with group_size={group_size}: the groups "
            "do not divide the towers"
        )
    if not update_fn.optimizer.elementwise:
        raise ConfigError(
            f"group_size={group_size}: the optimizer's update needs whole "
            "parameters, which no device holds"
        )
    sizes = shares(micro_batch_size, len(devices) // group_size)
    slices = [
        initial.map(lambda x, k=k: channel_slice(x, k, group_size))
        for k in range(group_size)
    ]
    copies = [
        Copy(slices[place % group_size], update_fn, device, place < group_size)
        for place, device in enumerate(devices)
    ]

    def mean(results):
        """Over the groups, shard by shard."""
        means = [
            _mean(
                results[shard::group_size],
                devices[shard::group_size],
                tower_weights(sizes),
                devices[shard::group_size],
            )
            for shard in range(group_size)
        ]
        groups = range(len(sizes))
        return means[0]._replace(
            gradients=[m.gradients[group] for group in groups for m in means],
            states=[m.states[group] for group in groups for m in means],
        )

    groups = [devices[i : i + group_size] for i in range(0, len(devices), group_size)]
    num_bytes = [
        sum(place.size for place in copy.layout.params.places.values())
        * copy.params[0].dtype.size
        for copy in copies[:group_size]
    ]
    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=copies,
        readers=range(len(devices)),
        mean_fn=mean,
        description=[
            f"worker groups: {'; '.join(', '.join(group) for group in groups)}",
            "bytes of parameters on a group's devices: "
            + ", ".join(f"{count:,}" for count in num_bytes),
        ],
        num_shards=group_size,
    )


def multi_worker(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    workers: Workers = ALONE,
    all_reduce: str = "auto",
    all_reduce_pack_mb: float = -1.0,
    all_reduce_dtype: str = "",
) -> Strategy:
    """`replicated` over several processes, each with so many devices: the mean goes to
    all devices of all workers, by TensorFlow's MultiWorkerMirroredStrategy. Each GPU
    takes part in that by itself; the towers of a CPU add up first.

    Elsewhere: MultiWorkerMirroredStrategy, Horovod, PyTorch's DistributedDataParallel.

    Args:
        micro_batch_size: images over the towers of all workers.
        all_reduce: one of COMMUNICATIONS.
        all_reduce_pack_mb: megabytes of a buffer; 0 for a single one, -1 for
            WORKER_PACK_MB.
        all_reduce_dtype: what travels and is added up, such as bfloat16; empty for the
            gradients' type.
    """
    if all_reduce not in COMMUNICATIONS:
        raise ConfigError(
            f"all_reduce={all_reduce} adds up within one process; with "
            f"strategy=multi_worker choose one of {', '.join(COMMUNICATIONS)}"
        )
    count, size = len(devices), workers.size
    first = workers.index * count
    all_sizes = shares(micro_batch_size, size * count)
    sizes = all_sizes[first : first + count]
    copies = _copies(initial, update_fn, devices)
    pack_mb = WORKER_PACK_MB if all_reduce_pack_mb < 0 else all_reduce_pack_mb
    meeting = _Meeting(
        workers,
        tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=int(pack_mb * 2**20)
        ),
        tf.as_dtype(all_reduce_dtype) if all_reduce_dtype else None,
        devices,
        copies,
        all_sizes,
    )
    description = (
        f"{size} worker(s) with {count} tower(s) each; a copy on every device, "
        f"all-reduce {all_reduce}"
    )
    if size == 1:
        description = (
            f"1 worker with {count} tower(s): as replicated; the options of the "
            "all-reduce between workers have no effect"
        )
    alone = functools.partial(
        _mean, devices=devices, weights=tower_weights(sizes), targets=devices
    )
    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=copies,
        readers=range(count),
        mean_fn=meeting.mean if size > 1 else alone,
        description=[description],
    )


def _copies(initial, update_fn, devices):
    """A copy on every device; no step reads the averages, so the first one's do."""
    return [
        Copy(initial, update_fn, device, place == 0)
        for place, device in enumerate(devices)
    ]


def _mean(results, devices, weights, targets, algorithm="star", dtype=None):
    """The mean over the towers of this process, for each of the targets."""
    gradients = all_reduce(
        [result.gradients for result in results],
        devices,
        weights=weights,
        algorithm=algorithm,
        targets=targets,
        dtype=dtype,
    )
    states = average_states([result.state for result in results], weights, targets)
    with tf.device(targets[0]):
        losses = tf.stack([result.loss for result in results])
        correct = tf.add_n([result.correct for result in results])
    return Mean(gradients, states, losses, correct)


@dataclasses.dataclass(frozen=True, eq=False)
class _Meeting:
    """The mean over the towers of several workers.

    What travels are parts of sums: gradients weighted by images; changes of the model
    state, weighted alike, so that what no training changes, such as frozen filters,
    stays what it is to the last bit; the loss of every tower, and correct predictions.

    Attributes:
        workers: all of them.
        options: of TensorFlow's all-reduce.
        dtype: in which gradients travel; None for their own.
        devices, copies: of this worker.
        all_sizes: images per tower of all workers.
    """

    workers: Workers
    options: tf.distribute.experimental.CommunicationOptions
    dtype: tf.DType | None
    devices: Sequence[str]
    copies: Sequence[Copy]
    all_sizes: Sequence[int]

    def mean(self, results: Sequence[TowerResult]) -> Mean:
        count = len(self.devices)
        together = count // len(self.workers.devices)  # towers that meet on a device
        meetings = [slice(i, i + together) for i in range(0, count, together)]
        old = [copy.read(copy.state) for copy in self.copies]
        sent = [self._part(results, meeting, old) for meeting in meetings]
        sums = self.workers.sums([tf.nest.flatten(x) for x in sent], self.options)
        gradients, states = [], []
        for meeting, part, flat in zip(meetings, sent, sums, strict=True):
            total = tf.nest.pack_sequence_as(part, flat)
            for tower in range(meeting.start, meeting.stop):
                with tf.device(self.devices[tower]):
                    gradients.append(
                        [
                            tf.cast(x, like.dtype)
                            for x, like in zip(
                                total["gradients"],
                                results[tower].gradients,
                                strict=True,
                            )
                        ]
                    )
                    states.append(
                        [
                            before + change
                            for before, change in zip(
                                old[tower], total["changes"], strict=True
                            )
                        ]
                    )
        # Whether a step is taken depends on the metrics: by then all has arrived.
        with tf.control_dependencies(tf.nest.flatten(sums)), tf.device(self.devices[0]):
            losses, correct = map(tf.identity, total["metrics"])
        return Mean(gradients, states, losses, correct)

    def _part(self, results, meeting, old):
        """The part of some towers in the sums over all towers, on one device."""
        first = self.workers.index * len(self.devices) + meeting.start
        own, target = results[meeting], self.devices[meeting][0]
        sizes = self.all_sizes[first : first + len(own)]
        weights, share = tower_weights(sizes), sum(sizes) / sum(self.all_sizes)
        [states] = average_states([x.state for x in own], weights, [target])
        with tf.device(target):
            gradients = average_gradients([x.gradients for x in own], weights)
            gradients = [_scaled(x, share) for x in gradients]
            if self.dtype is not None:
                gradients = [tf.cast(x, self.dtype) for x in gradients]
            changes = [
                _scaled(new - to_device(before, target), share)
                for new, before in zip(states, old[meeting.start], strict=True)
            ]
            losses = tf.pad(
                tf.stack([x.loss for x in own]),
                [[first, len(self.all_sizes) - first - len(own)]],
            )
            correct = tf.add_n([x.correct for x in own])
        return {
            "gradients": gradients,
            "changes": changes,
            "metrics": [losses, correct],
        }


def _scaled(tensor, factor):
    return tensor * tf.constant(factor, tensor.dtype)
