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

from towers.errors import WorkerLostError
from towers.parallel.workers import ALONE, Workers
from towers.run.checkpointer import Checkpointer

NUM_WORKERS, NUM_STEPS = 3, 40
STUCK_AFTER_SECS = 16
# Heartbeats end after half of that; then the chief saves, and processes end.
BOUND_SECS = STUCK_AFTER_SECS / 2 + 8
FLAGS = [
    "--strategy=multi_worker",
    "--batch_size=32",
    "--device=cpu",
    "--num_towers=1",
    "--eval_every_epochs=0",
    "--summary_every_steps=0",
    "--log_every_steps=1",
    "--steps_per_loop=1",
    f"--max_steps={NUM_STEPS}",
    f"--stuck_after_secs={STUCK_AFTER_SECS}",
    "--checkpoint_every_steps=5",
]


def flags(workdir, *more):
    data = os.environ.get("TOWERS_TEST_DATA")
    source = ["--dataset=embedded", "--model=cnn"]
    if data:
        source = ["--config=cifar10_cnn", f"--data_dir={data}"]
    return [*source, *FLAGS, f"--workdir={workdir}", *more]


class Run:
    """A run of several workers; a context manager that leaves no process behind."""

    def __init__(self, network: Machines, folder, count=NUM_WORKERS, *more):
        self.workdir = folder / "run"
        self.logs = [folder / f"{index}.log" for index in range(count)]
        command = flags(self.workdir, *more)
        self.processes = [
            network.start(index, log, *command, count=count)
            for index, log in enumerate(self.logs)
        ]

    def wait_for_step(self, step, secs=120):
        end = time.monotonic() + secs
        while f"\nstep {step}/" not in self.logs[0].read_text():
            assert time.monotonic() < end, self.logs[0].read_text()
            assert all(p.poll() is None for p in self.processes), self.output()
            time.sleep(0.02)

    def wait_for_checkpoint(self, secs=30):
        end = time.monotonic() + secs
        while not list(self.workdir.glob("checkpoints/step-*")):
            assert time.monotonic() < end, self.output()
            time.sleep(0.02)

    def wait(self, secs=240):
        """The exit codes of all workers."""
        return [process.wait(secs) for process in self.processes]

    def output(self):
        return "".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)

    def last_lines(self):
        return [log.read_text().splitlines()[-1] for log in self.logs]

    def state(self):
        return (
            Checkpointer(self.workdir / "checkpoints", lambda line: pytest.fail(line))
            .restore()
            .tensors
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def network():
    with machines(NUM_WORKERS) as network:
        yield network


@pytest.fixture(scope="module")
def uninterrupted(network, tmp_path_factory):
    with Run(network, tmp_path_factory.mktemp("whole")) as run:
        assert run.wait() == [0] * NUM_WORKERS, run.output()
        return run.state()


def lose(network, run, fault, victim):
    """Kills, freezes or cuts off a worker; how to bring it back."""
    process = run.processes[victim]
    if fault == "cut":
        network.plug(victim, "down")
        return
    process.send_signal({"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[fault])


def assert_the_others_stop(network, run, fault, victim):
    began = time.monotonic()
    lose(network, run, fault, victim)
    others = [i for i in range(len(run.processes)) if i != victim]
    for index in others:
        code = run.processes[index].wait(began + BOUND_SECS - time.monotonic())
        assert code == 75, run.output()
        line = run.last_lines()[index]
        assert re.search(rf"worker {victim} \({network.addresses[victim]}\)", line)
        assert re.search(r"step \d+ was the last, at \d\d:\d\d:\d\d", line)
    secs = time.monotonic() - began
    if fault == "cut":  # it stops as well: to it the others are gone
        assert run.processes[victim].wait(BOUND_SECS) == 75, run.output()
    else:
        run.processes[victim].send_signal(signal.SIGKILL)
        run.processes[victim].wait()
    assert not network.listeners()
    return secs


def lost_and_continued(network, folder, fault, victim, step, count=NUM_WORKERS, *more):
    """The state of a run that lost a worker and went on with so many (and more flags);
    the seconds until the others stopped."""
    with Run(network, folder) as run:
        run.wait_for_step(step)
        run.wait_for_checkpoint()
        try:
            secs = assert_the_others_stop(network, run, fault, victim)
        finally:
            if fault == "cut":
                network.plug(victim, "up")
    with Run(network, folder, count, *more) as run:
        assert run.wait() == [0] * count, run.output()
        assert "restored step" in run.logs[0].read_text()
        return run.state(), secs


FAULTS = [(fault, victim) for fault in ("kill", "freeze", "cut") for victim in (1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("fault,victim", FAULTS)
def test_row_28_43_the_others_stop_and_a_restart_ends_in_the_same_bits(
    fault, victim, network, uninterrupted, tmp_path, count
):
    if fault == "cut" and not network.can_be_cut_off:
        pytest.skip("needs network namespaces")
    for repetition in range(10):
        folder = tmp_path / str(repetition)
        folder.mkdir()
        step = 6 + 3 * repetition
        state, secs = lost_and_continued(network, folder, fault, victim, step)
        assert set(state) == set(uninterrupted)
        for name, value in uninterrupted.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
        print(f"{fault} worker {victim} at step {step}: {secs:.1f} s")
        count("workers lost")


@pytest.mark.slow
@pytest.mark.parametrize("fewer", [1, 2])
def test_row_28_a_run_continues_with_fewer_workers(fewer, network, tmp_path):
    """To step 12: there another seed is 0.2 apart, and 1, 2 and 3 towers of one process
    up to 3.5e-5; after 40 steps at this rate such noise has grown to 5e-3."""
    (tmp_path / "whole").mkdir()
    to_step_12 = "--max_steps=12"
    with Run(network, tmp_path / "whole", NUM_WORKERS, to_step_12) as run:
        assert run.wait() == [0] * NUM_WORKERS, run.output()
        whole = run.state()
    count = NUM_WORKERS - fewer
    state, _ = lost_and_continued(network, tmp_path, "kill", 2, 5, count, to_step_12)
    for name, value in whole.items():
        np.testing.assert_allclose(state[name], value, rtol=0, atol=2e-4, err_msg=name)


def test_row_28_33_when_a_worker_is_killed_the_other_stops_and_a_restart_resumes(
    tmp_path,
):
    """The restart is one of a single worker, which needs no server."""
    with machines(2) as network:
        with Run(network, tmp_path, 2, "--model=lenet") as run:
            run.wait_for_step(3)
            assert_the_others_stop(network, run, "kill", 1)
            for log, address in zip(run.logs, network.addresses, strict=True):
                port = address.rpartition(":")[2]
                said = f"server listens on port {port} of all addresses"
                assert said in log.read_text()
            saved = int(re.findall(r"step (\d+) was the last", run.last_lines()[0])[0])
        with Run(
            network, tmp_path, 1, "--model=lenet", f"--max_steps={saved + 2}"
        ) as run:
            assert run.wait() == [0], run.output()
            output = run.logs[0].read_text()
            assert f"restored step {saved} " in output
            assert output.count("server listens") == 1  # that of the first start


def test_row_29_a_worker_with_other_options_is_refused(tmp_path):
    with machines(2) as network:
        logs = [tmp_path / "0.log", tmp_path / "1.log"]
        first = network.start(0, logs[0], *flags(tmp_path / "run", "--seed=1"))
        second = network.start(1, logs[1], *flags(tmp_path / "run", "--seed=2"))
        assert [first.wait(120), second.wait(120)] == [2, 2]
        for log in logs:
            last = log.read_text().splitlines()[-1]
            assert "seed is 2 and that of the chief 1" in last
        assert not network.listeners()


NCCL = [
    "NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details). Set "
    "NCCL_DEBUG=WARN for detail.",
    "NCCL operation ncclAllReduce(...) failed: remote process exited or there was a "
    "network error. Last NCCL warning(error) log entry (may be unrelated) ''.",
    "ncclRemoteError: A call failed possibly due to a network error",
    "ncclCommAbort was called",
    "NcclCommunicator aborted",
    "socketProgress: Connection closed by remote peer node1<40912>",
]


# The text of an error of a compiled function, around that of an operation.
IN_A_STEP = """Graph execution error:

Detected at node all_reduce/CollectiveReduceV2 defined at (most recent call last):
<stack traces unavailable>
{}
\t [[{{{{node all_reduce/CollectiveReduceV2}}}}]] [Op:__inference__steps_12]"""


def raised_by(workers, message):
    """What becomes of an error of a collective."""
    with pytest.raises((tf.errors.InternalError, WorkerLostError)) as caught:
        with workers.noticing_losses():
            raise tf.errors.InternalError(None, None, IN_A_STEP.format(message))
    return caught.value


@pytest.fixture
def workers():
    """The second of two; nothing is started."""
    return Workers(tf.distribute.OneDeviceStrategy("/CPU:0"), ["a:1", "b:1"], 1)


@pytest.mark.parametrize("message", NCCL)
def test_row_28_an_error_of_nccl_is_a_lost_worker(message, workers):
    error = raised_by(workers, message)
    assert isinstance(error, WorkerLostError)
    assert str(error).startswith(f"a worker is lost: {message[:40]}")
    assert isinstance(raised_by(ALONE, message), tf.errors.InternalError)


@pytest.mark.parametrize(
    "message",
    [
        "NCCL operation ncclCommInitRank(...) failed: unhandled cuda error. Last NCCL "
        "warning(error) log entry (may be unrelated) 'Cuda failure 2 'out of memory''.",
        "Failed to allocate ncclComm (1024 bytes) from NCCL: ncclSystemError",
        "NCCL: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "NCCL: invalid usage. Set NCCL_DEBUG=WARN for detail.",
    ],
)
def test_row_28_a_fault_of_this_worker_is_no_lost_worker(message, workers):
    assert isinstance(raised_by(workers, message), tf.errors.InternalError)
