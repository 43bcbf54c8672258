"""The start of a cluster: TensorFlow's server, and the wait for the other workers."""

import threading
import time
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context

from towers.errors import ConfigError, WorkerLostError, one_line
from towers.parallel.workers import Workers

# A worker is lost after so many seconds without a sign of life.
HEARTBEAT_SECS = 10.0


def connect(
    addresses: Sequence[str],
    index: int,
    *,
    num_gpus: int,
    communication: str,
    wait_secs: float,
    heartbeat_secs: float = HEARTBEAT_SECS,
) -> Workers:
    """Starts TensorFlow's server and waits until all workers have done so.

    To be called before TensorFlow first computes, after its devices were configured.

    Args:
        addresses: host:port of all workers.
        index: of this one.
        num_gpus: GPUs of each worker whose tensors are added up; 0 for the host.
        communication: one of COMMUNICATIONS.
        wait_secs: so long it waits for the others.
        heartbeat_secs: see HEARTBEAT_SECS.

    Raises:
        ConfigError: the server cannot start.
        WorkerLostError: not all workers came.
    """
    spec = tf.train.ClusterSpec({"worker": list(addresses)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec,
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
        cluster_register_timeout_in_ms=int(1000 * wait_secs),
        heartbeat_timeout_in_ms=int(1000 * heartbeat_secs),
        shutdown_barrier_timeout_in_ms=1000,
        coordinated_jobs=[jobs],
    )
    begun = time.monotonic()
    try:
        engine = _in_a_thread(
            lambda: tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        )
    except RuntimeError as error:
        raise ConfigError(
            f"TensorFlow has computed already in this process: {one_line(error, 150)}; "
            "train with several workers from a process of its own"
        ) from None
    except tf.errors.OpError as error:
        if time.monotonic() - begun < wait_secs / 2:
            raise ConfigError(
                f"worker {index} cannot listen at {addresses[index]}: "
                f"{one_line(error.message, 200)}"
            ) from None
        raise WorkerLostError(
            f"not all of {len(addresses)} workers came within {wait_secs:g} s: "
            f"{one_line(error.message, 200)}"
        ) from None
    return Workers(engine, addresses, index)


def _in_a_thread(function):
    """The result of a function that a signal could not interrupt: the main thread
    stays free to serve one."""
    outcome = {}

    def call():
        try:
            outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]
