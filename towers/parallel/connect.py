"""The start of a cluster: the wait for the other workers, and TensorFlow's server.

While TensorFlow waits for workers, no signal is served and no time limit holds (tried
with 2.21: it keeps the interpreter's lock). So it is called only when every worker is
known to be there: each listens at its port, greets with a checksum of the list of
workers and its own number, and looks whether the others do.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.eager import context

from towers.errors import ConfigError, WorkerLostError, one_line
from towers.parallel.workers import Workers

# A worker is lost after so many seconds without a sign of life.
HEARTBEAT_SECS = 10.0

# Workers that are waited for are named after so many seconds.
_PATIENCE_SECS = 10.0

# TensorFlow's servers find each other within this time, or the process ends with exit
# code 1 and the stacks of its threads.
_START_SECS = 120.0


def connect(
    addresses: Sequence[str],
    index: int,
    *,
    num_gpus: int,
    communication: str,
    wait_secs: float,
    heartbeat_secs: float = HEARTBEAT_SECS,
    say: Callable[[str], None] = print,
) -> Workers:
    """Waits for all workers and starts TensorFlow's server.

    To be called before TensorFlow first computes, after its devices were configured.

    Args:
        addresses: host:port of all workers.
        index: of this one.
        num_gpus: GPUs of each worker whose tensors are added up; 0 for the host.
        communication: one of COMMUNICATIONS.
        wait_secs: so long it waits for the others.
        heartbeat_secs: see HEARTBEAT_SECS.
        say: takes a line for the user.

    Raises:
        ConfigError: this worker cannot listen, or another one has another list or the
            number of another.
        WorkerLostError: not all workers came, or the server did not start.
    """
    _wait_for_all(addresses, index, wait_secs, say)
    # gRPC would ask a proxy for the other workers.
    hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
    os.environ["no_grpc_proxy"] = ",".join(hosts)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}),
        task_type="worker",
        task_id=index,
        num_accelerators={"GPU": num_gpus},
        rpc_layer="grpc",
    )
    implementation = tf.distribute.experimental.CommunicationImplementation[
        communication.upper()
    ]
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=implementation
    )
    jobs = context.coordination_config_pb2.CoordinatedJob(
        name="worker", num_tasks=len(addresses)
    )
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=int(1000 * heartbeat_secs),
        shutdown_barrier_timeout_in_ms=1000,
        coordinated_jobs=[jobs],
    )
    # TensorFlow takes SIGTERM for itself.
    handler = signal.getsignal(signal.SIGTERM)
    # Where one ends at this very moment, TensorFlow would wait for it for ever. The
    # standard error of a notebook may be no file.
    with contextlib.suppress(AttributeError, OSError, RuntimeError):
        faulthandler.dump_traceback_later(_START_SECS, exit=True)
    try:
        engine = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except RuntimeError as error:
        raise ConfigError(
            f"TensorFlow has computed already in this process: {one_line(error, 150)}; "
            "train with several workers from a process of its own"
        ) from None
    except tf.errors.OpError as error:
        raise WorkerLostError(
            f"the server of worker {index} did not start: "
            f"{one_line(error.message, 250)}"
        ) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        if threading.current_thread() is threading.main_thread() and handler:
            signal.signal(signal.SIGTERM, handler)
    return Workers(engine, addresses, index)


def _wait_for_all(addresses, index, wait_secs, say):
    """Waits until somebody listens at each of the addresses."""
    greetings = [_greeting(addresses, i) for i in range(len(addresses))]
    begun, is_patient = time.monotonic(), True
    missing = [i for i in range(len(addresses)) if i != index]
    port = int(addresses[index].rpartition(":")[2])
    with _listening(port) as listener, _answering(listener, greetings[index]):
        while missing:
            missing = [i for i in missing if not _is_there(i, addresses[i], greetings)]
            waited = time.monotonic() - begun
            names = ", ".join(f"{i} ({addresses[i]})" for i in missing[:5])
            if missing and waited > wait_secs:
                raise WorkerLostError(
                    f"worker {names} did not come within {wait_secs:g} s"
                )
            if missing and waited > _PATIENCE_SECS and is_patient:
                say(f"waiting for worker {names}, up to {wait_secs:g} s")
                is_patient = False
            if missing:
                time.sleep(0.1)


def _greeting(addresses, index):
    """What a worker says to those who look whether it is there."""
    checksum = zlib.crc32(",".join(addresses).encode())
    return f"towers {checksum:08x} {index}\n".encode()


@contextlib.contextmanager
def _answering(listener, greeting):
    """Answers those who look whether this worker is there, in a thread: two that look
    for each other must not wait for each other."""
    stop = threading.Event()
    listener.settimeout(0.1)

    def answer():
        while not stop.is_set():
            # Nobody has come, or the other one is gone again.
            with contextlib.suppress(OSError), listener.accept()[0] as other:
                other.sendall(greeting)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _listening(port):
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"this worker cannot listen on port {port}: {error.strerror}; end the "
            "process that does, or take another port"
        ) from None
    return listener


def _is_there(index, address, greetings):
    """Whether a worker waits, or its TensorFlow has started.

    Raises:
        ConfigError: it is another worker, waits for others than this one, or is none.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1) as probe:
            if probe.getsockname() == probe.getpeername():
                return False  # on loopback a probe can find itself
            heard = probe.recv(max(map(len, greetings)))
    except OSError:
        return False
    is_http_2 = heard[3:4] == b"\x04"  # gRPC begins with a frame of settings
    if not heard or heard == greetings[index] or is_http_2:
        return bool(heard)
    if heard in greetings:
        raise ConfigError(
            f"worker {index} ({address}) says that it is worker "
            f"{greetings.index(heard)}; give every machine its own --task_index, "
            "or index in TF_CONFIG"
        )
    if heard.startswith(b"towers "):
        raise ConfigError(
            f"worker {index} ({address}) has another list of workers; give all of them "
            "the same, in the same order"
        )
    raise ConfigError(
        f"worker {index} ({address}): what listens there is not TensorFlow; give the "
        "ports of the workers"
    )
