"""Sizes beyond the machine, refused by arithmetic before anything is allocated.

What is needed is a lower bound, and the limit is all the memory that there is, so that
a run that might fit is never refused. The memory of GPUs is not known before TensorFlow
reserves it, so that there only what lies on the host counts.
"""

import math
import pathlib
import resource
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from towers.config import Config
from towers.errors import ConfigError

FLOAT_BYTES = 4
GIGABYTE = 1e9
ROOT = pathlib.Path("/")


class Limit(NamedTuple):
    """Bytes that cannot be exceeded, and their name in messages."""

    num_bytes: int
    name: str


def memory_limit(root: pathlib.Path = ROOT) -> Limit | None:
    """The least of the limits on the memory of this process, swap included; None where
    none is known, as outside of Linux.

    Args:
        root: of the file system.
    """
    limits = list(_limits(root))
    return min(limits) if limits else None


def _limits(root: pathlib.Path) -> Iterator[Limit]:
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        yield Limit(address_space, "address space, ulimit -v")
    machine = dict(
        line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line
    )
    if "MemTotal" not in machine:
        return
    memory, swap = (
        1024 * int(machine.get(name, "0").split()[0])
        for name in ("MemTotal", "SwapTotal")
    )
    yield Limit(memory + swap, "memory and swap of this machine")
    for number in _cgroup_limits(root, swap):
        yield Limit(number, "memory and swap of this cgroup")


def _cgroup_limits(root: pathlib.Path, swap: int) -> Iterator[int]:
    """Those of the groups of this process, and of all groups that they are in."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        # Version 1 has a tree per controller, version 2 one for all.
        if controllers == "memory":
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "")
        elif not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.swap.max")
        else:
            continue
        path = pathlib.PurePosixPath(path)
        for group in (path, *path.parents):
            # A container may see the path of its host, and itself as the root.
            folder = base / str(group).strip("/")
            limit = _number(folder / names[0])
            if limit is not None:
                of_group = _number(folder / names[1]) if names[1] else None
                yield limit + (swap if of_group is None else min(swap, of_group))


def _number(path: pathlib.Path) -> int | None:
    """The number that a file holds; None for "max" or where there is no such file."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _computes_on_cpu(config: Config) -> bool:
    return config.device == "cpu" or not tf.config.get_visible_devices("GPU")


def check_batch(
    config: Config, num_images: int, image_shape: tuple[int, int, int]
) -> None:
    """Refuses a batch whose images alone, as float32, are larger than the memory.

    Args:
        config: of the run.
        num_images: of the batch, which the host makes at once for towers on a CPU.
        image_shape: height, width, channels.

    Raises:
        ConfigError: it cannot fit.
    """
    if not _computes_on_cpu(config):
        return
    options = f"batch_size={config.batch_size}"
    if num_images != config.batch_size:
        options += f" with accumulate_steps={config.accumulate_steps}"
    height, width, channels = image_shape
    _check(
        options,
        f"the {num_images:,} images of a step, {height}x{width}x{channels} in float32",
        num_images * math.prod(image_shape) * FLOAT_BYTES,
        "lower it" if num_images == config.batch_size else "lower one of the two",
    )


def check_variables(
    config: Config, trainable_bytes: int, other_bytes: int, for_training: bool
) -> None:
    """Refuses a network whose variables are larger than the memory.

    The network has its initial values for as long as it runs. Towers on a CPU have a
    second copy, the moving averages and, before an update, all gradients; slots of the
    optimizer and all that a network computes come on top.

    Args:
        config: of the run.
        trainable_bytes: of the parameters, once.
        other_bytes: of all other variables, once.
        for_training: False for an evaluation, which has no gradients.

    Raises:
        ConfigError: they cannot fit.
    """
    names, other_copies = ["initial values"], 1
    if _computes_on_cpu(config):
        names, other_copies = [*names, "variables"], 2
        names += ["averages"] if config.ema_decay else []
        # Parameters that param_rates freezes have none.
        names += ["gradients"] if for_training and not config.param_rates else []
    _check(
        f"width={config.width:g} with model={config.model}",
        f"{trainable_bytes // FLOAT_BYTES:,} parameters ({', '.join(names)})",
        trainable_bytes * len(names) + other_bytes * other_copies,
        "lower --width, or choose another --model or smaller images",
    )


def _check(options, what, needed, way_out):
    limit = memory_limit()
    if limit is not None and needed > limit.num_bytes:
        raise ConfigError(
            f"{options}: {what} take at least {_in_gigabytes(needed)}, and there are "
            f"{_in_gigabytes(limit.num_bytes)} ({limit.name}); {way_out}"
        )


def _in_gigabytes(num_bytes: int) -> str:
    size = num_bytes / GIGABYTE
    return f"{size:,.1f} GB" if size < 1e6 else f"{size:.3g} GB"
