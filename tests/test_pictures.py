"""Pictures for TensorBoard."""

import numpy as np

from towers.reporting.board import batch_picture, captioned_images


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


def test_a_caption_changes_pixels_below_its_image_alone():
    images = np.zeros((2, 4, 4, 3), np.uint8)
    bare, named = (captioned_images(images, [[x], [x]]) for x in ("", "W" * 99))
    different = np.any(bare != named, axis=2)
    assert different.any() and not different[:168].any()
    assert not different[:, 171:175].any()  # nor in the gap: it is cut


def test_mixed_labels_are_shares():
    images = np.zeros((1, 4, 4, 3), np.float32)
    names = ["cat", "dog", "owl"]
    mixed = batch_picture(images, np.array([[0.25, 0.75, 0.0]]), names)
    words = captioned_images(images, [["75% dog", "25% cat"]])
    np.testing.assert_array_equal(mixed, words)
