"""A copy of the variables on every device of several processes."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from towers.errors import ConfigError
from towers.optim.update import Update
from towers.parallel import reduce
from towers.parallel.compilation import compute_in_order
from towers.parallel.copies import Copy, Initial
from towers.parallel.devices import CPU, device_of
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.strategy import Reduced, Strategy, create_copies
from towers.parallel.towers import TowerResult
from towers.parallel.workers import SINGLE_WORKER, Workers

# Algorithms between workers; "auto" is NCCL between GPUs, otherwise a ring.
COMMUNICATIONS = ("auto", "ring", "nccl")


def multi_worker(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    workers: Workers = SINGLE_WORKER,
    all_reduce: str = "auto",
    all_reduce_pack_mb: float = -1.0,
    all_reduce_dtype: str = "",
) -> Strategy:
    """Keep a copy on every device of every worker; the mean goes to all of them.

    TensorFlow's MultiWorkerMirroredStrategy reduces the gradients. Each GPU takes part
    by itself; the towers of a CPU are summed first. Elsewhere:
    MultiWorkerMirroredStrategy, Horovod, PyTorch's DistributedDataParallel.

    `micro_batch_size` counts the images of all workers, `all_reduce` is one of
    COMMUNICATIONS, `all_reduce_pack_mb` is the minimum size of a buffer (0 for a single
    one, -1 for `Device.worker_pack_mb`), and `all_reduce_dtype` is the type in which
    gradients are sent and added up, by default their own.
    """
    if all_reduce not in COMMUNICATIONS:
        way = f"with strategy=multi_worker choose one of {', '.join(COMMUNICATIONS)}"
        raise ConfigError(f"all_reduce={all_reduce} adds up within one process; {way}")
    count, size = len(devices), workers.size
    if size == 1:
        strategy = replicated(initial, update_fn, devices, micro_batch_size)
        about = "as replicated; the options of the all-reduce have no effect"
        line = f"1 worker with {count} tower(s): {about}"
        return dataclasses.replace(strategy, description=[line])
    all_sizes = reduce.shares(micro_batch_size, size * count)
    first = workers.index * count
    sizes = all_sizes[first : first + count]
    copies = create_copies(initial, update_fn, devices)
    pack_mb = all_reduce_pack_mb
    if pack_mb < 0:
        pack_mb = device_of(devices[0]).worker_pack_mb
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=int(pack_mb * 2**20)
    )
    dtype = tf.as_dtype(all_reduce_dtype) if all_reduce_dtype else None

    def mean(results: Sequence[TowerResult]) -> Reduced:
        """Reduce the gradients to every device of all workers."""
        return mean_over_workers(results, copies, all_sizes, workers, options, dtype)

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


def mean_over_workers(
    results: Sequence[TowerResult],
    copies: Sequence[Copy],
    all_sizes: Sequence[int],
    workers: Workers,
    options: tf.distribute.experimental.CommunicationOptions,
    dtype: tf.DType | None,
) -> Reduced:
    """Return the mean over the towers of several workers.

    Workers send gradients and changes of the model state, both weighted by images, the
    loss of every tower, and the number of correct predictions. Changes leave constants,
    such as frozen filters, as they are to the last bit.
    """
    for result, copy in zip(results, copies, strict=True):
        if CPU.has([copy.device]):  # TensorFlow sends the last tensors first.
            compute_in_order(result.gradients[::-1])
    count = len(copies)
    towers_per_device = count // len(workers.devices)  # Summed before they are sent.
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
    # Metrics decide whether a step is taken: they wait until everything has arrived.
    with tf.control_dependencies(tf.nest.flatten(sums)), tf.device(copies[0].device):
        losses, correct = map(tf.identity, sums[-1][-2:])
    return Reduced(gradients, states, losses, correct)
