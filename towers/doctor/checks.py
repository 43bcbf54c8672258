"""Checks before anything is timed: versions, processor, data set, disk, kernels."""

import os
import pathlib
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator

import keras
import tensorflow as tf

import towers
from towers import store
from towers.build import Parts
from towers.data.sources import num_bytes
from towers.doctor.gpus import Check
from towers.doctor.placement import without_kernel
from towers.parallel.devices import Devices, num_cores
from towers.parallel.trainer import SynchronousTrainer, Trainer

# Settings with which TensorFlow is slower, the value that does no harm, and why.
SETTINGS = {
    "TF_ENABLE_ONEDNN_OPTS": ("1", "the fast kernels of CPUs are off"),
    "TF_NUM_INTRAOP_THREADS": ("", "it bounds the threads of an operation"),
    "NVIDIA_TF32_OVERRIDE": ("1", "float32 uses no tensor cores"),
    "CUDA_LAUNCH_BLOCKING": ("0", "the host waits for each kernel"),
}

# A file of this size, and how long it may take until it is on the disk.
SMALL_FILE_BYTES, SLOW_FILE_SECS = 4096, 0.1
NUM_FILES = 5


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


def check_disk(folder: pathlib.Path, checkpoint_bytes: int) -> Iterator[Check]:
    """Room and speed of the disk of a folder.

    Args:
        folder: that is there.
        checkpoint_bytes: of all checkpoints that a run keeps.

    Raises:
        OSError: nothing can be written there.
    """
    free = shutil.disk_usage(folder).free
    yield Check(
        f"disk of {folder}: {free / 1e6:,.0f} MB free; checkpoints will take "
        f"{checkpoint_bytes / 1e6:,.1f}",
        free > checkpoint_bytes,
    )
    times = []
    with tempfile.TemporaryDirectory(prefix=".towers-doctor-", dir=folder) as inside:
        for number in range(NUM_FILES):
            path, started = pathlib.Path(inside, str(number)), time.perf_counter()
            path.write_bytes(bytes(SMALL_FILE_BYTES))
            store.sync(path)
            times.append(time.perf_counter() - started)
    secs = sorted(times)[NUM_FILES // 2]
    text = f"a small file is on it after {1e3 * secs:.2g} ms"
    yield Check(text, secs < SLOW_FILE_SECS)


def check_kernels(trainer: Trainer) -> Iterator[Check]:
    """Operations of the traced step that a GPU cannot compute: each is computed on the
    host, and its inputs are copied there."""
    if "GPU" not in trainer.devices[0] or not isinstance(trainer, SynchronousTrainer):
        return
    groups = [x for graph in trainer.trace() for x in without_kernel(graph)]
    if not groups:
        yield Check("every operation of the step has a kernel for GPUs")
    for group in groups:
        yield Check(f"no kernel for GPUs: {group}", False)


def _quota() -> float | None:
    """Cores whose time a container may use; None without a limit."""
    try:
        most, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None
