"""Has Ray Train place the workers of a cluster on the nodes of Ray, and restart them.

    python -m towers.on_ray --num_workers=3 -- --config=cifar10_cnn

Each worker of Ray runs `python run_train.py --strategy=multi_worker` with the flags
that follow `--`, in a process of its own: Ray calls a function in a thread, where no
signal is caught, after it has imported TensorFlow. TF_CONFIG comes from Ray. A signal
stops all workers. The exit code is as that of `towers.launch`.
"""

from towers.run import signals

if __name__ == "__main__":  # before the imports that take time
    signals.exit_on_signals()

import contextlib
import functools
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence

from absl import flags

from towers import quiet_imports
from towers.config import flags as config_flags
from towers.errors import ConfigError, Preempted, WorkerLostError, one_line
from towers.launch.__main__ import ROOT, WAY_OUT, parse, train_command
from towers.launch.cluster import GRACE_SECS
from towers.launch.machine import Share
from towers.launch.outcomes import Outcomes, cause_of, run_worker

PROGRAM = "towers.on_ray"
MOST = 2**16  # workers, and CPUs or GPUs of one: beyond any cluster


def run(
    command: Sequence[str],
    num_workers: int,
    *,
    max_restarts: int = 0,
    cpus_per_worker: int = 1,
    gpus_per_worker: int = 0,
) -> int:
    """Runs a command as every worker of a cluster; call it in the main thread.

    Args:
        command: a program and its arguments, the same on all nodes of Ray.
        num_workers: number of processes.
        max_restarts: how often Ray starts all of them anew where the cause may pass,
            see `towers.launch.cluster.launch`, or where a node is lost.
        cpus_per_worker: that Ray reserves.
        gpus_per_worker: that Ray reserves; a worker sees no others.

    Returns:
        The exit code, see `towers.launch.cluster.worst`.

    Raises:
        ConfigError: Ray is missing, or cannot do that.
        WorkerLostError: the cluster of Ray is lost.
    """
    try:
        with quiet_imports():
            import ray
            from ray import train
            from ray.train.tensorflow import TensorflowTrainer
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise ConfigError(
            f"Ray cannot be imported ({one_line(error, 100)}); it comes with the extra "
            "ray of towers: python -m pip install '.[ray]'"
        ) from None
    folder = os.getcwd()
    try:
        with contextlib.chdir(ROOT):  # where the processes of Ray find this package
            ray.init()
        signals.exit_on_signals()  # in place of Ray's, which ends with exit code 15
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray: {error}") from None
    resources = {"CPU": cpus_per_worker}
    if gpus_per_worker:
        resources["GPU"] = gpus_per_worker
    for name, count in resources.items():
        if (there := ray.cluster_resources().get(name, 0)) < count * num_workers:
            _say(f"Ray has {there:g} {name}s; waiting for {count * num_workers}")
    # On this node, as with this process the run ends anyhow.
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    actor = ray.remote(num_cpus=0, scheduling_strategy=here)(Outcomes).remote()

    def ask(method, *args):
        return ray.get(getattr(actor, method).remote(*args))

    share = Share(gpus=None if gpus_per_worker else "")
    # Processes of Ray that end may still write there.
    with tempfile.TemporaryDirectory(
        prefix="towers-ray-", ignore_cleanup_errors=True
    ) as notes:
        trainer = TensorflowTrainer(
            functools.partial(
                run_worker, command, folder, share, num_workers, ask, str(uuid.uuid4())
            ),
            scaling_config=train.ScalingConfig(
                num_workers=num_workers,
                use_gpu=bool(gpus_per_worker),
                resources_per_worker=resources,
                placement_strategy="SPREAD",
            ),
            run_config=train.RunConfig(
                storage_path=notes,
                failure_config=train.FailureConfig(max_failures=max_restarts),
                logging_config=train.LoggingConfig(log_level="WARNING"),
            ),
        )
        try:
            error = _until_signal(trainer.fit, lambda: ask("stop"))
            outcomes, _ = ask("get")
        except ray.exceptions.RayError as lost:
            raise WorkerLostError(f"Ray: {lost}") from None
    ray.shutdown()
    if isinstance(error, train.ControllerError):
        raise ConfigError(f"Ray: {error}")
    if error or len(outcomes) < num_workers:
        outcomes.append((Preempted.exit_code, str(error or "stopped by a signal")))
    code, description = cause_of(outcomes)
    if code:
        _say(description)
    return code


def _until_signal(fit, stop, most_secs=2 * GRACE_SECS):
    """Calls `fit`, and `stop` after a signal; returns what `fit` raises, or None.

    Args:
        fit: not waited for after a signal when none of its workers is left.
        stop: whether one is left; it asks them to stop.
        most_secs: after a signal it waits no longer than this.
    """
    errors, received = [], []  # received: when

    def call():
        try:
            fit()
        except Exception as error:
            errors.append(error)

    # Elsewhere than in the main thread, which serves the signals.
    thread = threading.Thread(target=call, daemon=True)
    handlers = signals.catch(lambda *_: received.append(time.monotonic()))
    thread.start()
    while thread.is_alive() and (
        not received or stop() and time.monotonic() < received[0] + most_secs
    ):
        thread.join(0.5)
    signals.restore(handlers)
    return errors[0] if errors else None


def _say(line):
    with contextlib.suppress(AttributeError, OSError, ValueError):
        print(f"{PROGRAM}: {one_line(line)}", file=sys.stderr, flush=True)


def define_flags() -> None:
    """The flags before `--`."""
    for name, default, least, help_text in (
        ("num_workers", None, 1, "Number of worker processes."),
        ("max_restarts", 0, 0, "How often Ray starts all workers anew when one was "
         "killed, was stuck, met a defect, or lost its node."),
        ("cpus_per_worker", 1, 1, "CPUs that Ray reserves for each worker."),
        ("gpus_per_worker", 0, 0, "GPUs that Ray reserves for each worker, which sees "
         "no others."),
    ):  # fmt: skip
        flags.DEFINE_integer(name, default, help_text, least, MOST)
    flags.mark_flag_as_required("num_workers")


def main(argv: Sequence[str]) -> int:
    """Runs the workers; returns their exit code."""
    if len(argv) < 2:
        raise ConfigError(f"no command: {WAY_OUT}")
    names = ("max_restarts", "cpus_per_worker", "gpus_per_worker")
    options = {name: flags.FLAGS[name].value for name in names}
    return run(train_command(argv[1:]), flags.FLAGS.num_workers, **options)


if __name__ == "__main__":
    define_flags()
    config_flags.run(main, parse, PROGRAM)
