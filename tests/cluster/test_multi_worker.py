"""Several processes train as one device does on the whole batch."""

import dataclasses
import itertools

import networks
import numpy as np
import pytest
from recipes import (
    Recipe,
    assert_equal_to_oracle,
    assert_metrics,
    assert_some_are_clipped,
    clip_norm_for,
    create_trainer,
    with_images_off_kinks,
)
from worker_processes import Job, WorkerProcesses

from towers.optim import vector
from towers.parallel.compilation import needed_operations
from towers.parallel.strategies.multi_worker import multi_worker
from towers.parallel.workers import Workers

TOLERANCES = {"float32": 1e-5, "float64": 1e-10}


def split_result(result):
    metrics = {}
    for name in [name for name in result if name.startswith("metrics/")]:
        _, call, key = name.split("/")
        metrics.setdefault(int(call), {})[key] = result.pop(name)
    return result, [metrics[call] for call in sorted(metrics)]


def assert_trained_as_by_the_oracle(workers, job, num_towers, monkeypatch):
    def check(seed):
        assert_equal(workers, dataclasses.replace(job, seed=seed), num_towers)

    with_images_off_kinks(check, job.dtype, monkeypatch)


def assert_equal(workers, job, num_towers):
    network = job.create_network()
    job = dataclasses.replace(job, clip_norm=clip_norm_for(network, job.batches()))
    expected = job.recipe().oracle(
        network,
        job.batches(),
        num_towers=1 if job.network == "sync" else num_towers,
        accumulate_steps=job.accumulate_steps,
    )
    assert_some_are_clipped(expected.reports, job.recipe())
    state, metrics = split_result(workers.do(job))
    assert_equal_to_oracle(state, expected, TOLERANCES[job.dtype])
    for seen, step in zip(metrics, (1, 5, 10), strict=True):
        report = expected.reports[step - 1]
        assert_metrics(seen, report)
        if job.network != "sync":  # which the oracle computes as one tower
            np.testing.assert_allclose(
                seen["tower_losses"], report.tower_losses, rtol=1e-4
            )


def test_two_workers_equal_the_oracle(tmp_path, monkeypatch):
    job = Job("sync", "momentum", 1, 13, "float64")
    with WorkerProcesses(2, tmp_path) as workers:
        assert_trained_as_by_the_oracle(workers, job, 2, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("count,num_devices", [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_any_number_of_workers_equals_the_oracle(
    count, num_devices, tmp_path, monkeypatch
):
    axes = ("plain", "local", "sync"), ("sgd", "momentum", "nesterov"), (1, 3), (16, 13)
    jobs = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        if (sum(places) + count + num_devices) % 3 == 0:
            values = [axis[i] for axis, i in zip(axes, places, strict=True)]
            jobs.append(Job(*values, list(TOLERANCES)[len(jobs) % 2]))
    with WorkerProcesses(count, tmp_path, num_devices) as workers:
        for job in jobs:
            assert_trained_as_by_the_oracle(
                workers, job, count * num_devices, monkeypatch
            )


def test_what_is_sent_first_is_computed_first(monkeypatch):
    """Check that no operation of later gradients alone begins before earlier ones."""

    class Recorded(Workers):
        def sums(self, tensors, options=None):
            self.sent, self.options = tensors[0], options
            return [list(x) for x in tensors]

    monkeypatch.setattr(vector, "MIN_ALONE", 100)
    workers, network = Recorded(addresses=["a:1", "b:1"]), networks.residual_network()
    batches = networks.random_batches(1, 8)
    trainer = create_trainer(
        multi_worker, network, Recipe(), batches, 1, workers=workers
    )
    trainer.trace()
    num_states = len(trainer.strategy.copies[0].state)
    # TensorFlow's buffers begin with the last tensor.
    needed = [
        {
            x
            for x in needed_operations([tensor.op])
            if x.name.startswith("tower_0/") and x.inputs
        }
        for tensor in workers.sent[num_states:-2][::-1]
    ]
    assert len(needed) > 2 and workers.options.bytes_per_pack == 2**20
    for earlier, later in itertools.pairwise(needed):
        assert later - earlier
        assert all(earlier <= needed_operations([x]) for x in later - earlier)
