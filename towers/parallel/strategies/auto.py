"""The choice between `towers` and `replicated` by the devices."""

import dataclasses
from collections.abc import Sequence

from towers.optim.update import Update
from towers.parallel.copies import Initial
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
