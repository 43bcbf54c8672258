"""Pictures for TensorBoard and the report."""

import numpy as np

from towers.run.board import batch_picture
from towers.run.pictures import captioned_images, confusion_matrix


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


def test_a_cell_is_darker_the_larger_its_share_of_the_label():
    counts = np.random.default_rng(1).integers(0, 50, (20, 20))
    counts[7] = 0  # a class without images
    images = counts.sum(1) + np.arange(20)  # some are of classes that are not drawn
    picture = confusion_matrix(counts, images, [""] * 20)
    side = (picture.shape[0] - 110) // 20
    cells = picture[112::side, 112::side].astype(int).sum(2)
    shares = counts / np.maximum(images[:, np.newaxis], 1)
    order = np.argsort(shares.ravel())
    assert np.all(np.diff(cells.ravel()[order]) <= 3)  # up to rounding


def test_a_matrix_of_few_classes_has_names_and_counts_in_the_width_of_tensorboard():
    pictures = [
        confusion_matrix(np.array([[10 * n, n], [0, 10]]), np.array([11, 10]), names)
        for n, names in ((1, "ab"), (2, "ab"), (1, "ac"))
    ]
    first, doubled, renamed = pictures
    assert first.shape == (350, 350, 3)
    differs = np.any(first != doubled, axis=2)
    assert differs[110:230, 110:].any() and not differs[230:].any()
    assert np.any(first != renamed, axis=2)[230:, :110].any()
