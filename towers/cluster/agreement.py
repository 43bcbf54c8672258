"""Joining the workers of a run, and what all of them must agree on.

While TensorFlow 2.21 waits for workers, it keeps the interpreter's lock: no signal is
served and no time limit holds. So it is called only when every worker is known to be
there: each listens at its port, greets with its number, and probes the others.
"""

import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import console, tf_internals
from towers.cluster.spec import Cluster
from towers.cluster.workers import ClusterWorkers
from towers.data.sources import DataSet
from towers.errors import ConfigError, NumericError, WorkerLostError
from towers.messages import one_line
from towers.parallel.devices import Devices, gpu_names, processor_name
from towers.parallel.workers import SINGLE_WORKER, Workers
from towers.run.checkpoint import versions
from towers.threads import num_cores

# Time that a worker waits for the others to start, if --stuck_after_secs is 0.
START_SECS = 600.0

# Time that the chief waits for the lock of its folder: a network file system keeps the
# lock of a lost machine, usually for 90 s.
LOCK_SECS = 120.0

# Options in which workers may differ.
_LOCAL = "data_dir image_dir image_cache_mb device_memory_mb stuck_after_secs".split()

# Preprocessing that a run takes from the weights that it starts from.
_PREPROCESSING = {"interpolation", "center_crop", "fit", "mean", "std"}

NUM_CHECKED = 16  # number of training images that are compared between workers

# TensorFlow reads the number of threads of an operation from this variable.
_THREADS = "TF_NUM_INTRAOP_THREADS"

HEARTBEAT_SECS = 10.0  # a worker without a heartbeat for this time is lost
_ANNOUNCE_SECS = 10.0  # missing workers are named after this time

# Time that a worker waits for a name to resolve: Kubernetes creates the names of a
# Service when its pods start.
NAME_SECS = 30.0

# TensorFlow's servers find each other within this time, or the process ends with exit
# code 1 and the stacks of its threads.
_SERVER_SECS = 120.0

# The activity of a worker that is ahead of others.
WAITING = "waiting for the other workers"


def refuse_workers(cluster: Cluster | None, option: str) -> None:
    """Raise ConfigError if there are several workers, and an option takes one."""
    if cluster is not None and cluster.size > 1:
        why = f"{cluster.origin} names {cluster.size} workers, and {option} takes one "
        raise ConfigError(f"{why}process: call it without them")


def join(
    cluster: Cluster | None, devices: Devices, options: dict[str, Any], has_sums: bool
) -> Workers:
    """Start the server of this worker, and wait for the others, which must be alike.

    `options` are the fields of Config. With `has_sums` each worker sums by itself, and
    all must round alike.
    """
    if cluster is None:
        return SINGLE_WORKER
    port = cluster.address.rpartition(":")[2]
    console.line(
        f"worker {cluster.index} of {cluster.size} ({cluster.origin}): TensorFlow's "
        f"server listens on port {port} of all addresses of this machine, without a "
        "password and unencrypted; keep it in a private network"
    )
    secs = options["stuck_after_secs"] or START_SECS
    workers = connect(
        cluster.addresses,
        cluster.index,
        num_gpus=len(devices.towers) if devices.kind == "GPU" else 0,
        communication=options["all_reduce"],
        wait_secs=secs,
        heartbeat_secs=min(HEARTBEAT_SECS, secs / 2),
    )
    own: dict[str, Any] = {k: v for k, v in versions().items() if k != "python"}
    own["devices"] = f"{len(devices.towers)} {devices.kind}"
    if has_sums and devices.kind == "GPU":
        own["GPUs"] = gpu_names()
    elif has_sums:
        own[f"threads ({_THREADS})"] = _num_threads()
        own["processor"] = processor_name()
    own |= {name: x for name, x in options.items() if name not in _LOCAL}
    validate_alike(workers, own, options["init_from"])
    return workers


def _num_threads():
    """Return the number of threads of an operation, as TensorFlow decides it."""
    text = os.environ.get(_THREADS, "").strip() or "0"
    if not re.fullmatch("[0-9]{1,4}", text):  # TensorFlow would ignore it
        raise ConfigError(f"{_THREADS}={text}: should be a number of threads")
    by_program = tf.config.threading.get_intra_op_parallelism_threads()
    return by_program or int(text) or num_cores()


def connect(
    addresses: Sequence[str],
    index: int,
    *,
    num_gpus: int,
    communication: str,
    wait_secs: float,
    heartbeat_secs: float = HEARTBEAT_SECS,
) -> Workers:
    """Wait for all workers and start TensorFlow's server, before it computes.

    Its devices must be configured; `num_gpus=0` sums on the host. ConfigError if this
    worker cannot listen, or another program uses an address; WorkerLostError if not all
    workers come.
    """
    wait_for_all(addresses, index, wait_secs)
    # gRPC would ask a proxy for the other workers.
    os.environ.update(no_grpc_proxy=",".join(_split(x)[0] for x in addresses))
    # A single thread would end the backward pass before it begins to send.
    if num_cores() == 1:
        os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}),
        task_type="worker",
        task_id=index,
        num_accelerators={"GPU": num_gpus},
        rpc_layer="grpc",
    )
    experimental = tf.distribute.experimental
    implementation = experimental.CommunicationImplementation[communication.upper()]
    options = experimental.CommunicationOptions(implementation=implementation)
    tf_internals.configure_coordination_service(len(addresses), heartbeat_secs)
    # TensorFlow takes SIGTERM for itself.
    handler = signal.getsignal(signal.SIGTERM)
    # TensorFlow would wait forever for a worker that ends at this very moment. In a
    # notebook `sys.stderr` is not a file.
    file = sys.__stderr__ or 2
    faulthandler.dump_traceback_later(_SERVER_SECS, exit=True, file=file)
    try:
        engine = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except RuntimeError as error:
        why = f"TensorFlow has computed in this process: {one_line(error, 150)}"
        raise ConfigError(f"{why}; several workers need a new one each") from None
    except tf.errors.OpError as error:
        why = one_line(error.message, 250)
        raise WorkerLostError(f"worker {index}'s server did not start: {why}") from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        if threading.current_thread() is threading.main_thread() and handler:
            signal.signal(signal.SIGTERM, handler)
    return ClusterWorkers(engine, addresses, index)


def wait_for_all(addresses: Sequence[str], index: int, wait_secs: float) -> None:
    """Wait until every worker listens at its address; errors are as in `connect`."""
    begun, printed = time.monotonic(), set()
    missing = [i for i in range(len(addresses)) if i != index]
    with _answering(_split(addresses[index])[1], _greeting(index)):
        while True:
            is_there = {i: _is_there(i, addresses[i]) for i in missing}
            missing = [i for i in missing if not is_there[i]]
            if not missing:
                return
            waited, limit, hint = time.monotonic() - begun, wait_secs, ""
            unresolved = [i for i in missing if is_there[i] is None]
            if unresolved:
                limit = min(wait_secs, NAME_SECS)
                hint = ": the host name does not resolve; correct it, or the network's"
            listed = (f"{i} ({addresses[i]})" for i in (unresolved or missing)[:5])
            named = f"worker {', '.join(listed)}"
            if waited > limit:
                raise WorkerLostError(f"{named} did not come within {limit:g} s{hint}")
            if (hint or waited >= _ANNOUNCE_SECS) and hint not in printed:
                console.line(f"waiting for {named}, up to {limit:g} s{hint}")
                printed.add(hint)
            time.sleep(0.1)


def _greeting(index):
    return f"worker {index} of towers\n".encode()


def _split(address):
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _answering(port, greeting):
    """Answer probes of a port in a thread, as two workers may probe each other."""
    dual, stop = socket.has_dualstack_ipv6(), threading.Event()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        why = f"this worker cannot listen on port {port}: {error.strerror}"
        way = "end the process that does, or take another port"
        raise ConfigError(f"{why}; {way}") from None
    listener.settimeout(0.1)

    def answer():
        while not stop.is_set():
            # Nobody has come, or the prober is gone again.
            with contextlib.suppress(OSError), listener.accept()[0] as other:
                other.sendall(greeting)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        listener.close()


def _is_there(index, address):
    """Return whether a worker waits or has started; None without its host name."""
    try:
        with socket.create_connection(_split(address), 1) as probe:
            if probe.getsockname() == probe.getpeername():
                return False  # on loopback a probe can find itself
            heard = probe.recv(100)
    except (socket.gaierror, UnicodeError):
        return None
    except OSError:
        return False
    is_grpc = heard[3:4] == b"\x04"  # HTTP/2 begins with a frame of settings
    if not heard or heard == _greeting(index) or is_grpc:
        return bool(heard)
    text = one_line(heard.decode(errors="replace").strip(), 60)
    raise ConfigError(
        f"worker {index} ({address}) says that it is {text!r}; give every machine the "
        "same list of workers, and its own --task_index, or index in TF_CONFIG"
    )


# Comparisons between workers.


def validate_data(
    workers: Workers, data: DataSet, num_examples: int, init_from: str = ""
) -> None:
    """Raise ConfigError if the data of workers differ."""
    if workers.size == 1 or data.train is None:
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
    validate_alike(workers, own, init_from)


def validate_alike(workers: Workers, own: Mapping[str, Any], init_from: str) -> None:
    """Raise ConfigError with names and both values if workers differ.

    A continued chief has the preprocessing from its checkpoint, others from
    `init_from`, which is named then.
    """
    for worker, differing in _unlike_chief(workers, own):
        listed = ", ".join(
            f"{name} is {other!r:.60} and the chief's {chief!r:.60}"
            for name, (other, chief) in differing.items()
        )
        if init_from and not _PREPROCESSING.isdisjoint(differing):
            listed += f"; every worker has to read init_from={init_from}"
        raise ConfigError(f"{worker} differs from the chief: {listed}")


def _unlike_chief(workers, own):
    """Yield each worker that differs from the chief, and name -> both values."""
    chief, *others = workers.exchange(own)
    for index, other in enumerate(others, start=1):
        both = {name: (other.get(name), chief.get(name)) for name in {**chief, **other}}
        if differing := {name: x for name, x in both.items() if x[0] != x[1]}:
            yield f"worker {index} ({workers.addresses[index]})", differing


def validate_copies(workers: Workers, state: Mapping[str, np.ndarray]) -> None:
    """Raise NumericError if a worker has other bits than the chief."""
    own = {k: zlib.crc32(array.tobytes()) for k, array in state.items()}
    for worker, differing in _unlike_chief(workers, own):
        name = f"{next(iter(differing))} of {worker}"
        raise NumericError(f"{name} differs from the chief's; the last save is whole")
