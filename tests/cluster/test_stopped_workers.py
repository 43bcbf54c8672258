"""Two workers of `python -m towers.launch`, stopped by a signal in a real run."""

import json
import os
import pathlib
import re
import signal

import pytest
from machines import Machines
from processes import Program, is_running, on_linux
from small_runs import assert_equal_states, records, saved

STOP_SECS = 10
NUM_STEPS = 200
COMMAND = (
    "-m towers.launch --num_workers=2 -- --dataset=shapes --model=lenet --device=cpu "
    f"--num_towers=1 --batch_size=32 --max_steps={NUM_STEPS} --steps_per_loop=1 "
    "--log_every_steps=1 --eval_every_epochs=0 --summary_every_steps=0 "
    "--checkpoint_every_secs=0 --workdir=run"
).split()

pytestmark = [on_linux, pytest.mark.slow]


def workers_of(program):
    """Return process ids and addresses of the workers, in order."""
    pid, found = program.process.pid, {}
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    for child in map(int, children.split()):
        environ = pathlib.Path(f"/proc/{child}/environ").read_text()
        config = json.loads(re.search(r"TF_CONFIG=([^\0]*)", environ)[1])
        found[config["task"]["index"]] = child
    return [found[index] for index in sorted(found)], config["cluster"]["worker"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with Program(COMMAND, folder) as program:
        assert program.wait() == 0, program.output
    return folder / "run"


@pytest.mark.row(12)
@pytest.mark.parametrize("target", ["the launcher", "worker 1"])
def test_row_12_a_signal_stops_all_workers_and_the_same_command_continues(
    target, uninterrupted, tmp_path
):
    with Program(COMMAND, tmp_path) as program:
        recorded = tmp_path / "run" / "metrics.jsonl"
        program.wait_until(
            lambda: recorded.exists() and '"step": 5,' in recorded.read_text()
        )
        pids, addresses = workers_of(program)
        assert len(pids) == 2
        pid = pids[1] if target == "worker 1" else program.process.pid
        os.kill(pid, signal.SIGTERM)
        assert program.wait(STOP_SECS) == 75, program.output
        assert not any(map(is_running, pids))
        assert not Machines(addresses).listeners()
        step = saved(tmp_path / "run").step
        assert 5 <= step < NUM_STEPS
        cause = "a signal to another worker" if target == "worker 1" else "SIGTERM"
        line = f"stopped by {cause}: step {step} of {NUM_STEPS} is saved"
        assert line in program.output
        line = f"stopped by SIGTERM: the chief saves step {step} of "
        assert line in program.output
    with Program(COMMAND, tmp_path) as program:
        assert program.wait() == 0, program.output
        assert f"restored step {step} " in program.output
    assert_equal_states(saved(tmp_path / "run").tensors, saved(uninterrupted).tensors)
    assert records(tmp_path / "run") == records(uninterrupted)
