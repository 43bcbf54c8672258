"""Several processes train as one device does on the whole batch."""

import contextlib
import dataclasses
import itertools
import re

import networks
import numpy as np
import pytest
from recipes import (
    assert_close,
    assert_equal_to_oracle,
    assert_metrics,
    assert_some_are_clipped,
    clip_norm_for,
    create_trainer,
    with_images_off_kinks,
)
from small_runs import assert_equal_states
from test_strategies import KINDS
from worker_processes import Job, WorkerProcesses

from towers.parallel import strategies
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer

TOLERANCES = {"float32": 1e-5, "float64": 1e-10}

# Uneven shares, several micro-batches, shared moments or not, a velocity.
FAST = [
    Job("sync", "momentum", 3, 13, "float64"),
    Job("local", "nesterov", 1, 16, "float64"),
]


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    with WorkerProcesses(2, tmp_path_factory.mktemp("workers")) as workers:
        yield workers


def split_result(result):
    """(state, metrics of each call, counts)."""
    metrics, counts = {}, {}
    for name in [name for name in result if re.match("metrics/|counts/", name)]:
        kind, *call, key = name.split("/")
        value = result.pop(name)
        if kind == "counts":
            counts[key] = value
        else:
            metrics.setdefault(int(call[0]), {})[key] = value
    return result, [metrics[call] for call in sorted(metrics)], counts


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
    state, metrics, _ = split_result(workers.do(job))
    assert_equal_to_oracle(state, expected, TOLERANCES[job.dtype])
    for seen, step in zip(metrics, (1, 5, 10), strict=True):
        report = expected.reports[step - 1]
        assert_metrics(seen, report)
        if job.network != "sync":  # which the oracle computes as one tower
            np.testing.assert_allclose(
                seen["tower_losses"], report.tower_losses, rtol=1e-4
            )


@pytest.mark.parametrize("job", FAST, ids=lambda job: f"{job.network} {job.dtype}")
def test_two_workers_equal_the_oracle(two_workers, job, monkeypatch):
    assert_trained_as_by_the_oracle(two_workers, job, 2, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("count,num_devices", [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_any_number_of_workers_equals_the_oracle(
    count, num_devices, tmp_path, monkeypatch
):
    """Each two values of the axes together, in both types, in other jobs for each
    number of workers."""
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


@pytest.mark.slow
@pytest.mark.parametrize("tta", ["mirror", "translate"])
def test_an_evaluation_counts_every_image_once(two_workers, tta):
    job = Job("local", calls=(3,), tta=tta)
    state, _, counts = split_result(two_workers.do(job))
    alone = job.create_trainer(strategies.replicated, 2, job.batches())
    alone.load(state)
    feed = networks.feed_of(job.evaluation_batches(), [7, 6], alone.devices)
    expected = alone.evaluate(feed, 3)[False]
    assert counts.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(counts[name], value, rtol=1e-5, err_msg=name)
    assert counts["images"] == 36


def saved(folder, state):
    """What a checkpoint of the state gives, and a file of it for other processes."""
    Checkpointer(folder).save(Snapshot(int(state["step"]), state, {}))
    restored = Checkpointer(folder).restore().tensors
    assert_equal_states(restored, state)
    np.savez(folder / "state.npz", **restored)
    return restored, str(folder / "state.npz")


@pytest.mark.slow
@pytest.mark.row(11)
def test_row_11_any_number_of_workers_and_any_strategy_continue_each_other(tmp_path):
    """Two steps by one and two by another are four by one device.

    Pairs without several workers: test_strategies.
    """
    job = Job("plain", "nesterov", calls=(2,))
    network, batches = job.create_network(), job.batches()
    alone = {
        kind: create_trainer(cls, network, job.recipe(), batches, count, **options)
        for kind, (cls, count, options) in KINDS.items()
    }
    alone["1 worker"] = create_trainer(
        strategies.multi_worker, network, job.recipe(), batches, 1
    )
    halves = {}
    for writer, trainer in alone.items():
        trainer.train(2)
        halves[writer] = saved(tmp_path / writer, trainer.state())
    one_device = alone["towers 1"]
    one_device.train(2)
    whole = one_device.state()
    with contextlib.ExitStack() as stack:
        several = {}
        for count in (2, 3, 4):
            writer = f"{count} workers"
            (tmp_path / writer).mkdir()
            workers = WorkerProcesses(count, tmp_path / writer)
            several[writer] = stack.enter_context(workers)
            state, _, _ = split_result(workers.do(job))
            halves[writer] = saved(tmp_path / writer, state)
        for writer, (state, path) in halves.items():
            for workers in several.values():
                continued = dataclasses.replace(job, checkpoint=path)
                assert_close(split_result(workers.do(continued))[0], whole)
            for trainer in alone.values() if writer in several else ():
                trainer.load(state)
                assert_equal_states(trainer.state(), state)
                assert trainer.train(2)["step"] == 4
                assert_close(trainer.state(), whole)
