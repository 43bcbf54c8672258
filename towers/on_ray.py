"""Has Ray place the workers of a cluster on its nodes, and restarts them.

    python -m towers.on_ray --num_workers=3 -- --config=cifar10_cnn

Each actor of Ray runs `python run_train.py --strategy=multi_worker` with the flags that
follow `--`, in a process of its own: Ray calls functions in threads, where no signal is
caught. Stops, restarts and the exit code are as in `towers.launch`.
"""

from towers.run import signals

if __name__ == "__main__":  # before the imports that take time
    signals.exit_on_signals()

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence

from absl import flags

from towers.cli import flags as config_flags
from towers.errors import ConfigError, WorkerLostError
from towers.launch import process
from towers.launch.__main__ import HINT, parse, train_command
from towers.launch.process import Share
from towers.launch.ray_host import RayHost
from towers.launch.supervisor import job_environ, supervise, tf_config
from towers.messages import ROOT, one_line

PROGRAM = "towers.on_ray"
MOST = 2**16  # workers, and CPUs or GPUs of one: beyond any cluster


class RayWorker:
    """A worker that an actor runs, with the attributes of a `Process`."""

    def __init__(self, index, actor, outcome):
        self.index, self._actor, self._sent = index, actor, set()
        self.code, self._end = None, f"worker {index} is running"
        self.ended = asyncio.create_task(self._until_end(outcome))

    def __str__(self) -> str:
        return self._end

    def send(self, number: int) -> bool:
        """As of a `Process`."""
        if number == signal.SIGINT:
            number = signal.SIGTERM  # Ray blocks the other one
        if number in self._sent:
            return False
        self._sent.add(number)
        self._actor.send.remote(number)
        return True

    async def _until_end(self, outcome):
        import ray

        try:
            self.code, self._end = await outcome
        except ray.exceptions.RayError as error:
            self.code = WorkerLostError.exit_code
            self._end = f"worker {self.index} is lost: {one_line(error, 200)}"


def launch(
    command: Sequence[str],
    num_workers: int,
    *,
    max_restarts: int = 0,
    cpus_per_worker: int = 1,
    gpus_per_worker: int = 0,
) -> int:
    """Runs a command as every worker of a cluster, in the main thread; returns the exit
    code, see `towers.launch.supervisor.worst`. All are restarted also where a node is
    lost; WorkerLostError where the cluster of Ray is.
    """
    try:
        import ray
        from ray.util import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
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
            process.say(f"Ray has {there:g} {name}s; waiting for {count * num_workers}")
    job, share = job_environ(), Share(gpus=None if gpus_per_worker else "")

    @contextlib.asynccontextmanager
    async def start(stopped) -> AsyncIterator[list[RayWorker]]:
        group = placement_group([resources] * num_workers, strategy="SPREAD")
        actors, workers = [], []
        try:
            ready = asyncio.ensure_future(group.ready())
            await asyncio.wait([ready, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                ready.result()
                actors = [
                    ray.remote(RayHost)
                    .options(
                        num_cpus=cpus_per_worker,
                        num_gpus=gpus_per_worker,
                        max_concurrency=2,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, i),
                    )
                    .remote()
                    for i in range(num_workers)
                ]
                addresses = await asyncio.gather(*(x.address.remote() for x in actors))
                started = [] if stopped.done() else actors
                for index, actor in enumerate(started):
                    environ = job | tf_config(addresses, index)
                    outcome = actor.work.remote(index, command, folder, environ, share)
                    workers.append(RayWorker(index, actor, outcome))
            yield workers
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    try:
        return supervise(start, max_restarts=max_restarts)
    except ray.exceptions.RayError as lost:
        raise WorkerLostError(f"Ray: {lost}") from None
    finally:
        ray.shutdown()


def define_flags() -> None:
    """The flags before `--`."""
    about = "Number of worker processes."
    flags.DEFINE_integer("num_workers", None, about, 1, MOST, required=True)
    about = "Maximum number of restarts of all workers after one was killed, was "
    about += "stuck, met a defect, or lost its node."
    flags.DEFINE_integer("max_restarts", 0, about, 0, MOST)
    about = "CPUs that Ray reserves for each worker."
    flags.DEFINE_integer("cpus_per_worker", 1, about, 1, MOST)
    about = "GPUs that Ray reserves for each worker, which sees no others."
    flags.DEFINE_integer("gpus_per_worker", 0, about, 0, MOST)


def main(argv: Sequence[str]) -> int:
    """Runs the workers; returns their exit code."""
    if len(argv) < 2:
        raise ConfigError(f"no command: {HINT}")
    process.program = PROGRAM
    names = ("max_restarts", "cpus_per_worker", "gpus_per_worker")
    options = {name: flags.FLAGS[name].value for name in names}
    return launch(train_command(argv[1:]), flags.FLAGS.num_workers, **options)


if __name__ == "__main__":
    define_flags()
    config_flags.start(main, parse, PROGRAM)
