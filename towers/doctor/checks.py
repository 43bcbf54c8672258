"""Checks before anything is timed: versions, processor, data set."""

import os
import pathlib
import platform
from collections.abc import Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

import towers
from towers.build import Parts
from towers.data.sources import num_bytes
from towers.parallel.devices import Devices, num_cores

# Settings with which TensorFlow is slower, the value that does no harm, and why.
SETTINGS = {
    "TF_ENABLE_ONEDNN_OPTS": ("1", "the fast kernels of CPUs are off"),
    "TF_NUM_INTRAOP_THREADS": ("", "it bounds the threads of an operation"),
    "NVIDIA_TF32_OVERRIDE": ("1", "float32 uses no tensor cores"),
    "CUDA_LAUNCH_BLOCKING": ("0", "the host waits for each kernel"),
}


class Check(NamedTuple):
    """A line of the report; `is_fine` is False where something should be looked at."""

    text: str
    is_fine: bool = True


def check_versions() -> Iterator[Check]:
    """TensorFlow, Keras, Python and their settings."""
    yield Check(
        f"towers {towers.__version__}, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, Python {platform.python_version()}"
    )
    for name, (harmless, why) in SETTINGS.items():
        value = os.environ.get(name, harmless)
        if value != harmless:
            yield Check(f"{name}={value}: {why}; unset it", False)


def check_processor(devices: Devices) -> Iterator[Check]:
    """Cores, what else computes there, and the towers' devices."""
    load, quota = os.getloadavg()[0], _quota()
    text = f"{num_cores()} processor cores"
    if quota and quota < num_cores():
        text += f", of which this container may use the time of {quota:g}"
    is_free = load <= 0.5 * num_cores() + 1
    others = "" if is_free else ": other programs compute here"
    yield Check(f"{text}; load average {load:.1f}{others}", is_free)
    yield Check(f"towers on {', '.join(devices.towers)}")
    for remark in devices.remarks:
        yield Check(remark, devices.kind == "GPU")


def check_data(parts: Parts, secs: float) -> Iterator[Check]:
    """What was loaded, in so many seconds."""
    data, size = parts.data, num_bytes(parts.train_batches.source)
    where = f"{size / 1e6:,.0f} MB in memory" if size else "read from files"
    yield Check(
        f"data set {data.name}: {parts.num_examples:,} training and "
        f"{data.test.num_examples:,} test images, {where}, after {secs:.1f} s"
    )


def _quota() -> float | None:
    """Cores whose time a container may use; None without a limit."""
    try:
        most, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None
