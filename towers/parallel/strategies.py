"""The synchronous strategies: where copies of the vectors live, which copy a tower
reads, and where the mean goes.

All mean the same by a step: one update with the gradient of the mean loss over the
whole batch. A new strategy is a function here and a row of `config.choices.STRATEGIES`;
docs/extending.md lists its tests and pages.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.cluster.workers import ALONE, COMMUNICATIONS, Workers
from towers.errors import ConfigError
from towers.optim.update import Update
from towers.parallel import reduce
from towers.parallel.compilation import compute_in_order
from towers.parallel.copies import Copy, Initial, Values, Weights
from towers.parallel.devices import HOST
from towers.parallel.sharding.split import channel_slice
from towers.parallel.tower import TowerResult

# Megabytes of the buffers in which gradients travel between workers: the first one
# leaves while the others are still computed.
WORKER_PACK_MB = {"CPU": 1.0, "GPU": 25.0}


class Mean(NamedTuple):
    """The mean over the towers, once for each of `Strategy.copies`."""

    gradients: list[list[tf.Tensor]]  # [copy] vectors, of the mean loss over the batch
    states: list[list[tf.Tensor]]  # [copy] vectors of the new model state
    losses: tf.Tensor  # [tower], of all processes
    correct: tf.Tensor  # number of correct predictions over these towers


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """Created as `strategy(initial, update_fn, devices, micro_batch_size, **options)`,
    the function of a row of `choices.STRATEGIES`; `options` are the fields of Config
    with `strategy_option` that its signature names."""

    devices: Sequence[str]  # of the towers
    sizes: Sequence[int]  # images of a (micro-)batch per tower of this process
    copies: Sequence[Copy]  # of the variables; a whole one has `num_shards` entries
    readers: Sequence[int]  # per device the index of its copy
    # Per device results -> their mean, weighted by images.
    mean_fn: Callable[[Sequence[TowerResult]], Mean]
    description: Sequence[str]  # lines for the start banner
    num_shards: int = 1  # neighboring devices that hold one network together

    def fetch(self, weights: Weights = Weights.RAW) -> list[Values]:
        """Per device parameters and model state, next to the compute. The first copy
        keeps the EMA weights."""
        fetched = []
        for device, reader in zip(self.devices, self.readers, strict=True):
            is_ema = weights is Weights.EMA
            copy = self.copies[reader % self.num_shards if is_ema else reader]
            values = copy.fetch(weights)
            near = reduce.share_memory(device, copy.device)
            fetched.append(values if near else values.copied_to(device))
        return fetched

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Assigns a canonical state to all copies."""
        parts = [
            {
                name: channel_slice(array, shard, self.num_shards)
                for name, array in state.items()
                if name.startswith(("params/", "state/", "slots/", "averages/"))
            }
            for shard in range(self.num_shards)
        ]
        for index, copy in enumerate(self.copies):
            copy.load(parts[index % self.num_shards])
            copy.step.assign(state["step"])

    @property
    def shards(self) -> Sequence[Copy]:
        """The entries of the first copy."""
        return self.copies[: self.num_shards]

    @property
    def home(self) -> str:
        """The device of the first copy: of metrics, and of the guard of a step."""
        return self.copies[0].device


def auto(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    parameter_device: str = "auto",
    all_reduce: str = "auto",
    all_reduce_dtype: str = "",
) -> Strategy:
    """`replicated` on several GPUs without a parameter device, otherwise `towers`."""
    on_gpus = len(devices) > 1 and all("GPU" in device for device in devices)
    reduction = {"all_reduce": all_reduce, "all_reduce_dtype": all_reduce_dtype}
    create, options, ignored = replicated, reduction, {}
    if not on_gpus or parameter_device != "auto":
        create, options = towers, {"parameter_device": parameter_device}
        # The sum on one device, star, is what towers does.
        ignored = {k: x for k, x in reduction.items() if x not in ("auto", "star", "")}
    strategy = create(initial, update_fn, devices, micro_batch_size, **options)
    lines = [f"{create.__name__}: {', '.join(strategy.description)}"]
    lines += [f"{k}={x} has no effect with strategy=towers" for k, x in ignored.items()]
    return dataclasses.replace(strategy, description=lines)


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

    The parameter device is cpu, gpu (the first tower's), the name of a device, or auto:
    the CPU, or of a single tower its own device.
    """
    automatic = devices[0] if len(devices) == 1 else HOST
    named = {"auto": automatic, "cpu": HOST, "gpu": devices[0]}
    home = named.get(parameter_device, parameter_device)
    sizes = reduce.shares(micro_batch_size, len(devices))
    weights = reduce.tower_weights(sizes)

    def mean(results):
        """On the parameter device."""
        with tf.device(home):
            per_tower = [x.gradients for x in results]
            gradients = reduce.average_gradients(per_tower, weights)
        return _mean(results, [gradients], weights, [home])

    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=[Copy(initial, update_fn, home)],
        readers=[0] * len(devices),
        mean_fn=mean,
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

    `all_reduce` is a key of `reduce.ALGORITHMS`; auto is star, but see
    `build_trainer.create_trainer`. `all_reduce_dtype` is what travels, such as
    bfloat16; empty for the gradients' type.
    """
    algorithm = "star" if all_reduce == "auto" else all_reduce
    dtype = tf.as_dtype(all_reduce_dtype) if all_reduce_dtype else None
    reduce.check_algorithm(algorithm, devices, dtype)
    sizes = reduce.shares(micro_batch_size, len(devices))
    weights = reduce.tower_weights(sizes)

    def mean(results):
        """On every device."""
        return _mean_on_each(results, devices, weights, algorithm, dtype)

    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=_copies(initial, update_fn, devices),
        readers=range(len(devices)),
        mean_fn=mean,
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
    """A group of neighboring devices holds one copy, split by channels; the mean
    goes, shard by shard, to all groups, which are data-parallel to each other.

    Where a layer needs all its inputs, a transfer brings the slices of the other
    devices next to the compute (see `sharding`).

    Elsewhere: the worker groups of Tencent's multi-GPU framework (Mariana, Zou et al.
    2014), the two columns of AlexNet (Krizhevsky et al. 2012).
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
    sizes = reduce.shares(micro_batch_size, len(devices) // group_size)
    copies = _copies(initial, update_fn, devices, group_size)

    def mean(results):
        """Over the groups, shard by shard."""
        means, weights = [], reduce.tower_weights(sizes)
        for shard in range(group_size):
            peers = devices[shard::group_size]
            means.append(_mean_on_each(results[shard::group_size], peers, weights))
        groups = range(len(sizes))
        return means[0]._replace(
            gradients=[m.gradients[group] for group in groups for m in means],
            states=[m.states[group] for group in groups for m in means],
        )

    groups = [devices[i : i + group_size] for i in range(0, len(devices), group_size)]
    num_bytes = [copy.num_bytes()["parameters"] for copy in copies[:group_size]]
    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=copies,
        readers=range(len(devices)),
        mean_fn=mean,
        description=[
            f"groups: {'; '.join(', '.join(group) for group in groups)}",
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
    """`replicated` over several processes, each with its own `devices`: the mean goes
    to all devices of all workers, by TensorFlow's MultiWorkerMirroredStrategy. Each GPU
    takes part in that by itself; the towers of a CPU are summed first.

    Elsewhere: MultiWorkerMirroredStrategy, Horovod, PyTorch's DistributedDataParallel.

    `micro_batch_size` counts the images of all workers, `all_reduce` is one of
    COMMUNICATIONS, `all_reduce_pack_mb` are the least megabytes of a buffer (0 for a
    single one, -1 for WORKER_PACK_MB), and `all_reduce_dtype` is what travels and is
    added up.
    """
    if all_reduce not in COMMUNICATIONS:
        raise ConfigError(
            f"all_reduce={all_reduce} adds up within one process; with "
            f"strategy=multi_worker choose one of {', '.join(COMMUNICATIONS)}"
        )
    count, size = len(devices), workers.size
    if size == 1:
        strategy = replicated(initial, update_fn, devices, micro_batch_size)
        description = (
            f"1 worker with {count} tower(s): as replicated; the options of the "
            "all-reduce between workers have no effect"
        )
        return dataclasses.replace(strategy, description=[description])
    all_sizes = reduce.shares(micro_batch_size, size * count)
    first = workers.index * count
    sizes = all_sizes[first : first + count]
    copies = _copies(initial, update_fn, devices)
    kind, pack_mb = "GPU" if "GPU" in devices[0] else "CPU", all_reduce_pack_mb
    pack_mb = WORKER_PACK_MB[kind] if pack_mb < 0 else pack_mb
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=int(pack_mb * 2**20)
    )
    dtype = tf.as_dtype(all_reduce_dtype) if all_reduce_dtype else None

    def mean(results):
        """On every device of all workers."""
        return _mean_over_workers(results, copies, all_sizes, workers, options, dtype)

    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=copies,
        readers=range(count),
        mean_fn=mean,
        description=[
            f"{size} worker(s) with {count} tower(s) each; a copy on every device, "
            f"all-reduce {all_reduce}"
        ],
    )


def _copies(initial, update_fn, devices, group_size=1):
    """A copy on every group of devices; the first one alone keeps averages."""
    copies = []
    for index, device in enumerate(devices):
        cut = functools.partial(
            channel_slice, shard=index % group_size, num_shards=group_size
        )
        keeps_averages = index < group_size
        copies.append(Copy(initial.map(cut), update_fn, device, keeps_averages))
    return copies


def _mean_on_each(results, devices, weights, algorithm="star", dtype=None):
    """The mean over the towers of this process, on each of their devices."""
    vectors = [result.gradients for result in results]
    gradients = reduce.all_reduce(vectors, devices, weights, algorithm, dtype)
    return _mean(results, gradients, weights, devices)


def _mean(results, gradients, weights, targets):
    """The mean gradients on each of the targets, with the means of all else there."""
    states = reduce.average_states([x.state for x in results], weights, targets)
    with tf.device(targets[0]):
        losses = tf.stack([result.loss for result in results])
        correct = tf.add_n([result.correct for result in results])
    return Mean(gradients, states, losses, correct)


def _mean_over_workers(results, copies, all_sizes, workers, options, dtype):
    """The mean over the towers of several workers.

    What travels are parts of sums: gradients weighted by images; changes of the model
    state, weighted alike, so that what no training changes, such as frozen filters,
    stays what it is to the last bit; the loss of every tower, and correct predictions.
    """
    for result, copy in zip(results, copies, strict=True):
        if "CPU" in copy.device:  # TensorFlow begins with the last ones
            compute_in_order(result.gradients[::-1])
    count = len(copies)
    towers_per_device = count // len(workers.devices)  # summed before they are sent
    old = [copy.read(copy.state) for copy in copies]
    sent = []
    for index in range(0, count, towers_per_device):
        some, target = results[index : index + towers_per_device], copies[index].device
        first = workers.index * count + index
        sizes = all_sizes[first : first + towers_per_device]
        weights, share = reduce.tower_weights(sizes), sum(sizes) / sum(all_sizes)
        [states] = reduce.average_states([x.state for x in some], weights, [target])
        with tf.device(target):
            gradients = reduce.average_gradients([x.gradients for x in some], weights)
            gradients = [reduce.scaled(x, share) for x in gradients]
            if dtype is not None:
                gradients = [tf.cast(x, dtype) for x in gradients]
            changes = [
                reduce.scaled(new - reduce.to_device(before, target), share)
                for new, before in zip(states, old[index], strict=True)
            ]
            losses = tf.pad(
                tf.stack([x.loss for x in some]),
                [[first, len(all_sizes) - first - towers_per_device]],
            )
            correct = tf.add_n([x.correct for x in some])
        sent.append([*changes, *gradients, losses, correct])
    sums = workers.sums(sent, options)
    gradients, states = [], []
    for tower, copy in enumerate(copies):
        *vectors, _, _ = sums[tower // towers_per_device]
        before, own = old[tower], results[tower].gradients
        changes, totals = vectors[: len(before)], vectors[len(before) :]
        with tf.device(copy.device):
            states.append([x + y for x, y in zip(before, changes, strict=True)])
            gradients.append(
                [tf.cast(x, g.dtype) for x, g in zip(totals, own, strict=True)]
            )
    # Whether a step is taken depends on the metrics: by then all has arrived.
    with tf.control_dependencies(tf.nest.flatten(sums)), tf.device(copies[0].device):
        losses, correct = map(tf.identity, sums[-1][-2:])
    return Mean(gradients, states, losses, correct)
