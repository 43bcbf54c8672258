"""`metrics.jsonl` (row 32)."""

import json
import sys
import threading

import numpy as np

from towers.run.metrics import MetricsFile, read_metrics


def append_all(metrics, steps):
    for step in steps:
        metrics.append({"step": step, "loss": 1 / step})


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_record_is_a_line_of_plain_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = {
        "step": np.int64(3),
        "loss": np.float32(0.5),
        "tower_losses": np.array([0.25, 0.75], np.float32),
        "test": {"accuracy": np.float64(0.1)},
        "note": "two\nlines",
    }
    MetricsFile(path, 0).append(record)
    assert path.read_text().count("\n") == 1
    assert json.loads(path.read_text()) == {
        "step": 3,
        "loss": 0.5,
        "tower_losses": [0.25, 0.75],
        "test": {"accuracy": 0.1},
        "note": "two\nlines",
    }


def test_a_record_is_on_disk_when_append_returns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in (1, 2, 3):
        metrics.append({"step": step})
        assert steps_in(path) == list(range(1, step + 1))


def test_a_resumed_run_drops_the_steps_it_takes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10, 20, 30])
    before = path.read_text().splitlines()
    resumed = MetricsFile(path, resume_step=20)
    resumed.flush()
    assert path.read_text().splitlines() == before[:3]
    append_all(resumed, [30, 40])
    assert steps_in(path) == [1, 10, 20, 30, 40]


def test_a_run_from_the_start_drops_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10])
    append_all(MetricsFile(path, resume_step=0), [1])
    assert steps_in(path) == [1]


def test_a_line_torn_anywhere_is_dropped_and_the_steps_strictly_increase(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10, 20])
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for length in range(last, len(whole) + 1):
        path.write_bytes(whole[:length])
        # Without its line break the last record is whole, though its line is not.
        survives = length >= len(whole) - 1
        append_all(MetricsFile(path, resume_step=20), [30])
        assert steps_in(path) == ([1, 10, 20, 30] if survives else [1, 10, 30])


def test_zeros_that_a_power_cut_left_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_all(MetricsFile(path, 0), [1, 10])
    with open(path, "ab") as file:
        file.write(bytes(100))
    assert [record["step"] for record in read_metrics(path)[0]] == [1, 10]
    append_all(MetricsFile(path, resume_step=10), [20])
    assert steps_in(path) == [1, 10, 20]


def test_numbers_come_back_as_they_were(tmp_path):
    path = tmp_path / "metrics.jsonl"
    loss = 0.1 + 0.2
    MetricsFile(path, 0).append({"step": 1, "loss": loss})
    MetricsFile(path, resume_step=1).flush()
    assert read_metrics(path)[0] == [{"step": 1, "loss": loss}]


def test_one_thread_appends_while_another_one_flushes(tmp_path):
    """As a checkpoint does, which is written in the background."""
    path, is_done = tmp_path / "metrics.jsonl", threading.Event()
    metrics = MetricsFile(path, 0)
    metrics.flush()

    def flush():
        while not is_done.is_set():
            metrics.flush()

    thread = threading.Thread(target=flush)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        append_all(metrics, range(1, 2001))
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert steps_in(path) == list(range(1, 2001))
