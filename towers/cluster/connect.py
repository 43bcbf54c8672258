"""The start of a cluster: the wait for the other workers, and TensorFlow's server.

While TensorFlow waits for workers, no signal is served and no time limit holds (tried
with 2.21: it keeps the interpreter's lock). So it is called only when every worker is
known to be there: each listens at its port, greets with its number, and looks whether
the others do.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from towers import console, tf_internals
from towers.cluster.workers import Workers
from towers.errors import ConfigError, WorkerLostError, one_line

# A worker without a heartbeat for this time is lost.
HEARTBEAT_SECS = 10.0

# Missing workers are named after this time.
_ANNOUNCE_SECS = 10.0

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
) -> Workers:
    """Waits for all workers and starts TensorFlow's server, before TensorFlow first
    computes, after its devices were configured.

    `num_gpus` are those of each worker whose tensors are added up, 0 for the host.
    ConfigError where this worker cannot listen, or another program, or another worker,
    listens at the address of a worker; WorkerLostError where not all workers came, or
    the server did not start.
    """
    wait_for_all(addresses, index, wait_secs)
    # gRPC would ask a proxy for the other workers.
    os.environ["no_grpc_proxy"] = ",".join(_split(address)[0] for address in addresses)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}),
        task_type="worker",
        task_id=index,
        num_accelerators={"GPU": num_gpus},
        rpc_layer="grpc",
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[
            communication.upper()
        ]
    )
    tf_internals.configure_coordination_service(len(addresses), heartbeat_secs)
    # TensorFlow takes SIGTERM for itself.
    handler = signal.getsignal(signal.SIGTERM)
    # Where one ends at this very moment, TensorFlow would wait for it for ever. In a
    # notebook `sys.stderr` is no file.
    faulthandler.dump_traceback_later(_START_SECS, exit=True, file=sys.__stderr__)
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


def wait_for_all(addresses: Sequence[str], index: int, wait_secs: float) -> None:
    """Waits until every worker listens at its address; errors are as in `connect`."""
    begun, announced = time.monotonic(), False
    missing = [i for i in range(len(addresses)) if i != index]
    with _answering(_split(addresses[index])[1], _greeting(index)):
        while missing := [i for i in missing if not _is_there(i, addresses[i])]:
            waited = time.monotonic() - begun
            names = ", ".join(f"{i} ({addresses[i]})" for i in missing[:5])
            if waited > wait_secs:
                raise WorkerLostError(
                    f"worker {names} did not come within {wait_secs:g} s"
                )
            if waited > _ANNOUNCE_SECS and not announced:
                console.line(f"waiting for worker {names}, up to {wait_secs:g} s")
                announced = True
            time.sleep(0.1)


def _greeting(index):
    return f"worker {index} of towers\n".encode()


def _split(address):
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _answering(port, greeting):
    """Greets those who probe a port, in a thread: two workers that probe each other
    must not wait for each other."""
    dual, stop = socket.has_dualstack_ipv6(), threading.Event()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"this worker cannot listen on port {port}: {error.strerror}; end the "
            "process that does, or take another port"
        ) from None
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
        listener.close()


def _is_there(index, address):
    """True if a worker waits, or its TensorFlow has started. ConfigError where it is
    another worker, or none."""
    try:
        with socket.create_connection(_split(address), 1) as probe:
            if probe.getsockname() == probe.getpeername():
                return False  # on loopback a probe can find itself
            heard = probe.recv(100)
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
