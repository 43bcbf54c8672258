"""Jobs run one at a time, next to their owner, and their errors are not lost."""

import threading

import pytest

from towers.errors import CheckpointError
from towers.threads import Background


def fail():
    raise CheckpointError("the disk is full")


def test_the_owner_goes_on_and_the_next_job_waits():
    done, may_end = [], threading.Event()

    def slow_job():
        assert may_end.wait(30)
        done.append("first")

    with Background() as background:
        background.submit(slow_job)
        background.raise_job_error()  # waits for nothing
        assert done == []
        threading.Timer(0.05, may_end.set).start()
        background.submit(lambda: done.append("second"))
        assert done[0] == "first"
        background.wait()
        assert done == ["first", "second"]


@pytest.mark.parametrize("call", ["submit", "wait", "raise_job_error", "leave"])
def test_an_error_is_raised_by_the_next_call_and_once(call):
    failed, begun = threading.Event(), []

    def fail_and_say():
        try:
            fail()
        finally:
            failed.set()

    with pytest.raises(CheckpointError, match="disk is full"):
        with Background() as background:
            background.submit(fail_and_say)
            assert failed.wait(30)
            if call == "raise_job_error":
                while True:  # the thread has a little to do after the job
                    background.raise_job_error()
            elif call == "submit":
                background.submit(lambda: begun.append(True))
            elif call == "wait":
                background.wait()
    background.wait()
    assert begun == ([True] if call == "submit" else [])


def test_an_error_at_the_end_does_not_hide_why_it_ends(capsys):
    with pytest.raises(KeyError, match="the reason"), Background() as background:
        background.submit(fail)
        raise KeyError("the reason")
    assert capsys.readouterr().out == "the disk is full\n"


def test_a_job_that_never_ends_does_not_hold_up_an_error(monkeypatch):
    monkeypatch.setattr("towers.threads._LATE_SECS", 0.05)
    released = threading.Event()
    with pytest.raises(KeyError, match="the reason"), Background() as background:
        background.submit(released.wait)
        raise KeyError("the reason")
    released.set()
