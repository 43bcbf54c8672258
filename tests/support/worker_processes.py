"""Workers of a cluster on loopback; `python worker_processes.py` is one of them.

It reads a job per line, a JSON object, does it together with the other workers, and
writes what it has to a file. One process does many jobs, since each has to import
TensorFlow first.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
from collections.abc import Mapping

import numpy as np
from processes import Server, free_ports


@dataclasses.dataclass(frozen=True)
class Job:
    """A training; the fields are those of `Recipe`, `networks` and `create_trainer`.

    `network` is plain, local or sync; the last two have batch normalization. `calls`
    are the numbers of steps of each call.
    """

    network: str = "plain"
    optimizer: str = "momentum"
    accumulate_steps: int = 1
    batch_size: int = 13
    dtype: str = "float32"
    calls: tuple[int, ...] = (1, 4, 5)
    clip_norm: float = 0.0
    seed: int = 0

    def create_network(self):
        import networks

        kind = "plain" if self.network == "plain" else "residual"
        return networks.NETWORKS[kind](self.dtype)

    def recipe(self):
        from recipes import Recipe

        return Recipe(self.optimizer, self.clip_norm)

    def batches(self) -> list[dict]:
        import networks

        images = self.accumulate_steps * self.batch_size
        return networks.random_batches(10, images, seed=self.seed)

    def create_trainer(self, strategy, num_devices, batches, **options):
        """Create a trainer on batches of this process, with a tower on each device."""
        from recipes import create_trainer

        return create_trainer(
            strategy,
            self.create_network(),
            self.recipe(),
            batches,
            num_devices,
            micro_batch_size=self.batch_size,
            update_fn=self.recipe().update(self.accumulate_steps * self.batch_size),
            accumulate_steps=self.accumulate_steps,
            sync_batch_norm=self.network == "sync",
            **options,
        )


class WorkerProcesses:
    """Workers, with `num_devices` towers each, for many jobs; a context manager."""

    def __init__(self, count: int, folder: pathlib.Path, num_devices: int = 1):
        addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(count))
        self._servers = [
            Server([__file__, addresses, index, num_devices, folder], folder)
            for index in range(count)
        ]

    def do(self, job: Job) -> dict[str, np.ndarray]:
        """Do a job; return the state by name, and metrics such as "metrics/0/loss".

        Checks that all workers have the same bits.
        """
        for server in self._servers:
            server.send(dataclasses.asdict(job))
        results = []
        for server in self._servers:
            with np.load(server.answer()) as arrays:
                results.append(dict(arrays))
        for other in results[1:]:
            assert set(other) == set(results[0])
            for name, value in results[0].items():
                if not name.endswith("input_wait_secs"):
                    np.testing.assert_array_equal(other[name], value, err_msg=name)
        return results[0]

    def __enter__(self) -> "WorkerProcesses":
        return self

    def __exit__(self, *error) -> None:
        for server in self._servers:  # they wait for each other at their ends
            server.process.stdin.close()
        with contextlib.ExitStack() as stack:
            for server in self._servers:
                stack.push(server)


def own_part(batch: Mapping[str, np.ndarray], part, count: int = 1) -> dict:
    """The part of each of `count` micro-batches, one after the other."""
    first, end = part.first, part.first + part.size
    parts = {}
    for name, values in batch.items():
        micro = values.reshape(count, part.whole, *values.shape[1:])
        parts[name] = micro[:, first:end].reshape(-1, *values.shape[1:])
    return parts


def main(addresses: str, index: str, num_devices: str, folder: str) -> None:
    from towers.cli.imports import Finder

    sys.meta_path.insert(0, Finder)
    from towers.cluster.agreement import connect
    from towers.data.share import Share, shares
    from towers.optim import vector
    from towers.parallel import devices, evaluator
    from towers.parallel.strategies.multi_worker import multi_worker

    index, num_devices, addresses = int(index), int(num_devices), addresses.split(",")
    evaluator.CALL_SECS = 0.0 if index else 1000.0  # as if they differed in speed
    vector.MIN_ALONE = 300  # the larger parameters are vectors of their own
    devices.configure("cpu", num_devices)
    signals = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    workers = connect(addresses, index, num_gpus=0, communication="auto", wait_secs=60)
    assert_started(workers, signals)
    strategy = multi_worker
    for number, line in enumerate(sys.stdin):
        job = Job(**json.loads(line))
        sizes = shares(job.batch_size, len(addresses) * num_devices)
        first = index * num_devices
        part = Share(
            sum(sizes[:first]), sum(sizes[first : first + num_devices]), job.batch_size
        )
        own = [own_part(x, part, job.accumulate_steps) for x in job.batches()]
        trainer = job.create_trainer(strategy, num_devices, own, workers=workers)
        result = {}
        for call, num_steps in enumerate(job.calls):
            agreed, *_ = workers.agree(num_steps, False, False, False)
            metrics = trainer.train(agreed)
            result |= {f"metrics/{call}/{k}": v for k, v in metrics.items()}
        result |= trainer.state()
        path = pathlib.Path(folder, f"{number}-{index}.npz")
        np.savez(path, **result)
        print(path, flush=True)
    workers.agree(0, False, False, False)


def assert_started(workers, signals):
    """Signals are served, and workers tell each other what they have."""
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals == [signal.SIGTERM]

    def text_of(index):
        return {"worker": index, "text": 100 * index * "é"}

    given = workers.exchange(text_of(workers.index))
    assert given == [text_of(index) for index in range(workers.size)]
    # The chief's word counts, and a stop of any worker.
    is_last = workers.index == workers.size - 1
    own = 3 + workers.index, workers.is_chief, not workers.is_chief
    assert workers.agree(*own, False) == (3, True, False)
    own = 3, not workers.is_chief, workers.is_chief
    assert workers.agree(*own, is_last) == (0, False, True)


if __name__ == "__main__":
    main(*sys.argv[1:])
