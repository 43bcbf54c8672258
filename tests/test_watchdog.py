"""Calls under watch: errors, signals, stuck steps; reliability.md, rows 12, 15."""

import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest

from towers.errors import Preempted, StuckError
from towers.run import watchdog
from towers.run.watchdog import Watchdog

WAIT_SECS = 30  # for what should come at once


class Call:
    """A call that goes on until it is released, and where it stands."""

    def __init__(self, phase="computing"):
        self.released = threading.Event()
        self.asked_to_stop = threading.Event()
        self.steps, self.phase = 6, phase

    def __call__(self):
        assert self.released.wait(WAIT_SECS)
        self.steps += 1
        return "result"

    def progress(self):
        return self.steps, self.phase

    def watched_by(self, dog, **kwargs):
        return dog.run(
            self,
            progress=self.progress,
            interruptible=("waiting",),
            request_stop=self.asked_to_stop.set,
            **kwargs,
        )


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(watchdog, "_GRACE_SECS", 0.15)


def clock(*times):
    """Seconds to be told one after the other; the last one stays."""
    return itertools.chain(times, itertools.repeat(times[-1])).__next__


def test_a_result_passes_through():
    call = Call()
    call.released.set()
    assert call.watched_by(Watchdog()) == "result"


def test_an_error_passes_through():
    def call():
        raise ZeroDivisionError("out of the call")

    with pytest.raises(ZeroDivisionError, match="out of the call"):
        Watchdog().run(call, progress=lambda: (0, ""), interruptible=())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_waiting_call_is_left_behind_after_the_grace(number, short_grace):
    call = Call("waiting")
    with Watchdog() as dog:
        os.kill(os.getpid(), number)
        message = rf"^stopped by {number.name} while waiting$"
        with pytest.raises(Preempted, match=message):
            call.watched_by(dog)
        assert dog.stopped_by == number.name
    assert call.asked_to_stop.is_set()
    call.released.set()


def test_a_call_that_returns_within_the_grace_gives_its_result():
    call = Call("waiting")
    call.released = call.asked_to_stop
    with Watchdog() as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        assert call.watched_by(dog) == "result"
        assert dog.stopped_by == "SIGTERM"


def test_a_computing_step_is_finished_and_a_long_one_is_told_of_once(monkeypatch):
    monkeypatch.setattr(watchdog, "_PATIENCE_SECS", 0.15)
    call, said = Call("computing"), []

    def say(line):
        said.append(line)
        threading.Timer(0.4, call.released.set).start()

    with Watchdog(say=say) as dog:
        os.kill(os.getpid(), signal.SIGINT)
        assert call.watched_by(dog) == "result"
    assert said == ["SIGINT: step 7 is finished first"]


def test_a_call_that_turns_from_computing_to_waiting_is_left_behind_then(short_grace):
    call = Call("computing")

    def progress():
        if call.asked_to_stop.is_set():
            call.phase = "waiting"
        return call.steps, call.phase

    call.progress = progress
    with Watchdog() as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted):
            call.watched_by(dog)
    call.released.set()


def test_a_second_signal_changes_nothing_but_the_name():
    call = Call()
    call.released = call.asked_to_stop
    with Watchdog() as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert call.watched_by(dog) == "result"
        assert dog.stopped_by == "SIGINT"


def test_the_handlers_from_before_come_back():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with Watchdog():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_outside_of_the_main_thread_it_watches_without_signals():
    results = []

    def work():
        with Watchdog() as dog:
            call = {"progress": lambda: (0, ""), "interruptible": ()}
            results.append(dog.run(lambda: 5, **call))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_SECS)
    assert results == [5]


def test_a_stuck_step_is_reported_with_step_phase_and_stacks(capfd):
    call = Call("waiting for data")
    dog = Watchdog(stuck_after_secs=600, clock=clock(0.0, 0.0, 599.0, 601.0))
    message = (
        r"^step 7 was not finished within 600 s \(--stuck_after_secs\), "
        "while waiting for data$"
    )
    with pytest.raises(StuckError, match=message):
        call.watched_by(dog)
    call.released.set()
    stacks = capfd.readouterr().err
    assert "Thread" in stacks and "test_watchdog.py" in stacks


def test_every_finished_step_starts_the_clock_anew():
    call = Call()
    times = iter([0.0, 0.0, 599.0, 1198.0, 1797.0])

    def tick():
        now = next(times, None)
        if now is None:
            call.released.set()
            return 1797.0
        call.steps += 1
        return now

    assert call.watched_by(Watchdog(stuck_after_secs=600, clock=tick)) == "result"


def test_without_a_limit_nothing_is_stuck():
    call = Call()
    times = iter([0.0, 1e6, 2e6])

    def tick():
        now = next(times, None)
        if now is None:
            call.released.set()
            return 3e6
        return now

    assert call.watched_by(Watchdog(clock=tick)) == "result"


EARLY = """
import os, signal, sys
from towers import watchdog
watchdog.exit_on_signals()
class Output:  # as if the signal had cut into a print
    def flush(self): raise RuntimeError("reentrant call")
    def fileno(self): return 1
if sys.argv[2] == "printing":
    sys.stdout = Output()
os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("busy", ["idle", "printing"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_there_is_anything_to_save_a_signal_ends_the_process(number, busy):
    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(int(number)), busy],
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
    )
    assert done.returncode == 75
    assert done.stdout == (
        f"stopped by {number.name}, nothing to save; the same command continues\n"
    )
    assert done.stderr == ""


def test_a_signal_ends_the_process_even_if_nobody_reads_its_output():
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY, str(int(signal.SIGTERM)), "idle"],
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert process.communicate(timeout=WAIT_SECS)[1] == b""
    assert process.returncode == 75
