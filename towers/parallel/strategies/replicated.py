"""A copy of the variables on every device."""

from collections.abc import Sequence

import tensorflow as tf

from towers.optim.update import Update
from towers.parallel import reduce
from towers.parallel.copies import Initial
from towers.parallel.strategies import strategy
from towers.parallel.towers import TowerResult


def replicated(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    all_reduce: str = "auto",
    all_reduce_dtype: str = "",
) -> strategy.Strategy:
    """Keep a copy on every device, read by its tower; the mean goes to all copies.

    Every copy is updated on its own device; as all have the same sums, bit for bit,
    they stay equal. Elsewhere: the from-scratch multi-GPU chapter of Dive into Deep
    Learning (its `get_params`, `split_and_load`, `allreduce`, `train_batch`),
    MirroredStrategy, tf_cnn_benchmarks' `replicated`, tensorpack's
    SyncMultiGPUTrainerReplicated.

    `all_reduce` is a key of `reduce.ALGORITHMS` or "auto", which is star (but see
    `build.assembly.create_strategy`); `all_reduce_dtype` is the type in which gradients
    are sent, such as "bfloat16", by default their own.
    """
    algorithm = "star" if all_reduce == "auto" else all_reduce
    dtype = tf.as_dtype(all_reduce_dtype) if all_reduce_dtype else None
    reduce.check_algorithm(algorithm, devices, dtype)
    sizes = reduce.shares(micro_batch_size, len(devices))
    weights = reduce.tower_weights(sizes)

    def mean(results: Sequence[TowerResult]) -> strategy.Reduced:
        """Reduce the gradients to every device."""
        return strategy.all_reduced_mean(results, devices, weights, algorithm, dtype)

    return strategy.Strategy(
        devices=devices,
        sizes=sizes,
        copies=strategy.create_copies(initial, update_fn, devices),
        readers=range(len(devices)),
        mean_fn=mean,
        description=[f"a copy on every device, all-reduce {algorithm}"],
    )
