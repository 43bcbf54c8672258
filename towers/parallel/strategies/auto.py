"""The choice between `towers` and `replicated` by the devices."""

import dataclasses
from collections.abc import Callable, Sequence

from towers.optim.update import Update
from towers.parallel.copies import Initial
from towers.parallel.devices import GPU
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.strategy import Strategy
from towers.parallel.strategies.towers import towers


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
    """Use `replicated` on several GPUs without a parameter device, else `towers`."""
    reduction = {"all_reduce": all_reduce, "all_reduce_dtype": all_reduce_dtype}
    create: Callable[..., Strategy] = replicated
    options, ignored = reduction, {}
    if len(devices) == 1 or not GPU.has(devices) or parameter_device != "auto":
        create, options = towers, {"parameter_device": parameter_device}
        # The sum on one device, star, is what towers does.
        ignored = {k: x for k, x in reduction.items() if x not in ("auto", "star", "")}
    strategy = create(initial, update_fn, devices, micro_batch_size, **options)
    lines = [f"{create.__name__}: {', '.join(strategy.description)}"]
    lines += [f"{k}={x} has no effect with strategy=towers" for k, x in ignored.items()]
    return dataclasses.replace(strategy, description=lines)
