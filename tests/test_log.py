"""The lines that a run prints."""

import pytest

from towers.run.log import duration, log_line


@pytest.mark.parametrize(
    "secs,words",
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_durations_are_words(secs, words):
    assert duration(secs) == words


def test_the_log_line_says_where_the_run_stands():
    record = {"step": 400, "epoch": 1.024, "loss": 1.23456, "learning_rate": 0.05}
    timed = {"images_per_sec": 12345.6, "input_wait_percent": 3.14159}
    assert log_line(record | timed, 1600, 100.0, 2.5) == (
        "step 400/1600 (25.0%)  epoch 1.02  loss 1.2346  learning rate 0.05  "
        "12,346 images/s  input wait 3.1%  12 s left"
    )


def test_the_log_line_counts_the_skipped_steps_where_there_may_be_some():
    record = {"step": 1, "epoch": 0.01, "loss": float("nan"), "learning_rate": 0.5}
    line = log_line(record | {"skipped_steps": 3}, 1000, None, 12.34)
    assert "loss nan  learning rate 0.5  skipped steps 3  first step" in line
    assert "skipped" not in log_line(record, 1000, None, 12.34)


def test_the_log_line_names_no_speed_before_one_is_known():
    record = {"step": 1, "epoch": 0.01, "loss": 2.3, "learning_rate": 1e-5}
    line = log_line(record, 1000, None, 12.34)
    assert line.startswith("step 1/1000 (0.1%)") and "1e-05" in line
    assert line.endswith("  first step, with tracing and compiling: 12.3 s")
    assert "images/s" not in line and "left" not in line
