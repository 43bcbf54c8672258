"""`python -m towers.on_ray`.

The tests with a cluster of Ray need the extra `ray`, which is in no lock: after `make
setup` they are skipped, see docs/cluster.md.
"""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

from towers import on_ray as program
from towers.errors import WorkerLostError
from towers.launch import outcomes as outcomes_module
from towers.launch.cluster import LASTING
from towers.launch.machine import Share
from towers.launch.outcomes import Outcomes, cause_of, run_worker
from towers.run.checkpointer import Checkpointer

ROOT = pathlib.Path(__file__).resolve().parents[1]
WAIT_SECS = 30
KILLED = "import os; os.kill(os.getpid(), 9)"

# A worker that waits for SIGTERM, and says when it does.
WAITING = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
pathlib.Path("waits").touch()
signal.pause()
"""


def on_ray(*arguments, environ=()):
    return subprocess.run(
        [sys.executable, "-m", "towers.on_ray", *arguments],
        cwd=ROOT,
        env=os.environ | dict(environ),
        capture_output=True,
        text=True,
    )


# The command.


@pytest.mark.parametrize(
    "arguments,error",
    [
        ("-- --config=quickstart", "num_workers"),
        ("--num_workers=0 -- --config=quickstart", "num_workers"),
        ("--num_workers=three -- --config=quickstart", "num_workers"),
        ("--num_workers=3 --max_restarts=-1 -- --config=quickstart", "max_restarts"),
        ("--num_workers=3 --gpus_per_worker=-1 -- --seed=1", "gpus_per_worker"),
        ("--num_workers=3 --cpus_per_worker=0 -- --seed=1", "cpus_per_worker"),
        (f"--num_workers={10**18} -- --seed=1", "[1, 65536]"),
        ("--num_workers=3 --config=quickstart", "flags of run_train.py follow --"),
        ("--num_workers=3 --", "flags of run_train.py follow --"),
        ("--num_workers=3", "flags of run_train.py follow --"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments, error):
    done = on_ray(*arguments.split())
    [line] = done.stderr.splitlines()
    assert line.startswith("towers.on_ray: ") and error in line
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("missing", ["ray", "ray/train/tensorflow"])
def test_a_missing_ray_is_one_line_that_names_the_extra(missing, tmp_path):
    folder = tmp_path
    for name in missing.split("/"):
        folder /= name
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / "__init__.py").write_text("raise ImportError('it is not here')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = on_ray(
        "--num_workers=3", "--", "--config=quickstart", environ={"PYTHONPATH": path}
    )
    [line] = done.stderr.splitlines()
    assert line.startswith("towers.on_ray: ") and "(it is not here)" in line
    assert "the extra ray" in line and "pip install '.[ray]'" in line
    assert (done.returncode, done.stdout) == (2, "")


# A worker, without Ray.


def free_port():
    """A port that nobody else is likely to be given, found as Ray does."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port():
    """Of worker 0."""
    return free_port()


@pytest.fixture
def outcomes(port, monkeypatch, tmp_path):
    """Those of a cluster of two, of which this process is to be worker 0."""
    cluster = {"worker": [f"10.0.0.1:{port}", "10.0.0.2:2222"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.setattr(outcomes_module, "_TICK_SECS", 0.05)
    monkeypatch.chdir(tmp_path)
    outcomes = Outcomes()
    outcomes.begin(json.dumps(cluster))
    return outcomes


def run(source, folder, outcomes, **options):
    """Runs worker 0."""
    command = [sys.executable, "-Sc", source]

    def ask(method, *arguments):
        return getattr(outcomes, method)(*arguments)

    run_worker(command, str(folder), Share(gpus=""), 2, ask, "job", **options)


def failing(code):
    return KILLED if code == 137 else f"raise SystemExit({code})"


PASSING = (1, 6, 70, 75, 137)


@pytest.mark.parametrize(
    "codes,expected",
    [((0, 0), 0)]
    + [((code, 75), code) for code in (*PASSING, *LASTING)]
    + [((75, code), code) for code in (*PASSING, *LASTING)]
    + [((137, 2), 137), ((0, 75), 75)],
)
def test_an_exit_code_decides_on_a_restart(codes, expected, outcomes, tmp_path):
    """Without an exception Ray restarts nobody."""
    own, other = codes
    outcomes.end(other, f"worker 1 ended with {other}")
    restarts = expected in PASSING and not set(codes) & set(LASTING)
    raises = pytest.raises(WorkerLostError) if restarts else contextlib.nullcontext()
    with raises as caught:
        run(failing(own), tmp_path, outcomes)
    code, description = cause_of(outcomes.get()[0])
    assert code == expected
    if restarts:
        assert str(caught.value).startswith(f"{description}; all start anew")


def test_a_worker_runs_in_the_folder_with_its_place_and_no_gpu(
    outcomes, tmp_path, capfd
):
    source = """
import os
print(os.getcwd(), os.environ["TF_CONFIG"], "TF_USE_LEGACY_KERAS" in os.environ)
print("GPUs:", repr(os.environ["CUDA_VISIBLE_DEVICES"]))
"""
    outcomes.end(0, "")
    (tmp_path / "folder").mkdir()
    run(source, tmp_path / "folder", outcomes)
    first, second = capfd.readouterr().out.splitlines()
    place = os.environ["TF_CONFIG"]
    assert first == f"[0] {tmp_path / 'folder'} {place} False"
    assert second == "[0] GPUs: ''"


def test_a_folder_that_a_node_does_not_have_is_no_cause_for_a_restart(
    outcomes, tmp_path
):
    outcomes.end(75, "worker 1 ended with exit code 75")
    run("", tmp_path / "nothing", outcomes)
    code, description = cause_of(outcomes.get()[0])
    assert code == 2
    assert re.match(r"worker 0 cannot start: .*nothing", description)


def when_it_waits(function, folder):
    def call():
        patience = time.monotonic() + WAIT_SECS
        while not (folder / "waits").exists() and time.monotonic() < patience:
            time.sleep(0.01)
        function()

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_signal_stops_the_workers_and_none_is_restarted(outcomes, tmp_path):
    assert not Outcomes().stop()
    were_running = []

    def stop():
        were_running.append(outcomes.stop())
        outcomes.end(75, "worker 1")

    thread = when_it_waits(stop, tmp_path)
    run(WAITING.format(code=75), tmp_path, outcomes)
    thread.join()
    assert were_running == [True]
    assert cause_of(outcomes.get()[0])[0] == 75
    assert not outcomes.stop()  # nobody is left


def test_a_worker_waits_until_the_others_have_ended(outcomes, tmp_path):
    (tmp_path / "waits").touch()
    began, delay = time.monotonic(), 0.5
    thread = threading.Timer(
        delay, outcomes.end, (3, "worker 1 ended with exit code 3")
    )
    thread.start()
    run(failing(75), tmp_path, outcomes)  # no restart
    assert time.monotonic() - began >= delay


STUBBORN = """
import pathlib, signal
signal.signal(signal.SIGTERM, lambda *_: print("stopped", flush=True))
pathlib.Path("waits").touch()
while True:
    signal.pause()
"""


def test_a_worker_that_does_not_notice_a_failure_is_stopped_then_killed(
    outcomes, tmp_path, capfd
):
    thread = when_it_waits(lambda: outcomes.end(6, "worker 1"), tmp_path)
    with pytest.raises(WorkerLostError, match="^worker 1; "):
        run(STUBBORN, tmp_path, outcomes, grace_secs=0.2)
    thread.join()
    assert capfd.readouterr().out == "[0] stopped\n"
    assert [code for code, _ in outcomes.get()[0]] == [6, 6]


def test_a_worker_has_its_port_for_itself(port, outcomes, tmp_path, capfd):
    """Between the moment when Ray finds it free and that when TensorFlow listens."""
    source = f"""
import socket
with socket.socket() as other:
    try:
        other.bind(("", {port}))
    except OSError as error:
        print(error.strerror)
socket.create_server(("", {port}))  # with SO_REUSEADDR, as TensorFlow's
print("listens")
"""
    outcomes.end(0, "")
    run(source, tmp_path, outcomes)
    assert capfd.readouterr().out == "[0] Address already in use\n[0] listens\n"


def test_a_port_that_somebody_has_taken_is_a_cause_for_a_restart(
    port, outcomes, tmp_path
):
    outcomes.end(75, "worker 1 ended with exit code 75")
    with socket.create_server(("", port)):
        with pytest.raises(WorkerLostError, match="all start anew"):
            run("", tmp_path, outcomes)
    description = f"worker 0 cannot start: 10.0.0.1:{port}: Address already in use"
    assert outcomes.get()[0][1:] == [(75, description)]


def test_a_restart_begins_with_no_outcomes():
    outcomes = Outcomes()
    for cluster in ("first", "second"):
        outcomes.begin(cluster)
        outcomes.begin(cluster)
        assert outcomes.get() == ([], False)
        outcomes.end(75, "lost")
        outcomes.end(137, "killed")
        assert cause_of(outcomes.get()[0]) == (137, "killed")
    assert cause_of([]) == (0, "")


# Signals to the command.


class Fit:
    """A `fit` that goes on until `done` is set, and a `stop` that counts."""

    def __init__(self, num_stops=math.inf):
        self.done, self.num_stops, self._most = threading.Event(), 0, num_stops

    def __call__(self):
        self.done.wait(WAIT_SECS)

    def stop(self):
        self.num_stops += 1
        if self.num_stops >= self._most:
            self.done.set()
        return True

    def after_signals(self, *numbers, **options):
        def send():
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.1)

        thread = threading.Timer(0.1, send)
        thread.start()
        try:
            return program._until_signal(self, self.stop, **options)
        finally:
            thread.join()


def test_a_second_signal_does_not_end_the_wait_for_a_save():
    fit = Fit(num_stops=3)
    assert fit.after_signals(signal.SIGTERM, signal.SIGINT) is None
    assert fit.done.is_set()


def test_workers_that_never_end_are_not_waited_for_forever():
    """As where Ray has killed them, and they have reported nothing."""
    fit = Fit()
    assert fit.after_signals(signal.SIGTERM, most_secs=0.3) is None
    assert fit.num_stops and not fit.done.is_set()
    fit.done.set()


# On a cluster of Ray.

NUM_STEPS = 100
TRAIN = [
    "--dataset=embedded",
    "--model=lenet",
    "--batch_size=32",
    "--device=cpu",
    "--num_towers=1",
    "--eval_every_epochs=0",
    "--summary_every_steps=0",
    "--log_every_steps=1",
    "--steps_per_loop=1",
    "--stuck_after_secs=60",
    f"--max_steps={NUM_STEPS}",
    "--checkpoint_every_steps=10",
]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra ray"
)


class Ray:
    """A cluster of Ray on this machine; its first node has room for three workers."""

    def __init__(self, folder, num_cpus=3):
        port = free_port()
        self._environ = os.environ | {
            "HOME": str(folder),  # where Ray writes
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "RAY_AUTH_MODE": "disabled",
            "RAY_DEDUP_LOGS": "0",
        }
        self._folder, self._nodes, self._commands = folder, [], []
        head = f"--head --port={port} --dashboard-port=0 --temp-dir={folder}"
        self.add_node(num_cpus, f"{head} --disable-usage-stats")

    def add_node(self, num_cpus, place=""):
        """Starts a node; returns its process, of which all others are children."""
        log = self._folder / f"log-{len(self._nodes)}"
        options = f"""
            --block --num-cpus={num_cpus} --node-ip-address=127.0.0.1
            --object-store-memory={2**27} --dashboard-agent-listen-port=0
        """
        place = place or f"--address={self._environ['RAY_ADDRESS']}"
        command = ["ray.scripts.scripts", "start", *options.split(), *place.split()]
        process = self._start(log, *command)
        self._nodes.append(process)
        wait_until(lambda: "started" in log.read_text(), process, log)
        return process

    def _start(self, log, *command):
        with open(log, "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start(self, log, *arguments):
        """Starts towers.on_ray."""
        command = ["towers.on_ray", "--num_workers=3", *arguments]
        self._commands.append(self._start(log, *command))
        return self._commands[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (*self._commands, *reversed(self._nodes)):
            process.terminate()
            process.wait(60)


def wait_until(is_so, process, log, secs=600):
    patience = time.monotonic() + secs
    while not is_so():
        assert process.poll() is None and time.monotonic() < patience, log.read_text()
        time.sleep(0.01)


@contextlib.contextmanager
def cluster_of_ray(**options):
    # The names of Ray's sockets have to be short.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        with Ray(folder, **options) as ray:
            yield ray
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def ray():
    with cluster_of_ray() as ray:
        yield ray


def parent_of(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


class Run:
    """A run of towers.on_ray."""

    def __init__(self, ray, folder, *options, flags=()):
        self.workdir, self._log = folder / "run", folder / "log"
        train = [*TRAIN, f"--workdir={self.workdir}", *flags]
        self.process = ray.start(self._log, *options, "--", *train)

    def wait_for_checkpoint(self):
        folder = self.workdir / "checkpoints"
        wait_until(lambda: Checkpointer(folder).steps(), self.process, self._log)

    def wait(self):
        return self.process.wait(900)

    @property
    def log(self):
        return self._log.read_text()

    def workers(self):
        """The processes that train, by their number as a worker: (own, parent's)."""
        found = {}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_text().split("\0")
                if f"--workdir={self.workdir}" in command and "--" not in command:
                    environ = (folder / "environ").read_text().split("\0")
                    [config] = [x[10:] for x in environ if x.startswith("TF_CONFIG=")]
                    index = json.loads(config)["task"]["index"]
                    found[index] = int(folder.name), parent_of(folder.name)
        return found

    def state(self):
        folder = self.workdir / "checkpoints"
        return Checkpointer(folder, pytest.fail).restore().tensors


@pytest.fixture(scope="module")
def uninterrupted(ray, tmp_path_factory):
    run = Run(ray, tmp_path_factory.mktemp("whole"))
    assert run.wait() == 0, run.log
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in run.log and "restored" not in run.log
    return run.state()


def assert_same_bits(state, expected):
    assert set(state) == set(expected)
    assert state["step"] == NUM_STEPS
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


@needs_ray
@pytest.mark.slow
def test_after_the_loss_of_a_node_all_start_anew_on_another(tmp_path):
    with cluster_of_ray(num_cpus=0) as ray:
        nodes = {ray.add_node(num_cpus=2).pid for _ in range(2)}
        run = Run(ray, tmp_path, "--num_workers=2", "--max_restarts=1")
        run.wait_for_checkpoint()
        raylets = [
            parent_of(parent) for _, (_, parent) in sorted(run.workers().items())
        ]
        assert {parent_of(raylet) for raylet in raylets} == nodes  # one on each
        os.kill(raylets[1], signal.SIGKILL)
        assert run.wait() == 0, run.log
    # Both nodes are on one machine, where each may send the lines of all.
    assert len(set(re.findall(r"\[0\] restored step \d+ ", run.log))) == 1, run.log
    assert run.state()["step"] == NUM_STEPS


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("which", ["worker", "worker of Ray"])
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_kill_ray_restarts_all_and_the_run_ends_in_the_same_bits(
    which, victim, ray, uninterrupted, tmp_path
):
    run = Run(ray, tmp_path, "--max_restarts=1")
    run.wait_for_checkpoint()
    before = run.workers()
    own, parent = before[victim]
    os.kill(own if which == "worker" else parent, signal.SIGKILL)
    assert run.wait() == 0, run.log
    assert len(before) == 3 and not run.workers()
    assert len(re.findall(r"\[0\].*restored step \d+ ", run.log)) == 1, run.log
    if which == "worker":
        assert f"worker {victim} was killed by signal 9 (Killed)" in run.log
    assert_same_bits(run.state(), uninterrupted)


@needs_ray
@pytest.mark.slow
def test_without_restarts_left_the_exit_code_is_that_of_the_cause(ray, tmp_path):
    run = Run(ray, tmp_path)
    run.wait_for_checkpoint()
    os.kill(run.workers()[2][0], signal.SIGKILL)
    assert run.wait() == 137, run.log
    line = "towers.on_ray: worker 2 was killed by signal 9 (Killed)"
    assert line in run.log.splitlines()


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_continues(
    number, ray, uninterrupted, tmp_path
):
    run = Run(ray, tmp_path, "--max_restarts=1")
    run.wait_for_checkpoint()
    run.process.send_signal(number)
    assert run.wait() == 75, run.log
    assert not run.workers()
    saved = Checkpointer(run.workdir / "checkpoints").steps()[-1]
    assert f"step {saved}/" in run.log and "restored" not in run.log
    run = Run(ray, tmp_path)
    assert run.wait() == 0, run.log
    assert f"restored step {saved} " in run.log
    assert_same_bits(run.state(), uninterrupted)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags,code", [("--learning_rat=1", 2), ("--dataset=cifar10 --data_dir=/none", 3)]
)
def test_what_a_restart_does_not_mend_ends_at_once(flags, code, ray, tmp_path):
    run = Run(ray, tmp_path, "--max_restarts=3", flags=flags.split())
    assert run.wait() == code, run.log
    assert len(re.findall(r"\[0\] run_train.py: ", run.log)) == 1, run.log
    lines = [x for x in run.log.splitlines() if x.startswith("towers.on_ray: ")]
    assert re.fullmatch(
        rf"towers.on_ray: worker \d ended with exit code {code}", "".join(lines)
    )
