"""The watched worker: results, errors, signals, stuck steps; rows 12 and 15."""

import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from full_pipes import fill

from towers.errors import Preempted, StuckError
from towers.run import watchdog
from towers.run.watchdog import Watchdog

WAIT_SECS = 30  # for what should come at once


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


def watch(trainer, **kwargs):
    return Watchdog(trainer, ("waiting",), **kwargs)


def train(dog, trainer):
    """The function of a worker that trains."""
    with dog.training():
        return trainer.train()


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK_SECS", 0.01)


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(watchdog, "_GRACE_SECS", 0.15)


def clock(*times):
    """Reads these seconds one after the other; the last one stays."""
    return itertools.chain(times, itertools.repeat(times[-1])).__next__


def join_worker():
    for thread in threading.enumerate():
        if thread.name == "worker":
            thread.join(WAIT_SECS)
            assert not thread.is_alive()


def test_a_result_passes_through():
    assert Watchdog(Trainer()).run(divmod, 7, 2) == (3, 1)


def test_an_error_passes_through():
    with pytest.raises(ZeroDivisionError):
        Watchdog(Trainer()).run(divmod, 7, 0)


def test_the_function_runs_in_one_other_thread():
    thread = Watchdog(Trainer()).run(threading.current_thread)
    assert thread.name == "worker" and thread.daemon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_waiting_trainer_is_abandoned_after_the_grace(number, short_grace):
    trainer = Trainer("waiting")
    with watch(trainer) as dog:
        os.kill(os.getpid(), number)
        message = rf"^stopped by {number.name} while waiting$"
        with pytest.raises(Preempted, match=message):
            dog.run(train, dog, trainer)
        assert dog.stopped_by == number.name and dog.stop_requested
    assert trainer.asked_to_stop.is_set()
    trainer.released.set()


def test_a_trainer_that_returns_within_the_grace_gives_its_result():
    trainer = Trainer("waiting")
    trainer.released = trainer.asked_to_stop
    with watch(trainer) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        assert dog.run(train, dog, trainer) == "result"
        assert dog.stopped_by == "SIGTERM"


def test_a_computing_step_is_finished_and_a_long_one_announced_once(monkeypatch):
    monkeypatch.setattr(watchdog, "_PATIENCE_SECS", 0.15)
    trainer, lines = Trainer("computing"), []

    def say(line):
        lines.append(line)
        threading.Timer(0.4, trainer.released.set).start()

    with watch(trainer, say=say) as dog:
        os.kill(os.getpid(), signal.SIGINT)
        assert dog.run(train, dog, trainer) == "result"
    assert lines == ["SIGINT: step 7 is finished first"]


def test_a_long_save_is_announced_as_such_and_never_abandoned(monkeypatch, short_grace):
    monkeypatch.setattr(watchdog, "_PATIENCE_SECS", 0.3)
    trainer, lines = Trainer("idle"), []

    def save(dog):
        with dog.saving():
            return trainer.train()

    def say(line):
        lines.append(line)
        threading.Timer(0.4, trainer.released.set).start()

    with watch(trainer, say=say) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        assert dog.run(save, dog) == "result"
    assert lines == ["SIGTERM: saving is finished first"]


def test_a_trainer_that_turns_from_computing_to_waiting_is_abandoned_then(short_grace):
    trainer = Trainer("computing")

    def request_stop():
        trainer.activity = "waiting"

    trainer.request_stop = request_stop
    with watch(trainer) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted):
            dog.run(train, dog, trainer)
    trainer.released.set()


def test_a_state_that_is_read_for_a_checkpoint_is_never_abandoned(short_grace):
    trainer = Trainer("waiting")
    times = iter(range(8))

    def tick():
        now = next(times, None)
        if now is None:
            trainer.released.set()
            return 8
        return now

    def save(dog):
        with dog.saving():
            return trainer.train()

    with watch(trainer, say=lambda line: None, clock=tick) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        assert dog.run(save, dog) == "result"


@pytest.mark.row(12)
def test_outside_of_an_activity_the_worker_is_announced_and_never_abandoned():
    """Row 12: it may be in the middle of what the run reports."""
    trainer, lines = Trainer("waiting"), []

    def say(line):
        lines.append(line)
        trainer.released.set()

    with watch(trainer, say=say, clock=clock(0, 0, 1000)) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        assert dog.run(trainer.train) == "result"
    assert lines == [
        "SIGTERM: what follows step 6, such as its reports, is finished first"
    ]


@pytest.mark.row(15)
def test_outside_of_an_activity_the_worker_may_be_stuck():
    trainer = Trainer()
    dog = watch(trainer, stuck_after_secs=600, clock=clock(0, 0, 599, 601))
    with pytest.raises(StuckError, match="^what follows step 6.* not finished within"):
        dog.run(trainer.train)
    trainer.released.set()


# Abandoned workers.


def evaluate(dog, released, touched):
    with dog.activity("evaluating"):
        assert released.wait(WAIT_SECS)
    touched.append("the record")


def test_an_abandoned_worker_ends_where_it_leaves_its_activity():
    released, touched = threading.Event(), []
    with Watchdog(Trainer(), clock=clock(0, 0, 1000)) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted, match="^stopped by SIGTERM while evaluating$"):
            dog.run(evaluate, dog, released, touched)
        # The next worker is not affected, nor does it revive the first.
        assert dog.run(divmod, 7, 2) == (3, 1)
        released.set()
        join_worker()
    assert touched == []


def test_an_abandoned_evaluation_ends_at_its_next_batch():
    batches, released = [], threading.Event()

    def evaluate_batches(dog):
        with dog.activity("evaluating") as beat:
            for batch in range(3):
                batches.append(batch)
                assert released.wait(WAIT_SECS)
                beat()

    with Watchdog(Trainer(), clock=clock(0, 0, 1000)) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted):
            dog.run(evaluate_batches, dog)
        released.set()
        join_worker()
    assert batches == [0]


def test_an_activity_is_not_left_while_it_is_being_abandoned():
    """The trainer returns just while the main thread decides to abandon it."""
    trainer, touched = Trainer("waiting"), threading.Event()

    def train_and_write(dog):
        train(dog, trainer)
        touched.set()

    calls = itertools.count()

    def progress():
        if next(calls) == 1:  # the grace period is over
            trainer.released.set()
            assert not touched.wait(0.2)
        return 6, "waiting"

    trainer.progress = progress
    with watch(trainer, clock=clock(0, 0, 1000)) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted):
            dog.run(train_and_write, dog)
        join_worker()
    assert trainer.steps == 7 and not touched.is_set()


def test_a_worker_that_has_left_its_activity_is_not_abandoned():
    left, released, returned = (threading.Event() for _ in range(3))
    times = iter([0, 0])

    def tick():
        now = next(times, None)
        if now is None:  # the grace period is over just when the activity is
            released.set()
            assert left.wait(WAIT_SECS)
            returned.set()
            return 1000
        return now

    def evaluate_and_write(dog):
        with dog.activity("evaluating"):
            assert released.wait(WAIT_SECS)
        left.set()
        assert returned.wait(WAIT_SECS)
        return "written"

    with Watchdog(Trainer(), clock=tick) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        assert dog.run(evaluate_and_write, dog) == "written"


def test_a_stuck_worker_ends_as_well_once_it_goes_on():
    released, touched = threading.Event(), []
    dog = Watchdog(Trainer(), stuck_after_secs=600, clock=clock(0, 0, 601))
    with pytest.raises(StuckError, match="^step 7 .* while evaluating$"):
        dog.run(evaluate, dog, released, touched)
    released.set()
    join_worker()
    assert touched == []


# Signals.


def test_a_second_signal_changes_nothing_but_the_name():
    trainer = Trainer()
    trainer.released = trainer.asked_to_stop
    with watch(trainer) as dog:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert dog.run(train, dog, trainer) == "result"
        assert dog.stopped_by == "SIGINT"


def test_the_handlers_from_before_are_restored():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with Watchdog(Trainer()):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_outside_of_the_main_thread_it_watches_without_signals():
    before, results = signal.getsignal(signal.SIGTERM), []

    def work():
        with Watchdog(Trainer()) as dog:
            assert signal.getsignal(signal.SIGTERM) is before
            results.append(dog.run(divmod, 7, 2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_SECS)
    assert results == [(3, 1)]


# Stuck steps.


def test_a_stuck_step_is_reported_with_step_activity_and_stacks(capfd):
    trainer = Trainer("waiting for data")
    dog = watch(trainer, stuck_after_secs=600, clock=clock(0.0, 0.0, 599.0, 601.0))
    message = (
        r"^step 7 was not finished within 600 s \(--stuck_after_secs\), "
        "while waiting for data$"
    )
    with pytest.raises(StuckError, match=message):
        dog.run(train, dog, trainer)
    trainer.released.set()
    stacks = capfd.readouterr().err
    assert "Thread" in stacks and "test_watchdog.py" in stacks


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_a_stuck_step_is_reported_without_a_file_for_the_stacks(monkeypatch, stderr):
    trainer = Trainer()
    dog = watch(trainer, stuck_after_secs=600, clock=clock(0.0, 0.0, 601.0))
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(StuckError):
        dog.run(train, dog, trainer)
    trainer.released.set()


def test_every_finished_step_restarts_the_clock():
    trainer = Trainer()
    times = iter([0.0, 0.0, 599.0, 1198.0, 1797.0])

    def tick():
        now = next(times, None)
        if now is None:
            trainer.released.set()
            return 1797.0
        trainer.steps += 1
        return now

    dog = watch(trainer, stuck_after_secs=600, clock=tick)
    assert dog.run(train, dog, trainer) == "result"


def test_every_evaluated_batch_restarts_the_clock():
    turns = [threading.Event() for _ in range(3)]
    beats = threading.Semaphore(0)
    times = iter([599.0, 1198.0, 1797.0])

    def evaluate_batches(dog):
        with dog.activity("evaluating") as beat:
            for turn in turns:
                assert turn.wait(WAIT_SECS)
                beat()
                beats.release()

    waiting = iter(turns)

    def tick():
        turn = next(waiting, None)
        if turn is None:
            return 1797.0
        turn.set()
        assert beats.acquire(timeout=WAIT_SECS)
        return next(times)

    dog = Watchdog(Trainer(), stuck_after_secs=600, clock=tick)
    dog.run(evaluate_batches, dog)


def test_without_a_limit_nothing_is_stuck():
    trainer = Trainer()
    times = iter([0.0, 1e6, 2e6])

    def tick():
        now = next(times, None)
        if now is None:
            trainer.released.set()
            return 3e6
        return now

    dog = watch(trainer, clock=tick)
    assert dog.run(train, dog, trainer) == "result"


PAUSED = """
import sys
from towers.run.watchdog import Watchdog
class Trainer:
    def progress(self): return 6, "computing"
dog = Watchdog(Trainer(), stuck_after_secs=2.5)
def train():
    with dog.training():
        print("computing", flush=True)
        sys.stdin.readline()
dog.run(train)
"""


@pytest.mark.row(15)
def test_row_15_a_process_that_was_paused_goes_on():
    """As by Ctrl-Z, or by `docker pause`."""
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    for number, secs in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.5)):
        time.sleep(0.5)  # in which it looks at the clock
        process.send_signal(number)
        time.sleep(secs)
    _, errors = process.communicate(b"\n", timeout=WAIT_SECS)
    assert process.returncode == 0, errors


def test_the_time_between_two_ticks_counts_and_a_pause_does_not():
    awake = watchdog.AwakeClock(clock(5.0, 5.1, 5.9, 3605.9, 3606.0))
    assert [awake() for _ in range(4)] == pytest.approx([0.1, 0.9, 1.9, 2.0])


# Before there is a watchdog.

EARLY = """
import os, signal, sys
from towers.run import signals
signals.exit_on_signals()
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


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.row(12)
def test_row_12_a_closed_terminal_is_a_signal_unless_it_is_ignored(is_ignored):
    former = "SIG_IGN" if is_ignored else "SIG_DFL"
    script = f"import signal; signal.signal(signal.SIGHUP, signal.{former})\n{EARLY}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(int(signal.SIGHUP)), "idle"],
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
    )
    assert (done.returncode, done.stderr) == (0 if is_ignored else 75, "")
    assert done.stdout.startswith("stopped by SIGHUP, ") != is_ignored


@pytest.mark.parametrize("output", ["closed", "full"])
@pytest.mark.row(39)
def test_a_signal_ends_the_process_even_if_nobody_reads_its_output(output):
    reader, writer = os.pipe()
    if output == "closed":
        os.close(reader)
    else:
        fill(writer)
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY, str(int(signal.SIGTERM)), "idle"],
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert process.communicate(timeout=WAIT_SECS)[1] == b""
    assert process.returncode == 75
