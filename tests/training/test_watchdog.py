"""The watched worker: results, errors, signals, stuck steps."""

import itertools
import os
import signal
import threading

import pytest

from towers import console
from towers.errors import Preempted, StuckError
from towers.training import watchdog
from towers.training.watchdog import Watchdog

WAIT_SECS = 30  # for what should come at once
LATE = 0, 0, 1000  # seconds: any time that a worker is given is over


class Trainer:
    """A trainer in its seventh step, which goes on until it is released."""

    def __init__(self, activity="computing"):
        self.released, self.asked_to_stop = threading.Event(), threading.Event()
        self.steps, self.activity = 6, activity

    def train(self):
        assert self.released.wait(WAIT_SECS)
        self.steps += 1
        return "result"

    def progress(self):
        return self.steps, self.activity

    def request_stop(self):
        self.asked_to_stop.set()


def watch(trainer, *times, **kwargs):
    """A watchdog whose clock reads some seconds one after the other."""
    if times:
        kwargs["clock"] = itertools.chain(times, itertools.repeat(times[-1])).__next__
    return Watchdog(trainer, ("waiting",), **kwargs)


def train(dog, trainer):
    """The function of a worker that trains."""
    with dog.training():
        return trainer.train()


def save(dog, trainer):
    with dog.saving():
        return trainer.train()


def report(dog, trainer):
    return trainer.train()


def evaluate(dog, trainer):
    with dog.activity("evaluating"):
        trainer.train()
    trainer.steps = "written"


def evaluate_batches(dog, trainer):
    with dog.activity("evaluating") as beat:
        trainer.train()
        beat()
        trainer.steps = "written"


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK_SECS", 0.01)


# Signals.


@pytest.mark.row(12)
def test_row_12_a_waiting_trainer_is_abandoned_after_the_grace():
    trainer = Trainer("computing")

    def request_stop():
        trainer.asked_to_stop.set()
        trainer.activity = "waiting"

    trainer.request_stop = request_stop
    with watch(trainer, *LATE) as dog:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Preempted, match=r"^stopped by SIGINT while waiting"):
            dog.call(train, dog, trainer)
        assert dog.stopped_by == "SIGINT" and dog.stop_requested
    assert trainer.asked_to_stop.is_set()
    trainer.released.set()


@pytest.mark.row(12)
def test_row_12_a_trainer_that_returns_gives_its_result_after_two_signals():
    trainer = Trainer("waiting")
    trainer.released = trainer.asked_to_stop
    with watch(trainer) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert dog.call(train, dog, trainer) == "result"
        assert dog.stopped_by == "SIGINT"


@pytest.mark.parametrize(
    "work,activity,what",
    [
        (train, "computing", "step 7"),
        (save, "waiting", "saving"),
        (report, "waiting", "the report after step 6"),
    ],
)
@pytest.mark.row(12)
def test_row_12_what_must_be_finished_is_announced_once_and_never_abandoned(
    monkeypatch, work, activity, what
):
    trainer, lines = Trainer(activity), []

    def line(text):
        lines.append(text)
        threading.Timer(0.1, trainer.released.set).start()

    monkeypatch.setattr(console, "line", line)
    with watch(trainer, *LATE) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        assert dog.call(work, dog, trainer) == "result"
    assert lines == [f"SIGTERM: {what} is finished first"]


# Abandoned workers.


@pytest.mark.parametrize("work", [evaluate, evaluate_batches])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_an_abandoned_worker_ends_where_it_leaves_its_activity_or_reports_progress(
    work, is_stopped, join_worker
):
    trainer = Trainer()
    with watch(trainer, *LATE, stuck_after_secs=0 if is_stopped else 600) as dog:
        if is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises((Preempted, StuckError), match=r" while evaluating$"):
            dog.call(work, dog, trainer)
        # The next worker is not affected, nor does it revive the first.
        assert dog.call(divmod, 7, 2) == (3, 1)
        trainer.released.set()
    join_worker()
    assert trainer.steps == 7


# Stuck steps.


@pytest.mark.parametrize(
    "work,message",
    [
        (train, r"step 7 was not .* 600 s \(--stuck_after_secs\), while computing$"),
        (save, r"saving was not .* \(--stuck_after_secs\)$"),
        (report, "the report after step 6 was not finished"),
    ],
)
@pytest.mark.row(15)
def test_row_15_a_stuck_worker_is_reported_with_stacks(capfd, work, message):
    trainer = Trainer()
    dog = watch(trainer, 0, 0, 599, 601, stuck_after_secs=600)
    with pytest.raises(StuckError, match=f"^{message}"):
        dog.call(work, dog, trainer)
    trainer.released.set()
    stacks = capfd.readouterr().err
    assert "most recent call first" in stacks and "test_watchdog.py" in stacks


def test_every_finished_step_restarts_the_clock_and_without_one_nothing_is_stuck():
    for stuck_after_secs, secs_per_step, num_steps in ((600, 599, 1), (0, 1e6, 0)):
        trainer, now = Trainer(), itertools.count(step=secs_per_step)

        def tick(trainer=trainer, now=now, num_steps=num_steps):
            secs = next(now)
            trainer.steps += num_steps
            if secs > 1700:
                trainer.released.set()
            return secs

        dog = watch(trainer, clock=tick, stuck_after_secs=stuck_after_secs)
        assert dog.call(train, dog, trainer) == "result"


@pytest.mark.row(15)
def test_row_15_the_time_between_two_ticks_counts_and_a_pause_does_not():
    """As by Ctrl-Z, or by `docker pause`."""
    times = iter([5.0, 5.1, 5.9, 3605.9, 3606.0])
    awake = watchdog.AwakeClock(times.__next__)
    assert [awake() for _ in range(4)] == pytest.approx([0.1, 0.9, 1.9, 2.0])
