"""The devices of the towers, and what differs between CPUs and GPUs."""

import contextlib
import dataclasses
import os
import pathlib
import platform
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence

import keras
import tensorflow as tf

from towers.errors import ConfigError
from towers.keras_internals import layers_of
from towers.threads import num_cores, num_driver_gpus

# The CPU, which holds counters and metrics on any machine.
HOST = "/CPU:0"

# Tracing time grows faster than their number; see docs/reliability.md, "Sizes".
MAX_DEVICES = 256


@dataclasses.dataclass(frozen=True)
class Device:
    """The differences between CPUs and GPUs; docs/gpus.md gives the reasons."""

    kind: str  # TensorFlow's name.
    # Tensors are in host memory: no copies to the device, and int32 stays int32.
    in_host_memory: bool
    # The loop calls each step as a function, and the host asks after it whether it was
    # taken. Otherwise steps are part of the loop, step numbers live on the device, and
    # a refused step keeps the old values by selection.
    waits_for_host: bool
    updates_by_xla: bool  # With XLA the update is compiled too, not only the towers.
    stacks_updates: bool  # Parameters of one shape are updated together.
    has_nccl: bool  # Several devices can sum with NCCL.
    worker_pack_mb: float  # Size of the buffers in which workers send gradients.

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all devices of these names are of this kind."""
        return all(device_of(name) is self for name in names)


CPU = Device("CPU", True, True, False, False, False, 1.0)
GPU = Device("GPU", False, False, True, True, True, 25.0)


def device_of(name: str) -> Device:
    """Return the kind of a device by its name, such as "/GPU:1"."""
    return GPU if "GPU" in name else CPU


def share_memory(name: str, other: str) -> bool:
    """Return whether one device reads tensors of the other without a copy."""
    on_host = device_of(name).in_host_memory and device_of(other).in_host_memory
    return name == other or on_host


RESTART = (
    "TensorFlow has made its devices already and cannot change them in this process; "
    "restart it (in a notebook its kernel)"
)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The chosen devices."""

    kind: str  # "CPU" or "GPU".
    towers: tuple[str, ...]  # A device name per tower, such as "/GPU:1".
    remarks: tuple[str, ...] = ()  # Lines for the start banner.
    share_gpus: bool = False  # Each GPU is split into several logical devices.


def configure(
    device: str,
    num_towers: int,
    device_order: str = "",
    device_memory_mb: float = 0.0,
    core_per_tower: bool = True,
    cpu_towers: int = 1,
) -> Devices:
    """Choose the towers' devices and set up TensorFlow for them.

    GPUs without a tower are hidden, so that TensorFlow reserves no memory there; memory
    of the others grows as needed. TensorFlow creates its devices when it first computes
    and cannot change them later: a second call in a process returns existing devices,
    or is refused.

    With `device_memory_mb`, the limit of a logical device, each GPU is split into as
    many as `num_towers` needs. With `core_per_tower` CPU towers compute with one thread
    each if there are at least as many as cores; this applies to the whole process, also
    later. `num_towers` 0 stands for all GPUs, or for `cpu_towers` without GPUs.

    Raises:
        ConfigError: there are fewer devices than num_towers.
    """
    order = _numbers(device_order, num_towers)
    if max(order, default=num_towers - 1) >= MAX_DEVICES:
        option = f"device_order={device_order}" if order else f"num_towers={num_towers}"
        why = f"more than the {MAX_DEVICES} devices of a process; lower it"
        raise ConfigError(f"{option:.100}: {why}")
    all_gpus = [] if device == "cpu" else tf.config.list_physical_devices("GPU")
    gpus = [gpu for gpu in show_gpus(all_gpus) if gpu in all_gpus]
    why = "" if gpus or device == "cpu" else unused_gpu()
    if len(gpus) < len(all_gpus):
        why = f"{len(gpus)} of {len(all_gpus)} GPU(s) are visible: {RESTART}"
    if gpus:
        # A thread of its own launches the kernels of each GPU.
        os.environ.setdefault("TF_GPU_THREAD_MODE", "gpu_private")
        return _gpu_towers(all_gpus, gpus, order, num_towers, device_memory_mb, why)
    if device == "gpu":
        why = why or "use --device=cpu or --device=auto"
        raise ConfigError(f"device=gpu: TensorFlow sees no GPU; {why}")
    remarks = [why] if why else []
    if device == "auto":
        remarks.insert(0, "TensorFlow sees no GPU, so the towers run on the CPU")
    is_chosen = bool(order or num_towers)
    order = order or range(num_towers or cpu_towers)
    try:
        _make_logical_cpus(max(order) + 1, core_per_tower and len(order) >= num_cores())
    except ConfigError:
        if is_chosen:
            raise
        order = range(1)
    return Devices(CPU.kind, tuple(f"/CPU:{i}" for i in order), tuple(remarks))


def _gpu_towers(all_gpus, gpus, order, num_towers, device_memory_mb, why):
    """Choose GPUs and hide the others; `why` explains why some cannot be used."""
    remarks = [why] if why and not (order or num_towers) else []
    numbered = all_gpus if order else gpus
    order = order or range(num_towers or len(gpus))
    per_gpu = -(-(max(order) + 1) // len(numbered)) if device_memory_mb else 1
    if max(order) >= per_gpu * len(numbered):
        why = why or "one tower runs on one GPU"
        raise ConfigError(
            f"num_towers={len(order)} up to GPU {max(order)} with {len(numbered)} "
            f"GPU(s): {why}; lower --num_towers or use --device=cpu"
        )
    used = [numbered[i // per_gpu] for i in order]
    shown = show_gpus([gpu for gpu in all_gpus if gpu in used])
    if not set(used) <= set(shown):
        raise ConfigError(f"device_order={','.join(map(str, order))}: {why}")
    if device_memory_mb:
        limit = int(device_memory_mb * 1e6 / 2**20)  # TensorFlow counts in MiB
        option = f"device_memory_mb={device_memory_mb:g} with {per_gpu} device(s)"
        for gpu in shown:
            _make_logical(gpu, per_gpu, f"{option} on a GPU: {RESTART}", limit)
    else:
        remarks += _set_memory_growth(shown)
    if shown != all_gpus[: len(shown)]:
        numbers = ", ".join(str(all_gpus.index(gpu)) for gpu in shown)
        remarks.append(f"of the GPUs {numbers} are visible, here numbered from 0")
    # TensorFlow numbers the devices of the visible GPUs.
    towers = (
        f"/GPU:{per_gpu * shown.index(gpu) + i % per_gpu}"
        for gpu, i in zip(used, order, strict=True)
    )
    return Devices(GPU.kind, tuple(towers), tuple(remarks), per_gpu > 1)


def show_gpus(gpus: Sequence[tf.config.PhysicalDevice] = ()) -> list:
    """Hide all other GPUs; return the visible ones, in order.

    TensorFlow reserves no memory on hidden GPUs. Once it has created its devices, it
    cannot change them, and other GPUs may be visible.
    """
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices(list(gpus), "GPU")
    visible = tf.config.get_visible_devices("GPU")
    return [gpu for gpu in tf.config.list_physical_devices("GPU") if gpu in visible]


def _numbers(device_order, num_towers):
    if not device_order:
        return []
    try:
        order = [int(number) for number in device_order.split(",")]
    except ValueError:
        order = [-1]
    if min(order) < 0 or len(set(order)) != len(order):
        way = "must be different numbers with commas between, such as 0,1,4,5"
        raise ConfigError(f"device_order={device_order}: {way}")
    if num_towers and len(order) != num_towers:
        both = f"{len(order)} devices, but num_towers={num_towers}"
        raise ConfigError(f"device_order={device_order} names {both}")
    return order


def processor_name() -> str:
    """Return the name of the CPU, if the system reports it."""
    with contextlib.suppress(OSError):
        table = pathlib.Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*: (.*)$", table, re.M):
            return match[1]
    return platform.processor()


def gpu_names() -> list[str]:
    """Return the distinct names of the GPUs that TensorFlow uses."""
    gpus = tf.config.get_visible_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return sorted({x.get("device_name", "") for x in details})


def _make_logical_cpus(count, core_per_tower):
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(configured) >= count:
        return
    refusal = (
        f"num_towers={count} with {len(configured)} logical CPU device(s): {RESTART}, "
        "or lower --num_towers"
    )
    _make_logical(cpu, count, refusal)
    if core_per_tower:
        tf.config.threading.set_intra_op_parallelism_threads(1)


def _make_logical(device, count, refusal, memory_limit=None):
    made = tf.config.LogicalDeviceConfiguration(memory_limit=memory_limit)
    try:
        tf.config.set_logical_device_configuration(device, [made] * count)
    except RuntimeError:
        raise ConfigError(refusal) from None


def _set_memory_growth(gpus):
    """Let the memory of GPUs grow; return remarks for the start banner."""
    for gpu in gpus:
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            return ("TensorFlow was used before, and has taken all memory of the GPUs",)
        except ValueError:  # The GPU has logical devices.
            why = f"device_memory_mb=0 after a call with a limit: {RESTART}"
            raise ConfigError(why) from None
    return ()


def unused_gpu() -> str:
    """Return a hint if the driver sees a GPU that TensorFlow does not; otherwise ""."""
    count = num_driver_gpus()
    if not count:
        return ""
    return (
        f"the driver sees {count} GPU(s) that TensorFlow cannot use: pip install "
        "'tensorflow[and-cuda]' brings its CUDA packages; with TF_CPP_MIN_LOG_LEVEL=0 "
        "TensorFlow prints what is missing"
    )


def check_memory(num_bytes: Mapping[str, int], device_memory_mb: float) -> None:
    """Raise ConfigError if variables (device -> bytes) exceed the memory limit."""
    device, most = max(num_bytes.items(), key=lambda item: item[1])
    if most > device_memory_mb * 1e6:
        why = f"the variables on {device} alone take {most / 1e6:.1f} MB"
        way = "raise it, lower --width, or split it by --strategy=model_parallel"
        raise ConfigError(f"device_memory_mb={device_memory_mb:g}: {why}; {way}")


def normalize_in_nhwc(model: keras.Model) -> None:
    """Let the GPU kernels of batch normalization in 16 bits compute in NHWC.

    Without cuDNN's persistent mode they transpose to NCHW and back, five times per
    layer and step (TensorFlow 2.21, `fused_batch_norm_op.cc`). The mode needs multiples
    of four channels; TensorFlow reads it once, before the first of these kernels.
    """
    layers = layers_of(model)
    norms = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    if norms and all(x.moving_mean.shape[0] % 4 == 0 for x in norms):
        os.environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")


def enable_determinism() -> None:
    """Use deterministic kernels, and no TF32, so that results repeat bit for bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tf.config.experimental.enable_op_determinism()
        tf.config.experimental.enable_tensor_float_32_execution(False)
