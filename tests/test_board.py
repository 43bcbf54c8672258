"""TensorBoard's files, read back by TensorBoard's own reader."""

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers.run.board import Board, image_grid


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
