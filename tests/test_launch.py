"""The launcher, with small programs instead of a training as its workers."""

import json
import os
import re
import signal
import socket
import sys

import pytest
from processes import Program, is_running, on_linux, run, wait_for_ends

from towers import launch, threads
from towers.cluster.agreement import HEARTBEAT_SECS
from towers.errors import IS_RETRYABLE, ConfigError
from towers.launch import NOTICE_SECS, signal_due, worst

KILLED = 128 + signal.SIGKILL
LASTING = [
    code for code, is_retryable in IS_RETRYABLE.items() if code and not is_retryable
]

# Each worker: `me` is its number, `addresses` are those of all, and `attempt` counts
# the starts from 1.
WORKER = """
import json, os, pathlib, random, signal, socket, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
me, addresses = config["task"]["index"], config["cluster"]["worker"]
attempts = pathlib.Path(f"attempts-{me}")
attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
attempt = len(attempts.read_text())
def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
def meet(name="met"):
    pathlib.Path(f"{name}-{me}").touch()
    for i in range(len(addresses)):
        wait_for(f"{name}-{i}")
"""

# The launcher, with another program than run_train.py.
LAUNCHER = """
import json, sys
from towers import launch
command, num_workers, options = json.loads(sys.argv[1])
launch.LATE_SECS = options.pop("late_secs", launch.LATE_SECS)
sys.exit(launch.launch(command, num_workers, **options))
"""


class Launcher(Program):
    """A launcher of workers that run a source in a folder."""

    def __init__(self, folder, source, num_workers, environ=(), popen=(), **options):
        worker = [sys.executable, "-Sc", WORKER + source]
        command = ["-c", LAUNCHER, json.dumps([worker, num_workers, options])]
        self._err = folder / "err"
        with open(self._err, "wb") as err:
            given = {"stderr": err} | dict(popen)
            super().__init__(command, folder, dict(environ), **given)

    @property
    def err(self) -> str:
        return self._err.read_text()


@pytest.fixture
def start(tmp_path):
    """Starts a `Launcher` in the test's folder."""
    started = []

    def start(*args, **options):
        started.append(Launcher(tmp_path, *args, **options))
        return started[-1]

    yield start
    for launcher in started:
        launcher.__exit__()


# A cluster.


PLACE = """
print("place", json.dumps(config), flush=True)
wait_for("go")
address, port = addresses[me].split(":")
socket.create_server((address, int(port)))
print("listens")
"""


def test_each_worker_finds_its_place_and_has_its_port(start, tmp_path):
    launcher = start(PLACE, 3)
    places = [json.loads(p) for p in launcher.wait_for(r"place (.*)$", 3)]
    cluster = {"worker": places[0]["cluster"]["worker"]}
    assert [place["cluster"] for place in places] == [cluster] * 3
    tasks = sorted((x["task"]["type"], x["task"]["index"]) for x in places)
    assert tasks == [("worker", index) for index in range(3)]
    hosts, ports = zip(*(a.split(":") for a in cluster["worker"]), strict=True)
    assert set(hosts) == {"127.0.0.1"} and len(set(ports)) == 3
    if sys.platform == "linux":  # nobody else is given a port before a worker listens
        for port in map(int, ports):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", port))
    (tmp_path / "go").touch()
    assert launcher.wait() == 0 and launcher.err == ""
    assert len(launcher.wait_for("listens", 3)) == 3


# Output.


def lines_of(worker, number):
    """What a worker prints on standard output or error."""
    letters = [b"a", b"\xff\xfe\r\x00", "\u00e9".encode()]
    sizes = [0, 1, 80, 30_000, 700]
    return [
        b"%d " % i + letters[(i + worker + number) % 3] * sizes[i % 5]
        for i in range(60)
    ]


def test_lines_are_whole_prefixed_and_in_order(start, tmp_path):
    source = """
meet()
for number in (1, 2):
    if os.fork() == 0:  # both streams at once
        draw, text = random.Random(me), pathlib.Path(f"text-{me}-{number}").read_bytes()
        while text:
            size = draw.choice([1, 100, 10_000, 100_000])
            written = os.write(number, text[:size])
            text = text[written:]
        os._exit(0)
os.wait(), os.wait()
"""
    for worker in range(3):
        for number in (1, 2):
            text = b"\n".join(lines_of(worker, number))
            (tmp_path / f"text-{worker}-{number}").write_bytes(text)
    launcher = start(source, 3)
    assert launcher.process.wait(30) == 0
    for number, path in [(1, launcher.path), (2, tmp_path / "err")]:
        content = path.read_bytes()
        assert content.endswith(b"\n")  # although the workers' last lines do not
        printed = content[:-1].split(b"\n")
        assert len(printed) == 3 * 60
        for worker in range(3):
            prefix = b"[%d] " % worker
            of_worker = [p.removeprefix(prefix) for p in printed if p[:4] == prefix]
            assert of_worker == lines_of(worker, number)


@pytest.mark.row(45)
def test_a_launcher_whose_output_nobody_reads_restarts_and_stops(start, tmp_path):
    source = """
print(600 * ("x" * 100 + "\\n"), flush=True)  # a pipe takes 64 KB
meet(f"met{attempt}")
if attempt == 1: sys.exit(6)
time.sleep(1000)
"""
    ends, options = os.pipe(), {"max_restarts": 1, "grace_secs": 0.1, "late_secs": 0.2}
    launcher = start(source, 2, popen={"stdout": ends[1]}, **options)
    launcher.wait_until(lambda: len(list(tmp_path.glob("met2-*"))) == 2)
    launcher.process.terminate()
    assert launcher.wait() == 75
    os.close(ends[0]), os.close(ends[1])


# Signals.

COUNTING = """
received = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: received.append(number))
print("ready")  # and is shown at once
while not received:
    time.sleep(0.01)
print("stops")
wait_for("go")
time.sleep(0.1)  # for a second signal
print("received", *map(int, received))
sys.exit(75)
"""


def test_a_signal_is_passed_on_once_to_all_workers(start, tmp_path):
    launcher = start(COUNTING, 3, max_restarts=3)
    launcher.wait_for("ready", 3)
    launcher.process.terminate()
    launcher.wait_for("stops", 3)
    launcher.process.terminate()
    launcher.process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    assert launcher.wait() == 75
    expected = [f"[{i}] received {int(signal.SIGTERM)}" for i in range(3)]
    assert sorted(re.findall(".*received.*", launcher.output)) == expected
    assert "restart" not in launcher.err


@on_linux
def test_no_worker_outlives_a_launcher_that_is_killed(start):
    source = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
while True:
    time.sleep(1)
"""
    launcher = start(source, 3)
    pids = launcher.wait_for(r"pid (\d+)$", 3)
    assert all(is_running(int(pid)) for pid in pids)
    launcher.process.kill()
    wait_for_ends(pids)


# Failures.


def test_the_worst_exit_code_is_that_of_the_cause():
    assert worst([0, 0]) == 0
    assert worst([0, 75, 0]) == 75
    for code in (*LASTING, 6):
        assert worst([75, 0, code, 75]) == code
        for worse in (70, 1, KILLED, 128 + signal.SIGSEGV):
            assert worst([code, 75, worse]) == worst([worse, 75, code]) == worse
    assert worst([75, 4, 3]) == 4 and worst([137, 70]) == 137


@pytest.mark.parametrize(
    "grace_secs,is_saving,term_secs,kill_secs",
    [(60.0, False, 15.0, 75.0), (60.0, True, 15.0, 615.0), (0.5, False, 0.5, 1.0)],
)
def test_signals_follow_the_notice_of_a_failure_and_the_time_for_a_save(
    grace_secs, is_saving, term_secs, kill_secs
):
    times = (term_secs - 0.01, term_secs, kill_secs - 0.01, kill_secs)
    due = [signal_due(secs, grace_secs, is_saving) for secs in times]
    assert due == [None, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    assert HEARTBEAT_SECS < NOTICE_SECS  # workers mostly end by themselves


@pytest.mark.row(45)
def test_workers_that_do_not_notice_a_failure_are_stopped_then_killed(start):
    source = """
def stop(number, frame):
    print("stopped")
    if me == 1:
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
meet()
if me == 0:
    sys.exit(3)
while True:
    time.sleep(0.01)
"""
    launcher = start(source, 3, grace_secs=0.4, max_restarts=2)
    assert launcher.wait() == 3  # not that of a worker which the launcher has killed
    assert sorted(launcher.output.splitlines()) == ["[1] stopped", "[2] stopped"]
    first, second, last = launcher.err.splitlines()
    assert first.endswith("; SIGTERM to 1, 2, still running")
    assert second.endswith("; SIGKILL to 2, still running")
    assert last == "towers.launch: worker 0 ended with exit code 3"


# Restarts.

FAILING = """
print("job", os.environ["TOWERS_JOB"], "ports", *addresses, flush=True)
if attempt > {num_failures}:
    sys.exit(0)
{failure} if me == 1 else sys.exit(75)
"""


@pytest.mark.row(44)
def test_all_workers_start_anew_where_the_cause_may_pass(start):
    """As the same job, so that --overwrite starts again only once."""
    failure = "os.kill(os.getpid(), signal.SIGKILL)"
    launcher = start(FAILING.format(failure=failure, num_failures=1), 2, max_restarts=3)
    assert launcher.wait() == 0
    jobs, *ports = zip(
        *(re.findall(r"job (\S+) ports \S+:(\d+) \S+:(\d+)$", launcher.output, re.M)),
        strict=True,
    )
    assert len(jobs) == 4 and len(set(jobs)) == 1
    for two in ports:
        assert two[0] == two[1] != two[2] == two[3]
    [line] = launcher.err.splitlines()
    assert line.endswith("; restart 1 of 3: all workers start anew")


@pytest.mark.parametrize("code,num_restarts", [(5, 0), (6, 1)])
def test_no_restart_where_the_cause_stays_or_beyond_their_number(
    start, code, num_restarts
):
    source = FAILING.format(failure=f"sys.exit({code})", num_failures=9)
    launcher = start(source, 2, max_restarts=1)
    assert launcher.wait() == code
    assert len(launcher.output.splitlines()) == 2 * (1 + num_restarts)
    *restarts, last = launcher.err.splitlines()
    assert [" restart 1 of 1" in line for line in restarts] == [True] * num_restarts
    assert last == f"towers.launch: worker 1 ended with exit code {code}"


# The machine.


def test_gpus_are_divided_among_the_workers(tmp_path, monkeypatch):
    def gpus_of(num_workers, environ, device="auto"):
        return [share.gpus for share in launch.divide(num_workers, environ, device)]

    monkeypatch.setattr(threads, "DRIVER_GPUS", tmp_path)
    for number in range(6):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert gpus_of(3, {}) == ["0,1", "2,3", "4,5"]
    assert gpus_of(6, {}) == list("012345")
    assert not any(share.cores for share in launch.divide(2, {}))
    # What is visible decides, as CUDA reads it.
    visible = "CUDA_VISIBLE_DEVICES"
    assert gpus_of(2, {visible: "7, 3"}) == ["7", "3"]
    uuids = ["GPU-8932f937", "MIG-1/2/3"]
    assert gpus_of(2, {visible: ",".join(uuids)}) == uuids
    assert gpus_of(1, {visible: "5,4,-1,3"}) == ["5,4"]
    for hidden in ("", "-1", "NoDevFiles"):
        assert gpus_of(4, {visible: hidden}) == [None] * 4
    # Workers on the CPU take no memory of a GPU.
    assert gpus_of(4, {}, "cpu") == [""] * 4
    for num_workers in (4, 12):
        with pytest.raises(ConfigError, match=f"num_workers={num_workers} with 6 GPU"):
            launch.divide(num_workers, {})


# The command.


@pytest.mark.parametrize(
    "command,environ,words",
    [
        ("--num_workers=2 --", {}, ["no command", "-- --config=quickstart"]),
        ("--num_workers=2 --config=quickstart", {}, ["'config'", "follow --"]),
        ("--num_workers=2 -- --seed=1", {"TF_CONFIG": "{}"}, ["TF_CONFIG is set"]),
    ],
)
@pytest.mark.row(17)
def test_a_mistake_is_one_line_and_exit_2(command, environ, words):
    done = run("-m", "towers.launch", *command.split(), **environ)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("towers.launch: ")
    for word in words:
        assert word in line


def test_the_launcher_imports_no_tensorflow():
    script = "import sys, towers.launch\n"
    script += "print({'tensorflow', 'keras', 'numpy'} & set(sys.modules))"
    assert run("-c", script).stdout == "set()\n"
