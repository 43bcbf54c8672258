"""Has Ray place the workers of a cluster on its nodes, and restarts them.

    python -m towers.on_ray --num_workers=3 -- --config=cifar10_cnn

Each actor of Ray runs `python run_train.py --strategy=multi_worker` with the flags that
follow `--`, in a process of its own: Ray calls functions in threads, where no signal is
caught. Stops, restarts and the exit code are as in `towers.launch`.
"""

from towers import signals

if __name__ == "__main__":  # before the imports that take time
    signals.exit_on_signals()

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from towers import launch
from towers.cli import flags as config_flags
from towers.errors import ConfigError, WorkerLostError
from towers.messages import ROOT, one_line

PROGRAM = "towers.on_ray"


class RayHost:
    """Runs one worker on a node of Ray; an actor with two threads."""

    def __init__(self):
        self._ports, self._worker = contextlib.ExitStack(), None

    def address(self) -> str:
        """Return host:port for the worker; nobody else on the node gets the port."""
        import ray

        host = ray.util.get_node_ip_address()
        [port] = self._ports.enter_context(launch.free_ports(1))
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def work(self, index: int, folder: str, *args: Any) -> tuple[int | None, str]:
        """Run the worker in a folder; return its exit code and why it ended."""
        try:
            os.chdir(folder)
            worker = self._worker = launch.Worker(index, *args)
        except (OSError, ConfigError) as error:
            return ConfigError.exit_code, f"worker {index} cannot start: {error}"
        while not worker.has_ended():
            time.sleep(launch.TICK_SECS)
        launch.wait_for_lines(launch.LATE_SECS)
        return worker.code, str(worker)

    def send(self, number: int) -> None:
        """Send the worker a signal."""
        if self._worker:
            self._worker.send(number)


class RayWorker:
    """A worker that an actor runs, with the interface of `launch.Worker`."""

    code: int | None = None
    _end = ""

    def __init__(self, index: int, actor: Any, outcome: Any):
        self.index, self._actor, self._outcome = index, actor, outcome
        self._sent: set[int] = set()

    def __str__(self) -> str:
        return self._end

    def has_ended(self) -> bool:
        """Return whether the worker has ended, or its actor is lost."""
        import ray

        if self.code is None and ray.wait([self._outcome], timeout=0)[0]:
            try:
                self.code, self._end = ray.get(self._outcome)
            except ray.exceptions.RayError as error:
                self.code = WorkerLostError.exit_code
                self._end = f"worker {self.index} is lost: {one_line(error, 200)}"
        return self.code is not None

    def send(self, number: int) -> bool:
        """Send a signal, each at most once; return whether it was not sent before."""
        if number == signal.SIGINT:
            number = signal.SIGTERM  # Ray blocks the other one
        if number in self._sent:
            return False
        self._sent.add(number)
        self._actor.send.remote(number)
        return True


def run(
    command: Sequence[str],
    num_workers: int,
    max_restarts: int,
    cpus_per_worker: int,
    gpus_per_worker: int,
) -> int:
    """Run a command as every worker of a cluster; return the worst exit code.

    All are restarted also if a node is lost; WorkerLostError if the cluster of Ray is.
    """
    try:
        import ray
        from ray.util import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        why = f"Ray cannot be imported ({one_line(error, 100)})"
        raise ConfigError(f"{why}: python -m pip install '.[ray]'") from None
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
            line = f"Ray has {there:g} {name}s; waiting for {count * num_workers}"
            launch.print_line(PROGRAM, line)
    job = launch.job_environ()
    share = launch.Share(gpus=None if gpus_per_worker else "")

    @contextlib.contextmanager
    def start(stop):
        group = placement_group([resources] * num_workers, strategy="SPREAD")
        actors, workers, ready = [], [], group.ready()
        try:
            while not stop and not ray.wait([ready], timeout=launch.TICK_SECS)[0]:
                pass
            if not stop:
                ray.get(ready)
                options = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}
                for index in range(num_workers):
                    place = PlacementGroupSchedulingStrategy(group, index)
                    options |= {"max_concurrency": 2, "scheduling_strategy": place}
                    actors.append(ray.remote(RayHost).options(**options).remote())
                addresses = ray.get([actor.address.remote() for actor in actors])
                for index, actor in enumerate(actors):
                    environ = job | launch.tf_config(addresses, index)
                    outcome = actor.work.remote(index, folder, command, environ, share)
                    workers.append(RayWorker(index, actor, outcome))
            yield workers
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    try:
        return launch.supervise(start, PROGRAM, max_restarts=max_restarts)
    except ray.exceptions.RayError as lost:
        raise WorkerLostError(f"Ray: {lost}") from None
    finally:
        ray.shutdown()


def define_flags() -> None:
    """Define the flags before `--`."""
    launch.define_worker_flags(launch.MAX_COUNT)
    about = "CPUs that Ray reserves for each worker."
    flags.DEFINE_integer("cpus_per_worker", 1, about, 1, launch.MAX_COUNT)
    about = "GPUs that Ray reserves for each worker, which sees no others."
    flags.DEFINE_integer("gpus_per_worker", 0, about, 0, launch.MAX_COUNT)


def main(argv: Sequence[str]) -> int:
    """Run the workers; return their exit code."""
    values, command = flags.FLAGS, launch.train_command(argv[1:])
    reserved = values.cpus_per_worker, values.gpus_per_worker
    return run(command, values.num_workers, values.max_restarts, *reserved)


if __name__ == "__main__":
    define_flags()
    config_flags.start(main, launch.parse, PROGRAM)
