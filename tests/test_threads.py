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

    def use(background):
        with background:
            background.submit(fail_and_say)
            assert failed.wait(30)
            while call == "raise_job_error":  # the thread has a little left to do
                background.raise_job_error()
            if call == "submit":
                background.submit(lambda: begun.append(True))
            elif call == "wait":
                background.wait()

    background = Background()
    with pytest.raises(CheckpointError, match="disk is full"):
        use(background)
    background.wait()
    assert begun == ([True] if call == "submit" else [])


@pytest.mark.parametrize("ends", [True, False])
def test_a_job_neither_hides_an_error_nor_holds_it_up(ends, capsys, monkeypatch):
    monkeypatch.setattr("towers.threads._LATE_SECS", 30 if ends else 0.05)
    released = threading.Event()

    def use():
        with Background() as background:
            background.submit(fail if ends else released.wait)
            raise KeyError("the reason")

    with pytest.raises(KeyError, match="the reason"):
        use()
    released.set()
    assert capsys.readouterr().out == ("the disk is full\n" if ends else "")
