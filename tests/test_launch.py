"""The launcher, with small programs instead of a training as its workers."""

import errno
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from absl import flags

from towers.config import flags as config_flags
from towers.errors import ConfigError
from towers.launch import __main__ as program
from towers.launch import machine
from towers.launch.cluster import LASTING, NOTICE_SECS, Escalation, worst

ROOT = pathlib.Path(__file__).resolve().parents[1]
WAIT_SECS = 30
OWN = ("CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "TF_CONFIG")
ENVIRON = {k: v for k, v in os.environ.items() if k not in OWN}
ENVIRON["PYTHONPATH"] = str(ROOT)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

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
"""

# The launcher, with another program than run_train.py.
LAUNCHER = """
import json, sys
from towers.launch.cluster import launch
command, num_workers, options = json.loads(sys.argv[1])
sys.exit(launch(command, num_workers, **options))
"""


class Launcher:
    """A launcher of workers that run a source; its outputs are files of `folder`."""

    def __init__(self, folder, source, num_workers, environ=(), prefix=(), **options):
        self._folder = folder
        worker = [sys.executable, "-Sc", WORKER + source]
        arguments = json.dumps([worker, num_workers, options])
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-c", LAUNCHER, arguments],
                cwd=folder,
                env=ENVIRON | dict(environ),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """The matches in standard output, once they are so many."""
        patience = time.monotonic() + WAIT_SECS
        while len(found := re.findall(pattern, self.out, re.MULTILINE)) < count:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < patience, self.out + self.err
            time.sleep(0.01)
        return found

    def wait(self) -> int:
        self.process.communicate(timeout=WAIT_SECS)
        return self.process.returncode


@pytest.fixture
def start(tmp_path):
    """Starts a `Launcher` in the test's folder."""
    started = []

    def start(*args, **options):
        started.append(Launcher(tmp_path, *args, **options))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.wait()


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False
    return state.split()[0] not in "XZ"


def assert_they_end(pids):
    patience = time.monotonic() + WAIT_SECS
    while any(is_running(int(pid)) for pid in pids):
        assert time.monotonic() < patience
        time.sleep(0.01)


# A cluster.


RING = """
address, port = addresses[me].split(":")
print("place", json.dumps(config), flush=True)
wait_for("go")
server = socket.create_server((address, int(port)))
wait_for(f"listening-{me - 1}") if me else None
pathlib.Path(f"listening-{me}").touch()
wait_for(f"listening-{len(addresses) - 1}")
peer = addresses[(me + 1) % len(addresses)].split(":")
out = socket.create_connection((peer[0], int(peer[1])))
out.sendall(b"%d" % me)
print("heard from", server.accept()[0].recv(1).decode())
"""


def test_each_worker_finds_its_place_and_reaches_the_others(start, tmp_path):
    launcher = start(RING, 3)
    places = [json.loads(p) for p in launcher.wait_for(r"place (.*)$", 3)]
    clusters = [place["cluster"] for place in places]
    assert clusters[0] == clusters[1] == clusters[2]
    assert {"worker"} == set(clusters[0])
    tasks = [place["task"] for place in places]
    assert sorted(task["index"] for task in tasks) == [0, 1, 2]
    assert {task["type"] for task in tasks} == {"worker"}

    hosts, ports = zip(*(a.split(":") for a in clusters[0]["worker"]), strict=True)
    assert set(hosts) == {"127.0.0.1"} and len(set(ports)) == 3
    if sys.platform == "linux":  # nobody else is given a port before a worker listens
        for port in map(int, ports):
            with socket.socket() as other, pytest.raises(OSError) as caught:
                other.bind(("", port))
            assert caught.value.errno == errno.EADDRINUSE

    (tmp_path / "go").touch()
    assert launcher.wait() == 0 and launcher.err == ""
    heard = re.findall(r"^\[(\d)\] heard from (\d)$", launcher.out, re.MULTILINE)
    assert sorted(heard) == [("0", "2"), ("1", "0"), ("2", "1")]
    for port in map(int, ports):  # free again, but for TIME_WAIT
        with socket.create_server(("127.0.0.1", port)):
            pass


# Output.

LINES = """
def lines(seed):
    draw = random.Random(seed)
    return [
        b"%d " % i + draw.choice([b"a", b"\\xff\\xfe\\r\\x00", "\\u00e9".encode()])
        * draw.choice([0, 1, 80, 30_000])
        for i in range(60)
    ]
"""


def test_lines_are_whole_prefixed_and_in_order(start, tmp_path):
    source = """
pathlib.Path(f"ready-{me}").touch()
for i in range(3):
    wait_for(f"ready-{i}")
for number in (1, 2):
    if os.fork() == 0:  # both streams at once
        draw, text = random.Random(me), b"\\n".join(lines(10 * me + number))
        while text:
            size = draw.choice([1, 100, 10_000, 100_000])
            written = os.write(number, text[:size])
            text = text[written:]
        os._exit(0)
os.wait(), os.wait()
"""
    assert start(LINES + source, 3).wait() == 0
    namespace = {"random": random}
    exec(LINES, namespace)
    for number, name in [(1, "out"), (2, "err")]:
        content = (tmp_path / name).read_bytes()
        assert content.endswith(b"\n")  # although the workers' last lines do not
        printed = content[:-1].split(b"\n")
        assert len(printed) == 3 * 60
        for worker in range(3):
            prefix = b"[%d] " % worker
            of_worker = [p.removeprefix(prefix) for p in printed if p[:4] == prefix]
            assert of_worker == namespace["lines"](10 * worker + number)
        changes = sum(
            a[:3] != b[:3] for a, b in zip(printed, printed[1:], strict=False)
        )
        assert changes > 3  # the workers' lines come in turns


def test_a_line_is_shown_at_once_and_without_a_flush_of_the_worker(start, tmp_path):
    launcher = start("print('begun'); wait_for('go')", 1)
    assert launcher.wait_for(r"^\[0\] begun$")
    (tmp_path / "go").touch()
    assert launcher.wait() == 0


def test_training_goes_on_where_nobody_reads_the_output(tmp_path):
    worker = "print('x' * 100, flush=True)\n" * 2000 + "pathlib.Path('end').touch()"
    command = [sys.executable, "-Sc", WORKER + worker]
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, json.dumps([command, 1, {}])],
        cwd=tmp_path,
        env=ENVIRON,
        stdout=writer,
    ) as process:
        os.close(reader)
        os.close(writer)
        assert process.wait(WAIT_SECS) == 0
    assert (tmp_path / "end").exists()


def test_a_launcher_whose_output_nobody_reads_goes_on_and_stops(tmp_path):
    worker = "print(20000 * ('x' * 100 + '\\n'), flush=True)\n"
    worker += "pathlib.Path(f'end-{me}').touch()\nif me: time.sleep(1000)"
    command = [sys.executable, "-Sc", WORKER + worker]
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, json.dumps([command, 2, {"grace_secs": 0.1}])],
        cwd=tmp_path,
        env=ENVIRON,
        stdout=subprocess.PIPE,  # and never read
    ) as process:
        patience = time.monotonic() + WAIT_SECS
        while len(list(tmp_path.glob("end-*"))) < 2:
            assert time.monotonic() < patience
            time.sleep(0.01)
        process.terminate()
        assert process.wait(WAIT_SECS) == 75


# Signals.

COUNTING = """
received = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: received.append(number))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
print("stops", flush=True)
wait_for("go")
time.sleep(0.1)  # for a second signal
print("received", *map(int, received))
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_to_all_workers(start, tmp_path, number):
    launcher = start(COUNTING, 3, max_restarts=3)
    launcher.wait_for("ready", 3)
    launcher.process.send_signal(number)
    launcher.wait_for("stops", 3)
    launcher.process.send_signal(signal.SIGTERM)
    launcher.process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    assert launcher.wait() == 75
    expected = [f"[{i}] received {int(number)}" for i in range(3)]
    assert sorted(re.findall(".*received.*", launcher.out)) == expected
    assert "restart" not in launcher.err


@on_linux
def test_ctrl_c_in_a_terminal_reaches_each_worker_once(start, tmp_path):
    terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    launcher = start(COUNTING, 2, prefix=[sys.executable, "-c", terminal])
    launcher.wait_for("ready", 2)
    launcher.process.stdin.write(b"\x03")
    launcher.process.stdin.flush()
    launcher.wait_for("stops", 2)
    (tmp_path / "go").touch()
    assert launcher.wait() == 75
    assert sorted(re.findall(r"\[\d\] received.*\d", launcher.out)) == [
        f"[{i}] received {int(signal.SIGINT)}" for i in range(2)
    ]


def test_a_worker_that_cannot_catch_the_signal_yet_counts_as_stopped(start):
    launcher = start("print('ready', flush=True); time.sleep(60)", 2, max_restarts=1)
    launcher.wait_for("ready", 2)
    launcher.process.terminate()
    assert launcher.wait() == 75


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
    assert_they_end(pids)


@on_linux
def test_what_a_worker_leaves_behind_is_killed(start):
    source = """
left = subprocess.Popen([sys.executable, "-Sc", "import signal; signal.pause()"])
print("pid", left.pid)
os._exit(0)
"""
    launcher = start(source, 2)
    assert launcher.wait() == 0
    assert_they_end(launcher.wait_for(r"pid (\d+)$", 2))


@on_linux
def test_a_process_that_left_the_group_is_not_waited_for(start):
    source = """
command = [sys.executable, "-Sc", "import time; time.sleep(60)"]
left = subprocess.Popen(command, start_new_session=True)  # with the same output
print("pid", left.pid, end="")
os._exit(0)
"""
    launcher = start(source, 1)
    try:
        assert launcher.wait() == 0
        assert re.fullmatch(r"\[0\] pid \d+\n", launcher.out)
    finally:
        os.kill(int(launcher.out.split()[-1]), signal.SIGKILL)


# Failures.


def test_the_worst_exit_code_is_that_of_the_cause():
    assert worst([0, 0]) == 0
    assert worst([0, 75, 0]) == 75
    for code in (*LASTING, 6):
        assert worst([75, 0, code, 75]) == code
        for worse in (70, 1, 128 + signal.SIGKILL, 128 + signal.SIGSEGV):
            assert worst([code, 75, worse]) == worst([worse, 75, code]) == worse
    assert worst([75, 4, 3]) == 4 and worst([137, 70]) == 137


def test_workers_that_do_not_notice_a_failure_are_stopped_then_killed(start):
    source = """
def stop(number, frame):
    print("stopped")
    if me == 1:
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(f"ready-{me}").touch()
for i in range(3):
    wait_for(f"ready-{i}")
if me == 0:
    sys.exit(3)
while True:
    time.sleep(0.01)
"""
    began = time.monotonic()
    launcher = start(source, 3, grace_secs=1.0, max_restarts=2)
    assert launcher.wait() == 3  # not that of a worker which the launcher has killed
    assert time.monotonic() - began >= 2.0
    assert sorted(launcher.out.splitlines()) == ["[1] stopped", "[2] stopped"]
    first, second, last = launcher.err.splitlines()
    assert first.endswith("; SIGTERM to 1, 2, still running")
    assert second.endswith("; SIGKILL to 2, still running")
    assert last == "towers.launch: worker 0 ended with exit code 3"


def test_signals_follow_the_notice_of_a_failure_and_the_time_for_a_save():
    now = [100.0]
    escalation = Escalation(60.0, clock=lambda: now[0])

    def at(secs):
        now[0] = 100.0 + secs
        return escalation.due(3, is_stop=True)

    assert at(0.0) is at(NOTICE_SECS - 0.1) is None
    assert at(NOTICE_SECS) == signal.SIGTERM
    assert at(NOTICE_SECS + 59.9) is None
    assert at(NOTICE_SECS + 60.0) == signal.SIGKILL
    assert at(1000.0) is None
    short = Escalation(0.5, clock=lambda: now[0])
    assert short.due(3, is_stop=True) is None
    now[0] += 0.5
    assert short.due(3, is_stop=True) == signal.SIGTERM


def test_after_a_stop_there_is_time_for_a_long_save():
    now = [0.0]
    # Without a stop the code says that a worker was lost, as when it is frozen.
    for is_stop, secs_to_kill in ((True, 600.0), (False, 60.0)):
        escalation = Escalation(60.0, clock=lambda: now[0])
        for secs, number in [
            (0.0, None),
            (NOTICE_SECS, signal.SIGTERM),
            (NOTICE_SECS + secs_to_kill - 0.1, None),
            (NOTICE_SECS + secs_to_kill, signal.SIGKILL),
        ]:
            now[0] = secs
            assert escalation.due(75, is_stop) == number
    # Where a worker fails meanwhile, the shorter limit holds.
    escalation = Escalation(60.0, clock=lambda: now[0])
    for secs, code, number in [
        (1000.0, 75, None),
        (1100.0, 75, signal.SIGTERM),
        (1160.0, 75, None),
        (1160.1, 70, signal.SIGKILL),
    ]:
        now[0] = secs
        assert escalation.due(code, is_stop=True) == number


def test_a_chief_that_still_saves_after_a_signal_is_not_killed(start):
    source = """
def stop(number, frame):
    if me == 0:
        time.sleep(1.5)  # more than the time after a failure
        print("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    launcher = start(source, 3, grace_secs=0.5)
    launcher.wait_for("ready", 3)
    launcher.process.terminate()
    assert launcher.wait() == 75
    assert "[0] saved" in launcher.out.splitlines()
    assert "SIGKILL" not in launcher.err


def test_heartbeats_end_the_workers_before_the_launcher_does():
    from towers.parallel.connect import HEARTBEAT_SECS

    assert HEARTBEAT_SECS < NOTICE_SECS


def test_a_worker_that_does_not_stop_is_killed_and_did_not_end_in_time(start):
    source = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75) if me == 0 else None)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    launcher = start(source, 2, grace_secs=0.1)
    launcher.wait_for("ready", 2)
    launcher.process.terminate()
    assert launcher.wait() == 6  # not 75, as it has not saved
    first, last = launcher.err.splitlines()  # none of the signal that was sent before
    assert first.endswith("; SIGKILL to 1, still running")
    assert last == "towers.launch: worker 1 did not end in time and was killed"


def test_workers_that_all_ignore_the_stop_are_killed(start):
    source = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    launcher = start(
        source + "print('ready', flush=True)\nwait_for('never')", 2, grace_secs=0.1
    )
    launcher.wait_for("ready", 2)
    launcher.process.terminate()
    assert launcher.wait() == 6
    assert "stopped; SIGKILL to 0, 1, still running" in launcher.err


def test_workers_that_notice_in_time_are_left_alone(start):
    source = """
signal.signal(signal.SIGTERM, lambda *_: print("stopped"))
if me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.2)
print("saved")
sys.exit(75)
"""
    launcher = start(source, 3)
    assert launcher.wait() == 128 + signal.SIGKILL
    assert sorted(launcher.out.splitlines()) == ["[1] saved", "[2] saved"]
    [line] = launcher.err.splitlines()
    assert line.startswith("towers.launch: worker 0 was killed by signal 9")


UNSTARTABLE = """
import os, sys
from towers.errors import ConfigError
from towers.launch.cluster import Cluster
from towers.launch.machine import Share
programs = {"all": ["./nothing"], "second": ["sleep", "60"]}
shares = [Share(), Share(cores=(10**5,))]
try:
    Cluster(programs[sys.argv[1]], shares, 60.0).run()
except ConfigError as error:
    print(error)
try:
    os.waitpid(-1, os.WNOHANG)
    print("a worker is left")
except ChildProcessError:
    pass
"""


@on_linux
@pytest.mark.parametrize("which,number", [("all", 0), ("second", 1)])
def test_a_worker_that_cannot_be_started_ends_the_others(tmp_path, which, number):
    done = subprocess.run(
        [sys.executable, "-c", UNSTARTABLE, which],
        cwd=tmp_path,
        env=ENVIRON,
        capture_output=True,
        text=True,
    )
    [line] = done.stdout.splitlines()
    assert line.startswith(f"cannot start worker {number}: ")


# Restarts.

FAILING = """
print("ports", *addresses, flush=True)
if attempt > 1:
    sys.exit(0)
{failure} if me == 1 else sys.exit(75)
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("failure", [75, 6, 70, 1, KILLED])
def test_all_workers_start_anew_where_the_cause_may_pass(start, failure):
    failure = failure if failure == KILLED else f"sys.exit({failure})"
    launcher = start(FAILING.format(failure=failure), 2, max_restarts=3)
    assert launcher.wait() == 0
    ports = [line.split(":")[1:] for line in launcher.wait_for(r"ports .*$", 4)]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    [line] = launcher.err.splitlines()
    assert line.endswith("; restart 1 of 3: all workers start anew")


@pytest.mark.parametrize("code", LASTING)
def test_no_restart_where_the_cause_stays(start, code):
    source = FAILING.format(failure=f"sys.exit({code})")
    launcher = start(source, 2, max_restarts=3)
    assert launcher.wait() == code
    assert len(launcher.wait_for("ports", 2)) == 2
    assert launcher.err == f"towers.launch: worker 1 ended with exit code {code}\n"


def test_restarts_end_at_their_number(start):
    launcher = start("print(attempt); sys.exit(6 if me else 75)", 2, max_restarts=2)
    assert launcher.wait() == 6
    assert sorted(re.findall(r"\] (\d)", launcher.out)) == list("112233")
    assert [" restart 1 of 2:" in line for line in launcher.err.splitlines()] == [
        True,
        False,
        False,
    ]


# The machine.


def gpus_of(num_workers, environ, device="auto"):
    return [share.gpus for share in machine.divide(num_workers, environ, device)]


def test_gpus_are_divided_among_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "DRIVER_GPUS", tmp_path)
    for number in range(6):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert gpus_of(3, {}) == ["0,1", "2,3", "4,5"]
    assert gpus_of(6, {}) == list("012345")
    assert not any(share.cores for share in machine.divide(2, {}))
    # What is visible decides, as CUDA reads it.
    visible = "CUDA_VISIBLE_DEVICES"
    assert gpus_of(2, {visible: "7, 3"}) == ["7", "3"]
    assert gpus_of(2, {visible: "GPU-8932f937,MIG-1/2/3"}) == [
        "GPU-8932f937",
        "MIG-1/2/3",
    ]
    assert gpus_of(1, {visible: "5,4,-1,3"}) == ["5,4"]
    for hidden in ("", "-1", "NoDevFiles"):
        assert gpus_of(4, {visible: hidden}) == [None] * 4
    # Workers on the CPU take no memory of a GPU.
    assert gpus_of(4, {}, "cpu") == [""] * 4
    for num_workers in (4, 12):
        with pytest.raises(ConfigError, match=f"num_workers={num_workers} with 6 GPU"):
            machine.divide(num_workers, {})


def test_a_worker_sees_its_gpus_alone(start):
    source = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    launcher = start(source, 2, environ={"CUDA_VISIBLE_DEVICES": "0,1,4,5"})
    assert launcher.wait() == 0
    assert sorted(launcher.out.splitlines()) == ["[0] 0,1", "[1] 4,5"]


@on_linux
def test_cores_are_divided_among_the_workers(start):
    cores = os.sched_getaffinity(0)
    num_workers = min(2, len(cores))
    launcher = start("print(*os.sched_getaffinity(0))", num_workers)
    assert launcher.wait() == 0
    shares = [[*map(int, line.split()[1:])] for line in launcher.out.splitlines()]
    assert [len(share) for share in shares] == [len(cores) // num_workers] * num_workers
    assert len(set(sum(shares, [])) & cores) == len(sum(shares, []))


@on_linux
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_every_worker_gets_as_many_cores(num_workers, monkeypatch):
    """Else those of a recipe with --clip_norm would refuse each other."""
    for num_cores in range(num_workers, 17):
        cores = set(range(5, 5 + 2 * num_cores, 2))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        shares = machine.divide(num_workers, {"CUDA_VISIBLE_DEVICES": ""})
        sizes = [len(share.cores) for share in shares]
        assert sizes == [num_cores // num_workers] * num_workers
        given = {core for share in shares for core in share.cores}
        assert len(given) == sum(sizes) and given <= cores


@on_linux
def test_more_workers_than_cores_share_them_all():
    num_workers = len(os.sched_getaffinity(0)) + 1
    shares = machine.divide(num_workers, {"CUDA_VISIBLE_DEVICES": ""})
    assert shares == [machine.Share()] * num_workers


# The command.


def run_program(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "towers.launch", *arguments],
        cwd=ROOT,
        env=ENVIRON | environ,
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
    )


@pytest.mark.parametrize(
    "command,environ,words",
    [
        ("", {}, ["num_workers", "follow --"]),
        ("--num_workers=2", {}, ["no command", "follow --"]),
        ("--num_workers=2 --", {}, ["no command", "-- --config=quickstart"]),
        ("--num_workers=2 --config=quickstart", {}, ["'config'", "follow --"]),
        ("--num_workers=0 -- --seed=1", {}, ["--num_workers=0", "[1, 64]"]),
        ("--num_workers=65 -- --seed=1", {}, ["--num_workers=65", "[1, 64]"]),
        ("--num_workers=x -- --seed=1", {}, ["--num_workers=x"]),
        ("--num_workers=1 --max_restarts=-1 -- --seed=1", {}, ["--max_restarts=-1"]),
        ("--num_workers=1 --grace_secs=nan -- --seed=1", {}, ["grace_secs=nan"]),
        ("--num_workers=1 --grace_secs=inf -- --seed=1", {}, ["grace_secs=inf"]),
        (
            "--num_workers=3 -- --seed=1",
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            ["num_workers=3 with 2 GPU(s)", "CUDA_VISIBLE_DEVICES", "--device=cpu"],
        ),
        ("--num_workers=2 -- --seed=1", {"TF_CONFIG": "{}"}, ["TF_CONFIG is set"]),
    ],
)
@pytest.mark.row(17)
def test_a_mistake_is_one_line_and_exit_2(command, environ, words):
    done = run_program(*command.split(), **environ)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("towers.launch: ")
    for word in words:
        assert word in line


def test_each_worker_runs_run_train():
    done = run_program("--num_workers=2", "--max_restarts=1", "--", "--bach_size=3")
    assert (done.returncode, done.stdout) == (2, "")
    *lines, last = done.stderr.splitlines()
    first, second = sorted(lines)
    assert first.startswith("[0] run_train.py: ") and "'bach_size'" in first
    assert second.startswith("[1] run_train.py: ") and "'bach_size'" in second
    assert re.fullmatch(r"towers.launch: worker \d ended with exit code 2", last)


@pytest.mark.parametrize(
    "arguments,strategy",
    [
        ("--batch_size=64", "multi_worker"),
        ("--strategy=replicated", "replicated"),
        ("--seed=3 -strategy replicated", "replicated"),
    ],
)
def test_the_strategy_of_the_arguments_overrides_multi_worker(arguments, strategy):
    command = program.train_command(arguments.split())
    assert command[:2] == [sys.executable, str(ROOT / "run_train.py")]
    values = flags.FlagValues()
    config_flags.define_config_flags(values=values)
    config_flags.parse(command[1:], values)
    assert values["strategy"].value == strategy


def test_without_a_checkout_run_train_lies_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "ROOT", tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run_train.py is neither in .*site-packages"):
        program.train_command(["--seed=1"])
    (tmp_path / "run_train.py").touch()
    assert program.train_command(["--seed=1"])[1] == str(tmp_path / "run_train.py")


@pytest.mark.parametrize(
    "arguments,device",
    [
        ("--config=cifar10_cnn", "auto"),
        ("--config=cifar10_cnn --device=cpu --noresident", "cpu"),
        ("--seed 3 --device gpu", "gpu"),
        ("--device=tpu", "auto"),
    ],
)
def test_the_device_is_read_from_the_arguments(arguments, device):
    assert program.device_of(arguments.split()) == device


def test_the_launcher_imports_no_tensorflow():
    script = "import sys, towers.launch.__main__\n"
    script += "print({'tensorflow', 'keras', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr
