"""Two workers of `python -m towers.launch`, stopped by a signal in a real run."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from machines import Machines
from small_runs import assert_equal_states, records, saved
from test_launch import ENVIRON, ROOT, is_running, on_linux

START_SECS, STOP_SECS = 240, 10
NUM_STEPS = 200
COMMAND = [sys.executable, "-m", "towers.launch", "--num_workers=2", "--"]
FLAGS = (
    "--dataset=embedded --model=lenet --device=cpu --num_towers=1 --batch_size=32 "
    f"--max_steps={NUM_STEPS} --steps_per_loop=1 --log_every_steps=1 "
    "--eval_every_epochs=0 --summary_every_steps=0 --checkpoint_every_secs=0"
).split()

pytestmark = [on_linux, pytest.mark.slow]


class Launched:
    """The launcher's process; its output in a file."""

    def __init__(self, folder):
        self.workdir, self._log = folder / "run", folder / "log"
        with open(self._log, "wb") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *FLAGS, f"--workdir={self.workdir}"],
                cwd=ROOT,
                env=ENVIRON,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for_step(self, step: int) -> None:
        patience = time.monotonic() + START_SECS
        while f"\n[0] step {step}/" not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < patience, self.output
            time.sleep(0.01)

    def workers(self) -> tuple[list[int], list[str]]:
        """Process ids and addresses of the workers, by their numbers."""
        pid, found = self.process.pid, {}
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
        for child in map(int, children.split()):
            environ = pathlib.Path(f"/proc/{child}/environ").read_text()
            config = json.loads(re.search(r"TF_CONFIG=([^\0]*)", environ)[1])
            found[config["task"]["index"]] = child
        return [found[index] for index in sorted(found)], config["cluster"]["worker"]


@contextlib.contextmanager
def launched(folder):
    run = Launched(folder)
    try:
        yield run
    finally:
        run.process.kill()  # which ends the workers, too
        run.process.wait()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    with launched(tmp_path_factory.mktemp("whole")) as run:
        assert run.process.wait(START_SECS) == 0, run.output
        return run.workdir


@pytest.mark.parametrize("target", ["the launcher", "worker 1"])
@pytest.mark.row(12)
def test_row_12_a_signal_stops_all_workers_and_the_same_command_continues(
    target, uninterrupted, tmp_path
):
    with launched(tmp_path) as run:
        run.wait_for_step(5)
        pids, addresses = run.workers()
        assert len(pids) == 2
        pid = pids[1] if target == "worker 1" else run.process.pid
        os.kill(pid, signal.SIGTERM)
        assert run.process.wait(STOP_SECS) == 75, run.output
        assert not any(map(is_running, pids))
        assert not Machines(addresses).listeners()
        step = saved(run.workdir).step
        assert 5 <= step < NUM_STEPS
        cause = "a signal to another worker" if target == "worker 1" else "SIGTERM"
        assert f"stopped by {cause}: step {step} of {NUM_STEPS} is saved" in run.output
        assert f"stopped by SIGTERM: the chief saves step {step} of " in run.output
    with launched(tmp_path) as run:
        assert run.process.wait(START_SECS) == 0, run.output
        assert f"restored step {step} " in run.output
    assert_equal_states(saved(run.workdir).tensors, saved(uninterrupted).tensors)
    assert records(run.workdir) == records(uninterrupted)
