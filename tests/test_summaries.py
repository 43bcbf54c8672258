"""Reports of a run, read back by TensorBoard's and Python's readers (row 32)."""

import json

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers.run.summaries import (
    Board,
    MetricsFile,
    duration,
    image_grid,
    log_line,
    read_metrics,
)

# Lines.


@pytest.mark.parametrize(
    "secs,words",
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (41.6, "42 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
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
    record = {"step": 1, "epoch": 0.01, "loss": np.nan, "learning_rate": 0.5}
    line = log_line(record | {"skipped_steps": 3}, 1000, None, 12.34)
    assert "loss nan  learning rate 0.5  skipped steps 3  first step" in line
    assert "skipped" not in log_line(record, 1000, None, 12.34)


def test_the_log_line_names_no_speed_before_one_is_known():
    record = {"step": 1, "epoch": 0.01, "loss": 2.3, "learning_rate": 1e-5}
    line = log_line(record, 1000, None, 12.34)
    assert line.startswith("step 1/1000 (0.1%)") and "1e-05" in line
    assert line.endswith("  first step, with tracing and compiling: 12.3 s")
    assert "images/s" not in line and "left" not in line


# metrics.jsonl


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
    assert [record["step"] for record in read_metrics(path)] == [1, 10]
    append_all(MetricsFile(path, resume_step=10), [20])
    assert steps_in(path) == [1, 10, 20]


def test_numbers_come_back_as_they_were(tmp_path):
    path = tmp_path / "metrics.jsonl"
    loss = 0.1 + 0.2
    MetricsFile(path, 0).append({"step": 1, "loss": loss})
    MetricsFile(path, resume_step=1)
    assert read_metrics(path) == [{"step": 1, "loss": loss}]


# TensorBoard.


def read_board(folder, kind):
    """tag -> [(step, array)], through TensorBoard's own reader."""
    events = EventAccumulator(str(folder / kind), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [(e.step, tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def test_scalars_can_be_read_at_once_and_vectors_have_a_curve_per_tower(tmp_path):
    board = Board(tmp_path, "train")
    board.scalars(10, {"loss": 0.5, "tower_losses": np.array([0.25, 0.75])})
    board.scalars(20, {"loss": np.float32(0.25)})
    board = read_board(tmp_path, "train")
    assert board == {
        "loss": [(10, 0.5), (20, 0.25)],
        "tower_losses/tower_0": [(10, 0.25)],
        "tower_losses/tower_1": [(10, 0.75)],
    }


def test_training_and_evaluation_are_different_curves(tmp_path):
    Board(tmp_path, "train").scalars(1, {"accuracy": 0.5})
    Board(tmp_path, "eval").scalars(1, {"accuracy": 0.25})
    assert read_board(tmp_path, "train") == {"accuracy": [(1, 0.5)]}
    assert read_board(tmp_path, "eval") == {"accuracy": [(1, 0.25)]}


def test_histograms_count_every_element_at_once(tmp_path):
    kernel = np.random.default_rng(0).normal(size=(5, 5, 3, 4)).astype(np.float32)
    board = Board(tmp_path, "train")
    board.histograms(7, {"conv1/kernel": kernel, "conv1/bias": tf.zeros(4)}, "params")
    # A run may end without a chance to close the file.
    board = read_board(tmp_path, "train")
    assert set(board) == {"params/conv1/kernel", "params/conv1/bias"}
    ((step, buckets),) = board["params/conv1/kernel"]
    assert step == 7
    assert buckets[:, 2].sum() == kernel.size
    assert buckets[0, 0] == pytest.approx(kernel.min())
    assert buckets[-1, 1] == pytest.approx(kernel.max())


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_one_picture_that_can_be_read_at_once(tmp_path, channels):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(5, 8, 6, channels)).astype(np.float32)
    board = Board(tmp_path, "train")
    board.images(3, tf.constant(images), "next_batch")
    ((step, (width, height, png)),) = read_board(tmp_path, "train")["next_batch"]
    assert (step, int(width), int(height)) == (3, 3 * 6, 2 * 8)
    pixels = tf.io.decode_png(png).numpy()
    assert pixels.shape == (16, 18, channels)
    np.testing.assert_allclose(pixels / 255, image_grid(images), atol=1 / 255)


# Grids.


@pytest.mark.parametrize(
    "n,rows,columns", [(1, 1, 1), (2, 1, 2), (7, 3, 3), (64, 8, 8)]
)
def test_a_grid_is_nearly_square_and_reads_from_left_to_right(n, rows, columns):
    rng = np.random.default_rng(n)
    images = rng.random((n, 4, 5, 3))
    # Every image already spans its whole range.
    images[:, 0, 0, 0], images[:, 0, 0, 1] = 0, 1
    grid = image_grid(images)
    assert grid.shape == (rows * 4, columns * 5, 3) and grid.dtype == np.float32
    for place in range(rows * columns):
        top, left = place // columns * 4, place % columns * 5
        expected = images[place] if place < n else np.zeros((4, 5, 3))
        cell = grid[top : top + 4, left : left + 5]
        np.testing.assert_allclose(cell, expected, atol=1e-6)


def test_each_image_of_a_grid_is_stretched_to_its_own_range():
    images = np.stack([np.linspace(-3, 5, 16), np.linspace(0.1, 0.2, 16)])
    grid = image_grid(images.reshape(2, 4, 4, 1))
    ramp = np.linspace(0, 1, 16).reshape(4, 4, 1)
    np.testing.assert_allclose(grid, np.concatenate([ramp, ramp], 1), atol=1e-5)


def test_an_image_of_one_colour_is_no_division_by_zero():
    np.testing.assert_array_equal(image_grid(np.full((1, 2, 2, 3), 7.0)), 0)


def test_a_grid_shows_only_the_first_images():
    images = np.random.default_rng(0).random((100, 2, 2, 3))
    np.testing.assert_array_equal(image_grid(images), image_grid(images[:64]))
    np.testing.assert_array_equal(image_grid(images, most=4), image_grid(images[:4]))
