"""Workers that are killed, frozen or cut off, in real runs on several machines.

With TOWERS_TEST_DATA, a folder that holds CIFAR-10, the recipe cifar10_cnn is trained
on it; without, the same network on drawn images.
"""

import contextlib
import os
import re
import signal
import time

import numpy as np
import pytest
import tensorflow as tf
from machines import Machines, machines
from small_runs import assert_equal_states, has_logged, saved, saved_steps

from towers.cluster.workers import ClusterWorkers
from towers.errors import WorkerLostError
from towers.parallel.workers import SINGLE_WORKER

NUM_WORKERS, NUM_STEPS = 3, 40
STUCK_AFTER_SECS = 16
# Heartbeats time out after half of that; then the chief saves, and processes end.
BOUND_SECS = STUCK_AFTER_SECS / 2 + 8
FLAGS = (
    "--strategy=multi_worker --batch_size=32 --device=cpu --num_towers=1 "
    "--eval_every_epochs=0 --summary_every_steps=0 --log_every_steps=1 "
    f"--steps_per_loop=1 --stuck_after_secs={STUCK_AFTER_SECS} "
    "--checkpoint_every_steps=5"
).split()


class Run:
    """A run of several workers; a context manager that leaves no process behind."""

    def __init__(self, network: Machines, folder, *more, count=NUM_WORKERS):
        self.workdir, self._stack = folder / "run", contextlib.ExitStack()
        data = os.environ.get("TOWERS_TEST_DATA")
        source = ["--dataset=shapes", "--model=cnn"]
        if data:
            source = ["--config=cifar10_cnn", f"--data_dir={data}"]
        flags = [*source, *FLAGS, f"--max_steps={NUM_STEPS}", *more]
        self.workers = [
            self._stack.enter_context(
                network.start(
                    i, folder, *flags, f"--workdir={self.workdir}", count=count
                )
            )
            for i in range(count)
        ]

    @property
    def chief(self):
        return self.workers[0]

    def wait_for_step(self, step):
        """Wait for a step and for a checkpoint."""
        self.chief.wait_until(lambda: has_logged(self.workdir, step))
        self.chief.wait_until(lambda: saved_steps(self.workdir))

    def assert_done(self):
        for worker in self.workers:
            assert worker.wait(240) == 0, worker.output

    def state(self):
        return saved(self.workdir).tensors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()


@pytest.fixture(scope="module")
def network():
    with machines(NUM_WORKERS) as network:
        yield network


@pytest.fixture(scope="module")
def uninterrupted(network, tmp_path_factory):
    with Run(network, tmp_path_factory.mktemp("whole")) as run:
        run.assert_done()
        return run.state()


def lose(network, run, fault, victim):
    """Kill, freeze or cut off a worker."""
    if fault == "cut":
        network.plug(victim, "down")
        return
    number = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[fault]
    run.workers[victim].process.send_signal(number)


def assert_the_others_stop(network, run, fault, victim):
    began = time.monotonic()
    lose(network, run, fault, victim)
    for index, worker in enumerate(run.workers):
        if index == victim:
            continue
        code = worker.wait(began + BOUND_SECS - time.monotonic())
        assert code == 75, worker.output
        line = worker.output.splitlines()[-1]
        assert f"worker {victim} ({network.addresses[victim]})" in line
        assert re.search(r"step \d+ was the last, at \d\d:\d\d:\d\d", line)
    if fault == "cut":  # it stops as well: to it the others are gone
        assert run.workers[victim].wait(BOUND_SECS) == 75
    else:
        run.workers[victim].__exit__()
    assert not network.listeners()


def lost_and_continued(network, folder, fault, victim, step, *more, count=NUM_WORKERS):
    """Return the state of a run that lost a worker and continued with `count`."""
    with Run(network, folder) as run:
        run.wait_for_step(step)
        try:
            assert_the_others_stop(network, run, fault, victim)
        finally:
            if fault == "cut":
                network.plug(victim, "up")
    with Run(network, folder, *more, count=count) as run:
        run.assert_done()
        assert "restored step" in run.chief.output
        assert ("server listens" in run.chief.output) == (count > 1)
        return run.state()


FAULTS = [(fault, victim) for fault in ("kill", "freeze", "cut") for victim in (1, 0)]


@pytest.mark.slow
@pytest.mark.row(28, 43)
@pytest.mark.parametrize("fault,victim", FAULTS)
def test_row_28_43_the_others_stop_and_a_restart_ends_in_the_same_bits(
    fault, victim, network, uninterrupted, tmp_path
):
    if fault == "cut" and not network.can_be_cut_off:
        pytest.skip("needs network namespaces")
    for step in (6, 12, 21, 33):
        folder = tmp_path / str(step)
        folder.mkdir()
        state = lost_and_continued(network, folder, fault, victim, step)
        assert_equal_states(state, uninterrupted)


@pytest.mark.slow
@pytest.mark.row(28, 33)
def test_row_28_33_a_run_continues_with_one_worker_which_needs_no_server(
    network, tmp_path
):
    """After 12 steps another seed differs by 0.2, other numbers of towers by 3.5e-5.

    After 40 steps at this rate such noise has grown to 5e-3.
    """
    (tmp_path / "whole").mkdir()
    to_step_12 = "--max_steps=12"
    with Run(network, tmp_path / "whole", to_step_12) as run:
        run.assert_done()
        whole = run.state()
    state = lost_and_continued(network, tmp_path, "kill", 2, 5, to_step_12, count=1)
    for name, value in whole.items():
        np.testing.assert_allclose(state[name], value, rtol=0, atol=2e-4, err_msg=name)


# Error of a compiled function, around the message of an operation.
IN_A_STEP = """Graph execution error:

Detected at node all_reduce/CollectiveReduceV2 defined at (most recent call last):
<stack traces unavailable>
{}
\t [[{{{{node all_reduce/CollectiveReduceV2}}}}]] [Op:__inference__steps_12]"""


def raised_by(workers, message):
    """Return the exception for an error of a collective."""
    error = tf.errors.InternalError(None, None, IN_A_STEP.format(message))
    lost = pytest.raises((tf.errors.InternalError, WorkerLostError))
    with lost as caught, workers.raising_worker_lost():
        raise error
    return caught.value


@pytest.mark.row(28)
@pytest.mark.parametrize(
    "is_lost,message",
    [
        (True, "NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details)."),
        (True, "NCCL operation ncclAllReduce(...) failed: remote process exited or"),
        (True, "NcclCommunicator aborted"),
        (True, "socketProgress: Connection closed by remote peer node1<40912>"),
        (False, "Failed to allocate ncclComm (1024 bytes) from NCCL: ncclSystemError"),
        (False, "NCCL: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    ],
)
def test_row_28_an_error_of_nccl_is_a_lost_worker_but_not_a_fault_of_this_one(
    is_lost, message
):
    engine = tf.distribute.OneDeviceStrategy("/CPU:0")
    workers = ClusterWorkers(engine, ["a:1", "b:1"], 1)
    error = raised_by(workers, message)
    assert isinstance(error, WorkerLostError) == is_lost
    assert not is_lost or str(error).startswith(f"a worker is lost: {message[:40]}")
    assert isinstance(raised_by(SINGLE_WORKER, message), tf.errors.InternalError)
