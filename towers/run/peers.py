"""The workers of a run: how this process joins them, and what all must agree on."""

import os
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from towers import console
from towers.cluster.cluster_spec import SLURM, Cluster, find_cluster, validate_addresses
from towers.cluster.connect import HEARTBEAT_SECS, connect
from towers.cluster.workers import ALONE, Workers
from towers.config import FIELDS, Config
from towers.data.sources import DataSet
from towers.errors import ConfigError, NumericError
from towers.parallel.devices import Devices, gpu_names, num_cores, processor_name
from towers.run.checkpoint import versions

# How long a worker waits for the others to start, where --stuck_after_secs sets no
# limit.
START_SECS = 600.0

# Time that the chief waits for the lock of its folder: the server of a network file
# system keeps the lock of a lost machine, usually for 90 s.
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
    """The cluster of a run, as the command or else the environment gives it; None where
    it has a single worker. ConfigError where it is wrong, or the strategy has no
    workers."""
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
    validate_addresses(cluster, allow_public_address)
    return cluster


def join(cluster: Cluster | None, config: Config, devices: Devices) -> Workers:
    """Starts the server of this worker and waits for the others. ConfigError where it
    cannot start, or options or versions differ, WorkerLostError where not all came."""
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
    )
    own = {name: version for name, version in versions().items() if name != "python"}
    own["devices"] = f"{len(devices.towers)} {devices.kind}"
    # Norms, and Muon's products: every worker computes these sums by itself, and they
    # have to round alike.
    if config.clip_norm or config.choice_of("optimizer").sums:
        if devices.kind == "GPU":
            own["GPUs"] = gpu_names()
        else:
            own[f"threads ({_THREADS})"] = _num_threads()
            own["processor"] = processor_name()
    options = {
        name: getattr(config, name) for name in FIELDS if name not in OWN_OPTIONS
    }
    validate_alike(workers, own | options)
    return workers


def _num_threads():
    """Threads of an operation on a CPU, in the order in which TensorFlow decides."""
    text = os.environ.get(_THREADS, "").strip() or "0"
    if not re.fullmatch("[0-9]{1,4}", text):  # TensorFlow would ignore it
        raise ConfigError(f"{_THREADS}={text}: should be a number of threads")
    by_program = tf.config.threading.get_intra_op_parallelism_threads()
    return by_program or int(text) or num_cores()


def validate_data(workers: Workers, data: DataSet, num_examples: int) -> None:
    """Raises ConfigError where the data of workers differ."""
    if workers.size == 1:
        return
    # Some images, over the whole data set, and their labels.
    places = np.linspace(0, data.train.num_examples - 1, NUM_CHECKED).astype(np.int64)
    images, labels = data.train.read(tf.constant(places))
    content = b"".join(
        x if isinstance(x, bytes) else x.tobytes() for x in images.numpy()
    )
    own = {
        "training images": num_examples,
        "test images": data.test.num_examples,
        "classes": list(data.class_names),
        "mean": list(data.mean),
        "std": list(data.std),
        f"the checksum of {NUM_CHECKED} training images": zlib.crc32(
            labels.numpy().tobytes(), zlib.crc32(content)
        ),
    }
    validate_alike(workers, own)


def validate_alike(workers: Workers, own: Mapping[str, Any]) -> None:
    """Raises ConfigError where workers differ, with the names and both values."""
    for worker, differing in _unlike_chief(workers, own):
        listed = ", ".join(
            f"{name} is {other!r:.60} and the chief's {chief!r:.60}"
            for name, (other, chief) in differing.items()
        )
        raise ConfigError(f"{worker} differs from the chief: {listed}")


def _unlike_chief(workers, own):
    """The workers that differ from the chief, and name -> both values."""
    chief, *others = workers.exchange(own)
    for index, other in enumerate(others, start=1):
        both = {name: (other.get(name), chief.get(name)) for name in {**chief, **other}}
        if differing := {name: x for name, x in both.items() if x[0] != x[1]}:
            yield f"worker {index} ({workers.addresses[index]})", differing


def validate_copies(workers: Workers, state: Mapping[str, np.ndarray]) -> None:
    """Raises NumericError where a worker has other bits than the chief."""
    own = {k: zlib.crc32(np.ascontiguousarray(array)) for k, array in state.items()}
    for worker, differing in _unlike_chief(workers, own):
        raise NumericError(
            f"{next(iter(differing))} of {worker} differs from the chief's; "
            "the last checkpoint is whole"
        )
