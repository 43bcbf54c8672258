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
    Board(tmp_path, "eval").scalars(1, {"loss": 0.75})
    assert read_board(tmp_path, "train") == {
        "loss": [(10, 0.5), (20, 0.25)],
        "tower_losses/tower_0": [(10, 0.25)],
        "tower_losses/tower_1": [(10, 0.75)],
    }
    assert read_board(tmp_path, "eval") == {"loss": [(1, 0.75)]}


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


def test_images_are_one_picture_that_can_be_read_at_once(tmp_path):
    for channels in (1, 3):
        images = np.random.default_rng(0).normal(size=(5, 8, 6, channels))
        board = Board(tmp_path, f"of_{channels}")
        board.images(3, tf.constant(images, tf.float32), "next_batch")
        curves = read_board(tmp_path, f"of_{channels}")
        ((step, (width, height, png)),) = curves["next_batch"]
        assert (step, int(width), int(height)) == (3, 3 * 6, 2 * 8)
        pixels = tf.io.decode_png(png).numpy()
        assert pixels.shape == (16, 18, channels)
        np.testing.assert_allclose(pixels / 255, image_grid(images), atol=1 / 255)


@pytest.mark.parametrize(
    "n,rows,columns", [(1, 1, 1), (2, 1, 2), (7, 3, 3), (100, 8, 8)]
)
def test_a_grid_is_nearly_square_of_the_first_64_images(n, rows, columns):
    """From left to right, each image stretched to its own range."""
    images = np.random.default_rng(n).normal(size=(n, 4, 5, 3))
    grid = image_grid(images)
    assert grid.shape == (rows * 4, columns * 5, 3) and grid.dtype == np.float32
    for place in range(rows * columns):
        top, left = place // columns * 4, place % columns * 5
        expected = np.zeros((4, 5, 3))
        if place < n:
            low, high = images[place].min(), images[place].max()
            expected = (images[place] - low) / (high - low)
        cell = grid[top : top + 4, left : left + 5]
        np.testing.assert_allclose(cell, expected, atol=1e-6)


def test_an_image_of_one_color_is_no_division_by_zero():
    np.testing.assert_array_equal(image_grid(np.full((1, 2, 2, 3), 7.0)), 0)
