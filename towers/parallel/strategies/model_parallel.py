"""A copy of the variables on every group of devices, split by channels."""

from collections.abc import Sequence

from towers.errors import ConfigError
from towers.optim.update import Update
from towers.parallel import reduce
from towers.parallel.copies import Initial
from towers.parallel.strategies import strategy
from towers.parallel.towers import TowerResult


def model_parallel(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    group_size: int,
) -> strategy.Strategy:
    """Split each copy by channels over a group of `group_size` neighboring devices.

    The groups are data-parallel to each other: the mean goes, shard by shard, to all of
    them. If a layer needs all its inputs, the slices of the other devices are copied to
    each device (see `sharding`). Elsewhere: the worker groups of Tencent's multi-GPU
    framework (Mariana, Zou et al. 2014), the two columns of AlexNet (Krizhevsky et al.
    2012).
    """
    if len(devices) % group_size:
        why = f"num_towers={len(devices)} with group_size={group_size}"
        raise ConfigError(f"{why}: the groups do not divide the towers")
    if not update_fn.optimizer.elementwise:
        why = "the optimizer's update needs whole parameters, which no device holds"
        raise ConfigError(f"group_size={group_size}: {why}")
    sizes = reduce.shares(micro_batch_size, len(devices) // group_size)
    copies = strategy.create_copies(initial, update_fn, devices, group_size)

    def mean(results: Sequence[TowerResult]) -> strategy.Reduced:
        """Reduce the gradients over the groups, shard by shard."""
        means, weights = [], reduce.tower_weights(sizes)
        for shard in range(group_size):
            some, peers = results[shard::group_size], devices[shard::group_size]
            means.append(strategy.all_reduced_mean(some, peers, weights))
        groups = range(len(sizes))
        return means[0]._replace(
            gradients=[m.gradients[group] for group in groups for m in means],
            states=[m.states[group] for group in groups for m in means],
        )

    groups = [devices[i : i + group_size] for i in range(0, len(devices), group_size)]
    num_bytes = [copy.num_bytes()["parameters"] for copy in copies[:group_size]]
    return strategy.Strategy(
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
