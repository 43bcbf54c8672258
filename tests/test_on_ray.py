"""`python -m towers.on_ray`.

The tests with a cluster of Ray need the extra `ray`, which is in no lock: `make
test-ray` runs them in an environment of its own.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import tempfile

import pytest
from processes import Program, free_ports, run
from small_runs import assert_equal_states, saved, saved_steps


@pytest.mark.parametrize(
    "arguments,error",
    [
        ("--num_workers=3 --gpus_per_worker=-1 -- --seed=1", "gpus_per_worker"),
        ("--num_workers=3 --", "flags of run_train.py follow --"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments, error):
    done = run("-m", "towers.on_ray", *arguments.split())
    [line] = done.stderr.splitlines()
    assert line.startswith("towers.on_ray: ") and error in line
    assert (done.returncode, done.stdout) == (2, "")


def test_a_missing_ray_is_one_line_that_names_the_extra(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('it is not here')")
    command = "-m towers.on_ray --num_workers=3 -- --config=quickstart"
    done = run(*command.split(), PYTHONPATH=str(tmp_path))
    [line] = done.stderr.splitlines()
    assert line.startswith("towers.on_ray: ") and "(it is not here)" in line
    assert "pip install '.[ray]'" in line
    assert (done.returncode, done.stdout) == (2, "")


# On a cluster of Ray.

NUM_STEPS = 60
TRAIN = (
    "--dataset=shapes --model=lenet --batch_size=32 --device=cpu --num_towers=1 "
    "--eval_every_epochs=0 --summary_every_steps=0 --log_every_steps=1 "
    "--steps_per_loop=1 --stuck_after_secs=60 --checkpoint_every_steps=10 "
    f"--max_steps={NUM_STEPS}"
).split()


class Ray:
    """A node of Ray on this machine with room for three workers.

    Attributes:
        environ: of a program that uses it.
    """

    def __init__(self, folder, stack):
        [port] = free_ports(1)
        self.environ = {
            "HOME": str(folder),  # where Ray writes
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "RAY_AUTH_MODE": "disabled",
            "RAY_DEDUP_LOGS": "0",
        }
        self._folder, self._stack = folder, stack
        options = f"""
            --head --port={port} --dashboard-port=0 --temp-dir={folder}
            --disable-usage-stats --block --num-cpus=3 --node-ip-address=127.0.0.1
            --object-store-memory={2**27} --dashboard-agent-listen-port=0
        """
        node = self._start("ray.scripts.scripts", "start", *options.split())
        node.wait_for("started")

    def _start(self, *command):
        program = Program(["-m", *command], self._folder, self.environ)
        program.is_plain = False  # Ray colors the names of its processes
        self._stack.enter_context(program)
        self._stack.callback(program.process.wait, 60)
        self._stack.callback(program.process.terminate)
        return program

    def train(self, workdir, max_restarts=0):
        """Starts towers.on_ray."""
        own = f"--num_workers=3 --max_restarts={max_restarts} --"
        run = self._start("towers.on_ray", *own.split(), *TRAIN, f"--workdir={workdir}")
        run.workdir = workdir
        return run


@pytest.fixture(scope="module")
def ray():
    # The names of Ray's sockets have to be short.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        with contextlib.ExitStack() as stack:
            yield Ray(folder, stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parent_of(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def workers_of(run):
    """The processes that train, by their number as a worker: (own, parent's)."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text().split("\0")
            if f"--workdir={run.workdir}" in command and "--" not in command:
                environ = (folder / "environ").read_text().split("\0")
                [config] = [x[10:] for x in environ if x.startswith("TF_CONFIG=")]
                index = json.loads(config)["task"]["index"]
                found[index] = int(folder.name), parent_of(folder.name)
    return found


@pytest.fixture(scope="module")
def uninterrupted(ray, tmp_path_factory):
    run = ray.train(tmp_path_factory.mktemp("whole") / "run")
    assert run.wait(300) == 0, run.output
    assert f"step {NUM_STEPS} of {NUM_STEPS} is saved" in run.output
    return saved(run.workdir).tensors


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra ray"
)
@pytest.mark.parametrize("which,victim", [("worker", 0), ("actor", 1)])
def test_after_a_kill_all_start_anew_and_the_run_ends_in_the_same_bits(
    which, victim, ray, uninterrupted, tmp_path
):
    run = ray.train(tmp_path / "run", max_restarts=1)
    run.wait_until(lambda: saved_steps(run.workdir), 300)
    before = workers_of(run)
    own, parent = before[victim]
    os.kill(own if which == "worker" else parent, signal.SIGKILL)
    assert run.wait(300) == 0, run.output
    assert len(before) == 3 and not workers_of(run)
    restored = re.findall(r"\[0\].*restored step \d+ ", run.output)
    assert len(restored) == 1, run.output
    words = "was killed by signal 9 (Killed)" if which == "worker" else "is lost: "
    assert f"towers.on_ray: worker {victim} {words}" in run.output
    assert_equal_states(saved(run.workdir).tensors, uninterrupted)
