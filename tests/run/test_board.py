"""TensorBoard's files, read back by TensorBoard's own reader."""

import shutil

import numpy as np
import pytest
from boards import read_board, wait_for_curve
from marks import slow
from small_runs import halt_at, small_config

from towers.callbacks import Callback
from towers.run.board import Board
from towers.training.summaries import batch_picture, captioned_images
from towers.training.train import train


def test_scalars_can_be_read_at_once_and_vectors_have_a_curve_per_tower(tmp_path):
    board = Board(tmp_path, "train")
    board.scalars(10, {"loss": 0.5, "tower_losses": np.array([0.25, 0.75])})
    board.scalars(20, {"loss": np.float32(0.25)})
    Board(tmp_path, "eval").scalars(1, {"loss": 0.75})
    assert read_board(tmp_path, "train") == {
        "curves/loss": [(10, 0.5), (20, 0.25)],
        "towers/loss_0": [(10, 0.25)],
        "towers/loss_1": [(10, 0.75)],
    }
    assert read_board(tmp_path, "eval") == {"curves/loss": [(1, 0.75)]}


@pytest.mark.row(58)
@pytest.mark.parametrize("num_continued", [1, 2])
def test_steps_that_are_trained_again_are_there_once(num_continued, tmp_path):
    """In both loaders of TensorBoard: continued after step 45, and after step 30."""
    files = (1, range(5, 61, 5)), (46, (48, 56, 64)), (31, (35, 66))
    expected = []
    for first_step, steps in files[: 1 + num_continued]:
        board = Board(tmp_path, "train", first_step)
        for step in steps:
            board.scalars(step, {"loss": step})
        expected = [x for x in expected if x < first_step] + [*steps]
    assert steps_of(tmp_path, "train") == {"curves/loss": expected}
    wait_for_curve(tmp_path, "train", "curves/loss", expected)


def steps_of(folder, kind):
    """tag -> steps, of the curves as TensorBoard's slow loader reads them."""
    curves = read_board(folder, kind).items()
    return {tag: [s for s, _ in x] for tag, x in curves if tag.startswith("curves")}


@pytest.mark.row(58)
def test_after_a_kill_each_step_is_in_a_curve_once(small, tmp_path):
    """Killed after the last step, when the last checkpoint was that of step 4."""
    config = small_config(checkpoint_every_steps=4, eval_every_epochs=0.2)
    for _ in range(2):
        train(tmp_path, config)
        for kind in ("train", "test"):
            curves = steps_of(tmp_path / "tensorboard", kind)
            every = [1, *range(2, 11, 2)] if kind == "train" else [*range(1, 11)]
            assert curves["curves/loss"] == curves.get("curves/accuracy", every)
            assert curves["curves/loss"] == every
        for step in (8, 10):
            shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")


@pytest.mark.row(58)
@pytest.mark.parametrize("halt", [slow("evaluating"), "evaluated"])
def test_a_step_that_is_evaluated_once_more_is_there_once(small, tmp_path, halt):
    def stop(*_):
        raise KeyError

    config = small_config(eval_every_epochs=1.0, log_every_steps=5)
    stops = type("Stops", (Callback,), {"on_evaluation": stop})()
    with pytest.MonkeyPatch.context() as patch:
        if halt == "evaluating":
            halt_at(patch, halt, stop)
        with pytest.raises(KeyError):
            train(tmp_path, config, callbacks=[stops])
    train(tmp_path, config)
    for kind in ("train", "test"):
        assert steps_of(tmp_path / "tensorboard", kind)["curves/loss"][-2:] == [5, 10]


# Pictures.


def test_images_are_enlarged_in_whole_pixels_and_those_of_floats_stretched():
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), np.uint8)
    picture = captioned_images(images, [["a"], ["b"], ["c"]])
    # Two columns in 350 pixels, and one.
    tile = picture[:168, :168, 0]
    np.testing.assert_array_equal(tile, np.kron(images[0, :, :, 0], np.ones([21, 21])))
    stretched = captioned_images(images[:1] / 1000 - 7, [[]])[:344:43, :344:43, 0]
    low, high = images[0].min(), images[0].max()
    expected = 255 * (images[0, :, :, 0] - float(low)) / (high - low)
    np.testing.assert_allclose(stretched, expected, atol=1)


def test_mixed_labels_are_shares():
    images = np.zeros((1, 4, 4, 3), np.float32)
    names = ["cat", "dog", "owl"]
    mixed = batch_picture(images, np.array([[0.25, 0.75, 0.0]]), names)
    words = captioned_images(images, [["75% dog", "25% cat"]])
    np.testing.assert_array_equal(mixed, words)
