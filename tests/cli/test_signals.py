"""Runs that a signal stops, or that hang."""

import dataclasses
import faulthandler
import functools
import os
import signal
import threading
import time

import pytest
from marks import slow
from small_runs import (
    assert_equal_states,
    every_strategy,
    halt_at,
    records,
    saved_steps,
    small_config,
    snapshot,
    uninterrupted,
)

from towers import signals
from towers.errors import Preempted, StuckError
from towers.parallel.loop import ACTIVITIES, COMPUTING, IDLE, WAITING
from towers.training import watchdog
from towers.training.outputs import settled_state
from towers.training.train import train
from towers.training.watchdog import Watchdog

WAIT_SECS = 30  # for what should come at once
EVALUATED = {"eval_every_epochs": 1.0}


pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(autouse=True)
def terminal():
    """As if the tests had one: `nohup` and some services ignore that it is closed."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


# Row 12: signals.


class Halt:
    """Sends a signal in the middle of a run, at the n-th call, and holds the run there.

    Args:
        number: of the signal, sent twice: a second one must be harmless.
        nth: number of the call.
        hold: whether the run waits there until it is released.
        ready: is waited for before the signal is sent.
    """

    def __init__(self, number, nth=1, hold=True, ready=lambda: True):
        self._number, self._nth, self._hold, self._ready = number, nth, hold, ready
        self._lock, self._times = threading.Lock(), 0
        self.released, self.held_since = threading.Event(), None

    def __call__(self):
        with self._lock:
            self._times += 1
            times = self._times
        if times == self._nth:
            patience = time.monotonic() + WAIT_SECS
            while not self._ready():
                assert time.monotonic() < patience
                time.sleep(0.01)
            os.kill(os.getpid(), self._number)
            os.kill(os.getpid(), self._number)
        if self._hold and times >= self._nth:
            self.held_since = self.held_since or time.monotonic()
            assert self.released.wait(WAIT_SECS)


def num_records(workdir):
    path = workdir / "metrics.jsonl"
    return len(records(workdir)) if path.exists() else 0


@pytest.fixture
def train_and_halt(join_worker):
    """Trains until the signal of `halt` has stopped it; returns the message.

    A worker that was abandoned does not touch the run any more when it goes on.
    """

    def train_and_halt(config, workdir, place, halt):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watchdog, "_GRACE_SECS", 0.1)
            halt_at(patch, place, halt)
            with pytest.raises(Preempted) as caught:
                train(workdir, config)
            before = snapshot(workdir)
            halt.released.set()
            join_worker()
            assert snapshot(workdir) == before
        return str(caught.value)

    return train_and_halt


@pytest.mark.parametrize(
    "place,nth,hold,steps,number",
    [
        slow("tracing", 1, True, [], signal.SIGTERM),
        ("computing", 4, False, [4, 5], signal.SIGTERM),
        slow("computing", 4, False, [4, 5], signal.SIGHUP),
        ("computing", 4, False, [4, 5], signal.SIGUSR1),
        slow("evaluating", 1, True, [5], signal.SIGUSR2),
        slow("waiting", 6, True, [3, 4, 5], signal.SIGTERM),  # batches are read ahead
        slow("drawing", 1, True, [4], signal.SIGTERM),
        ("evaluating", 1, True, [5], signal.SIGINT),
        slow("saving", 1, False, [3], signal.SIGTERM),
    ],
)
@pytest.mark.row(12)
def test_row_12_a_signal_saves_and_the_same_command_continues(
    train_and_halt, tmp_path, place, nth, hold, steps, number
):
    assert_saves_and_continues(
        train_and_halt, tmp_path, place, nth, hold, steps, number
    )


def assert_saves_and_continues(
    train_and_halt, tmp_path, place, nth, hold, steps, number, **strategy
):
    config = small_config(**EVALUATED, log_every_steps=1, **strategy)
    expected = uninterrupted(config)
    if place == "saving":
        config = dataclasses.replace(config, checkpoint_every_steps=3)
    if place == "drawing":
        config = dataclasses.replace(config, summary_every_steps=4)
    halt = Halt(number, nth, hold)
    if place == "waiting":
        halt = Halt(number, nth, hold, lambda: num_records(tmp_path) >= 3)

    message = train_and_halt(config, tmp_path, place, halt)
    assert message.startswith(f"stopped by {number.name}: ")
    assert message.endswith("; the same command continues")
    if steps:
        first, *others = saved_steps(tmp_path)
        assert first in steps
        # Training goes on while a checkpoint is written.
        assert bool(others) == (place == "saving")
        step = others[-1] if others else first
        assert f"step {step} of 10 is saved in {tmp_path}" in message
    else:
        assert saved_steps(tmp_path) == []
        assert "no step was taken" in message

    assert_equal_states(train(tmp_path, config).state, expected.state)
    assert records(tmp_path) == expected.records


@pytest.mark.row(12)
def test_row_12_a_signal_that_the_program_handles_itself_is_left_to_it(tmp_path):
    """As submitit has its SIGUSR2, and others print stacks by faulthandler."""
    received = []
    stacks = (tmp_path / "stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    former = signal.signal(signal.SIGUSR2, lambda *_: received.append("program"))
    try:
        handlers = signals.catch(lambda number, _: received.append(number))
        inner = signals.catch(lambda number, _: received.append(-number))
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)
        signals.restore(inner)
        os.kill(os.getpid(), signal.SIGTERM)
        signals.restore(handlers)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        stacks.close()
        signal.signal(signal.SIGUSR2, former)
    assert received == ["program", -signal.SIGTERM, signal.SIGTERM]
    assert "most recent call first" in (tmp_path / "stacks").read_text()


class StepBegun:
    """A trainer whose waiting call gets its data just after a signal."""

    def __init__(self):
        self._phases = iter([WAITING, COMPUTING, COMPUTING, COMPUTING])
        self._tensors = iter(["before", "torn", "torn", "after"])

    def progress(self):
        return 3, ACTIVITIES[next(self._phases, IDLE)]

    def state(self):
        return next(self._tensors)


def test_row_12_a_step_that_begins_after_all_is_finished_before_the_save():
    assert settled_state(StepBegun()) == "after"


def hurry_while_held(monkeypatch, halt):
    """Every second that the run is held counts for three hours."""

    def clock():
        now = time.monotonic()
        return now + 1e4 * (now - (halt.held_since or now))

    monkeypatch.setattr(
        "towers.training.run.Watchdog", functools.partial(Watchdog, clock=clock)
    )


@every_strategy
@pytest.mark.row(15)
def test_row_15_a_step_that_does_not_end_is_reported(
    half_way, monkeypatch, capfd, strategy, join_worker
):
    # The first call of a run has six times as long.
    secs, what = "6 x 600", "computing the first steps"
    if "async_towers" in strategy.values():
        secs, what = "600", r"computing \(tower 0\)"
    before = saved_steps(half_way)
    halt = Halt(signal.SIGCONT)  # which has no effect
    hurry_while_held(monkeypatch, halt)
    with pytest.MonkeyPatch.context() as patch:
        halt_at(patch, "computing", halt)
        message = rf"^step 6 was not finished within {secs} s .*, while {what}$"
        with pytest.raises(StuckError, match=message):
            train(half_way, small_config(**strategy))
        halt.released.set()
        join_worker()
    assert saved_steps(half_way) == before
    assert "most recent call first" in capfd.readouterr().err


@pytest.mark.parametrize("every_steps", [4, slow(10)])
@pytest.mark.row(15)
def test_row_15_a_save_that_does_not_end_is_reported(
    tmp_path, monkeypatch, every_steps, join_worker
):
    """It is waited for by the next save, or at the end."""
    monkeypatch.setattr("towers.threads._LATE_SECS", 0.1)
    halt = Halt(signal.SIGCONT)  # which has no effect
    hurry_while_held(monkeypatch, halt)
    with pytest.MonkeyPatch.context() as patch:
        halt_at(patch, "saving", halt)
        message = r"^saving was not finished within 600 s \(--stuck_after_secs\)$"
        with pytest.raises(StuckError, match=message):
            train(tmp_path, small_config(checkpoint_every_steps=every_steps))
        halt.released.set()
        join_worker()
