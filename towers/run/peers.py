"""The workers of a run: how this process joins them, and what all must agree on."""

import contextlib
import os
import pathlib
import platform
import re
import time
import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers
from towers import console
from towers.config import FIELDS, Config
from towers.data.sources import DataSet
from towers.errors import ConfigError, NumericError, Preempted, WorkerLostError
from towers.parallel.connect import HEARTBEAT_SECS, connect
from towers.parallel.devices import Devices, num_cores
from towers.parallel.workers import ALONE, Workers
from towers.run.cluster_spec import SLURM, Cluster, check_addresses, find_cluster
from towers.run.session import Session
from towers.run.stopwatch import Stopwatch

# How long a worker waits for the others to start, where --stuck_after_secs sets no
# limit.
START_SECS = 600.0

# How long the chief waits for the lock of its folder: that of a lost machine is
# kept by the server of a network file system, usually for 90 s.
LOCK_SECS = 120.0

# Options of a machine, in which workers may differ.
OWN_OPTIONS = ("data_dir", "image_cache_mb", "device_memory_mb", "stuck_after_secs")

# Training images that are compared between workers.
NUM_CHECKED = 16

# Number of threads of an operation; TensorFlow reads it where it makes its threads.
_THREADS = "TF_NUM_INTRAOP_THREADS"

# The activity of a worker that is ahead of others.
WAITING = "waiting for the other workers"


def cluster_of(
    config: Config, cluster: Cluster | None, allow_public_address: bool
) -> Cluster | None:
    """The cluster of a run; None where it has a single worker.

    Args:
        config: of the run.
        cluster: as the command gives it, or None for that of the environment.
        allow_public_address: see `check_addresses`.

    Raises:
        ConfigError: the description is wrong, or the strategy has no workers.
    """
    cluster = cluster or find_cluster()
    if cluster is None or cluster.size == 1:
        return None
    if not config.choice_of("strategy").processes:
        if cluster.origin == SLURM:
            return None  # several runs of one process each, such as a sweep
        raise ConfigError(
            f"{cluster.origin} names {cluster.size} workers, but "
            f"strategy={config.strategy} trains in one process; set "
            "--strategy=multi_worker"
        )
    if config.device_order:
        raise ConfigError(
            f"device_order={config.device_order} with several workers: each takes its "
            "GPUs in their order; set CUDA_VISIBLE_DEVICES"
        )
    check_addresses(cluster, allow_public_address)
    return cluster


def join(cluster: Cluster | None, config: Config, devices: Devices) -> Workers:
    """Starts the server of this worker and waits for the others.

    Raises:
        ConfigError: it cannot start, or options or versions differ.
        WorkerLostError: not all workers came.
    """
    if cluster is None:
        return ALONE
    port = cluster.address.rpartition(":")[2]
    console.line(
        f"worker {cluster.index} of {cluster.size} ({cluster.origin}): TensorFlow's "
        f"server listens on port {port} of all addresses of this machine, without a "
        "password and unencrypted; keep it in a private network"
    )
    limit = config.stuck_after_secs
    workers = connect(
        cluster.addresses,
        cluster.index,
        num_gpus=len(devices.towers) if devices.kind == "GPU" else 0,
        communication=config.all_reduce,
        wait_secs=limit or START_SECS,
        heartbeat_secs=min(HEARTBEAT_SECS, limit / 2) if limit else HEARTBEAT_SECS,
        say=console.line,
    )
    own = {
        "towers": towers.__version__,
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "NumPy": np.__version__,
        "devices": f"{len(devices.towers)} {devices.kind}",
    }
    if _sums_in_update(config):
        own |= _arithmetic(devices)
    options = {
        name: getattr(config, name) for name in FIELDS if name not in OWN_OPTIONS
    }
    check_alike(workers, own | options)
    return workers


def _sums_in_update(config):
    """Whether every worker adds up in an update by itself, so that these sums have to
    round alike: norms, and Muon's products."""
    return bool(config.clip_norm) or config.choice_of("optimizer").sums


def _arithmetic(devices):
    """What the rounding of a sum depends on."""
    if devices.kind == "GPU":
        gpus = tf.config.get_visible_devices("GPU")
        details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
        return {"GPUs": sorted({x.get("device_name", "") for x in details})}
    return {f"threads ({_THREADS})": _num_threads(), "processor": _processor_name()}


def _processor_name():
    with contextlib.suppress(OSError):
        table = pathlib.Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^model name\s*: (.*)$", table, re.M):
            return found[1]
    return platform.processor()


def _num_threads():
    """Threads of an operation on a CPU, in the order in which TensorFlow decides."""
    text = os.environ.get(_THREADS, "").strip() or "0"
    if not re.fullmatch("[0-9]{1,4}", text):  # TensorFlow would ignore it
        raise ConfigError(f"{_THREADS}={text}: should be a number of threads")
    by_program = tf.config.threading.get_intra_op_parallelism_threads()
    return by_program or int(text) or num_cores()


def check_data(workers: Workers, data: DataSet, num_examples: int) -> None:
    """Refuses workers whose data differ.

    Raises:
        ConfigError: what differs.
    """
    if workers.size == 1:
        return
    own = {
        "training images": num_examples,
        "test images": data.test.num_examples,
        "classes": list(data.class_names),
        "mean": list(data.mean),
        "deviation": list(data.deviation),
        f"the checksum of {NUM_CHECKED} training images": _checksum(data.train),
    }
    check_alike(workers, own)


def check_alike(workers: Workers, own: Mapping[str, Any]) -> None:
    """Refuses workers that differ from the chief, with the names and both values."""
    chief, *others = workers.exchange(own)
    for index, other in enumerate(others, start=1):
        differing = [
            f"{name} is {other.get(name)!r:.60} and that of the chief "
            f"{chief.get(name)!r:.60}"
            for name in {**chief, **other}
            if chief.get(name) != other.get(name)
        ]
        if differing:
            raise ConfigError(
                f"worker {index} ({workers.addresses[index]}) differs from the chief: "
                f"{', '.join(differing)}"
            )


def _checksum(source):
    """Of some images, over the whole data set, and their labels."""
    places = np.linspace(0, source.num_examples - 1, NUM_CHECKED).astype(np.int64)
    images, labels = source.read(tf.constant(places))
    content = b"".join(
        x if isinstance(x, bytes) else x.tobytes() for x in images.numpy()
    )
    return zlib.crc32(labels.numpy().tobytes(), zlib.crc32(content))


def start_from_chief(run: Session) -> None:
    """Gives every worker the state and the progress that the chief has restored; to be
    called inside of `Watchdog.run`."""
    if run.workers.size == 1:
        return
    progress = {
        "step": run.step,
        "best": run.best,
        "open_record": run.open_record,
        "accuracy": run.accuracy,
    }
    state = run.trainer.state()
    with run.watchdog.activity(WAITING):
        progress, *_ = run.workers.exchange(progress)
        state = run.workers.broadcast(state)
    for name, value in progress.items():
        setattr(run, name, value)
    run.trainer.load(state)
    if not run.workers.is_chief:
        run.stopwatch = Stopwatch()


def agree_on_steps(run: Session, num_steps: int) -> tuple[int, bool, bool]:
    """What all workers do next: what the chief would, by its clock.

    Returns:
        Steps to take, none after a signal to any worker; whether after them a
        checkpoint, and a summary, is due by the clock.
    """
    now, config = run.clock(), run.config
    with run.watchdog.activity(WAITING):
        num_steps, saves, summarizes = run.workers.agree(
            num_steps,
            now - run.saved_at > config.checkpoint_every_secs > 0,
            now - run.summarized_at > config.summary_every_secs > 0,
            run.watchdog.stop_requested,
        )
    run.stopped = not num_steps
    return num_steps, saves, summarizes


def wait_for_chief(run: Session) -> None:
    """No worker ends before the chief has saved the last step; or, where all have
    agreed to stop, at once: another one may still be receiving what they agreed.

    Raises:
        WorkerLostError: the chief is gone before the end of the run.
    """
    stops_alone = run.watchdog.stop_requested and not run.stopped
    if run.workers.size == 1 or stops_alone:
        return

    def meet():
        with run.watchdog.activity(WAITING):
            run.workers.agree(0, False, False, False)

    try:
        run.watchdog.run(meet)
    except (Preempted, WorkerLostError):
        if not (run.workers.is_chief or run.stopped):
            raise


def how_far(run: Session) -> str:
    """The last finished step of a run that lost a worker, and when it was."""
    step = int(run.trainer.progress()[0])
    clock = time.strftime("%H:%M:%S", time.localtime(run.watchdog.progress_at))
    line = f"step {step} was the last, at {clock}"
    if run.workers.is_chief and run.saved_step == step:
        line += f", and is saved in {run.folder.path}"
    return f"{line}; the same command continues"


def check_copies_of_workers(run: Session) -> None:
    """Refuses to go on where a worker has other bits than the chief.

    Raises:
        NumericError: names the worker and the variable.
    """
    if run.workers.size == 1:
        return
    own = {
        k: zlib.crc32(np.ascontiguousarray(v)) for k, v in run.trainer.state().items()
    }
    with run.watchdog.activity(WAITING):
        chief, *others = run.workers.exchange(own)
    for index, other in enumerate(others, start=1):
        for name in chief:
            if chief[name] != other[name]:
                raise NumericError(
                    f"{name} of worker {index} ({run.workers.addresses[index]}) "
                    "differs from that of the chief; the last checkpoint is whole"
                )
