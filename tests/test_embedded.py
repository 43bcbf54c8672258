"""The embedded data set: always the same, quick, hard for lines, and about shapes."""

import time
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from marks import slow

from towers.data import embedded
from towers.data.sources import DataSet, Subset

SHAPES = list(embedded.SHAPES.items())

# Of the training images, per channel.
MEAN = (125.5, 125.6, 125.8)
DEVIATION = (55.9, 56.1, 56.3)

# Points (x to the right, y down) that a person would put inside and outside.
POINTS = {
    "disc": ([(0, 0), (0.5, 0.5), (-0.7, 0)], [(0.7, 0.7), (0.9, 0)]),
    "ring": ([(0.8, 0), (0, -0.8), (0.55, 0.55)], [(0, 0), (0.4, 0), (1.1, 0)]),
    "square": ([(0, 0), (0.6, 0.6), (-0.6, 0.6)], [(0.8, 0), (0, -0.8)]),
    "triangle": ([(0, -1.1), (0.9, 0.5), (-0.9, 0.5)], [(0, 0.7), (0.6, -0.5)]),
    "plus": ([(0, 0.9), (0.9, 0), (0, -0.9)], [(0.5, 0.5), (-0.5, 0.5)]),
    "cross": ([(0.6, 0.6), (-0.6, 0.6), (0, 0)], [(0, 0.7), (0.7, 0)]),
    "star": ([(0, -1.2), (1.1, -0.36), (-0.65, 0.9)], [(0, 0.7), (0.5, -0.7)]),
    "crescent": ([(-0.9, 0), (0.3, 0.9), (0.3, -0.9)], [(0.5, 0), (0, 0)]),
    "heart": ([(0, 0.7), (0.4, -0.4), (-0.4, -0.4)], [(0, -0.7), (0.6, 0.6)]),
    "bars": ([(0.9, 0), (-0.9, 0.7), (0, -0.7)], [(0, 0.36), (0, -0.36), (0, 1)]),
}

# Squares of a fine grid over (-1.5, 1.5) in a shape's own units.
GRID = (np.arange(600) + 0.5) / 200 - 1.5


class Loaded(NamedTuple):
    data: DataSet
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    secs: float


@pytest.fixture(scope="module")
def loaded():
    start = time.process_time()
    data = embedded.load()
    secs = time.process_time() - start
    return Loaded(data, *read_all(data.train), *read_all(data.test), secs)


def read_all(source):
    images, labels = source.read(tf.range(source.num_examples, dtype=tf.int64))
    return images.numpy(), labels.numpy()


def covered(shape, mirrored=False):
    """Which squares of the grid a shape covers."""
    x = -GRID if mirrored else GRID
    return shape(x[None, :], GRID[:, None]) < 0


def best_ridge_accuracy(train, train_labels, test, test_labels, penalties):
    """Test accuracy of ridge regression to one-hot targets, of the best penalty.

    Args:
        train, test: float32 [n, features].
        penalties: in units of the mean variance of a feature, summed over examples.
    """
    mean = train.mean(0)
    train, test = train - mean, test - mean
    targets = np.eye(10, dtype=np.float32)[train_labels] - np.float32(0.1)
    gram = tf.matmul(train, train, transpose_a=True).numpy()
    moments = train.T @ targets
    accuracies = []
    for penalty in penalties:
        penalized = gram.copy()
        penalized[np.diag_indices_from(gram)] += penalty * gram.diagonal().mean()
        weights = np.linalg.solve(penalized, moments)
        accuracies.append(((test @ weights).argmax(1) == test_labels).mean())
    return max(accuracies)


def test_sizes_types_and_names(loaded):
    data = loaded.data
    assert loaded.train_images.shape == (10_000, 32, 32, 3)
    assert loaded.test_images.shape == (2_000, 32, 32, 3)
    assert loaded.train_images.dtype == loaded.test_images.dtype == np.uint8
    assert data.train.image_shape == data.test.image_shape == (32, 32, 3)
    assert data.class_names == tuple(embedded.SHAPES)
    assert len(data.class_names) == 10


def test_loading_takes_less_than_five_seconds(loaded):
    assert loaded.secs < 5.0


def test_classes_are_balanced_in_every_part(loaded):
    assert np.bincount(loaded.train_labels).tolist() == [1_000] * 10
    assert np.bincount(loaded.test_labels).tolist() == [200] * 10
    assert np.bincount(loaded.train_labels[:500]).tolist() == [50] * 10


def test_two_loads_give_the_same_bits(loaded):
    again = embedded.load()
    for source, images, labels in (
        (again.train, loaded.train_images, loaded.train_labels),
        (again.test, loaded.test_images, loaded.test_labels),
    ):
        for read, expected in zip(read_all(source), (images, labels), strict=True):
            np.testing.assert_array_equal(read, expected)
    assert again.mean == loaded.data.mean


def test_every_image_is_drawn_once(loaded):
    images = [*loaded.train_images, *loaded.test_images]
    assert len({image.tobytes() for image in images}) == 12_000


def test_another_seed_draws_other_images(monkeypatch, loaded):
    monkeypatch.setattr(embedded, "NUM_TRAIN", 20)
    monkeypatch.setattr(embedded, "NUM_TEST", 20)
    images, _ = read_all(embedded.load(seed=1).train)
    known = {image.tobytes() for image in loaded.train_images}
    assert not known & {image.tobytes() for image in images}


def test_moments_are_those_of_numpy(loaded):
    pixels = loaded.train_images.reshape(-1, 3)
    mean = pixels.mean(0, dtype=np.float64)
    np.testing.assert_allclose(loaded.data.mean, mean, rtol=1e-9)
    deviation = pixels.std(0, dtype=np.float64)
    np.testing.assert_allclose(loaded.data.deviation, deviation, rtol=1e-9)


def test_coarse_statistics_stay_as_they_were(loaded):
    # Loose enough for another NumPy or processor, which may round otherwise.
    np.testing.assert_allclose(loaded.data.mean, MEAN, atol=0.5)
    np.testing.assert_allclose(loaded.data.deviation, DEVIATION, atol=0.5)


@pytest.mark.parametrize("compiled", [False, True])
def test_examples_are_read_by_index(loaded, compiled):
    indices = np.array([9_999, 0, 17, 17])
    read = loaded.data.train.read
    images, labels = (tf.function(read) if compiled else read)(tf.constant(indices))
    np.testing.assert_array_equal(images, loaded.train_images[indices])
    np.testing.assert_array_equal(labels, loaded.train_labels[indices])


def test_a_subset_reads_its_own_examples(loaded):
    listed = np.array([500, 3, 9_000])
    subset = Subset(loaded.data.train, listed)
    images, labels = read_all(subset)
    np.testing.assert_array_equal(images, loaded.train_images[listed])
    np.testing.assert_array_equal(labels, loaded.train_labels[listed])


@pytest.mark.slow
@pytest.mark.parametrize("standardized", [False, slow(True)])
def test_ridge_regression_on_the_pixels_stays_under_60_percent(loaded, standardized):
    train = loaded.train_images.reshape(10_000, -1).astype(np.float32) / 255
    test = loaded.test_images.reshape(2_000, -1).astype(np.float32) / 255
    if standardized:
        mean, deviation = train.mean(0), train.std(0)
        train, test = (train - mean) / deviation, (test - mean) / deviation
    accuracy = best_ridge_accuracy(
        train, loaded.train_labels, test, loaded.test_labels, (0.1, 1.0, 10.0)
    )
    # The lower bound says that the regression itself works.
    assert 0.2 < accuracy < 0.60


def test_colors_without_places_do_not_tell_the_class(loaded):
    def quantiles(images):
        pixels = np.sort(images.reshape(len(images), -1, 3), axis=1)[:, ::32]
        return pixels.reshape(len(images), -1).astype(np.float32) / 255

    accuracy = best_ridge_accuracy(
        quantiles(loaded.train_images),
        loaded.train_labels,
        quantiles(loaded.test_images),
        loaded.test_labels,
        (1e-4, 1e-2, 1.0),
    )
    assert accuracy < 0.25


@pytest.mark.parametrize("name, shape", SHAPES)
def test_a_shape_is_what_its_name_says(name, shape):
    inside, outside = (np.array(points, float) for points in POINTS[name])
    assert (shape(inside[:, 0], inside[:, 1]) < 0).all()
    assert (shape(outside[:, 0], outside[:, 1]) > 0).all()


@pytest.mark.parametrize("name, shape", SHAPES)
def test_a_shape_covers_the_common_area(name, shape):
    area = covered(shape).sum() * (GRID[1] - GRID[0]) ** 2
    assert area == pytest.approx(embedded.AREA, rel=0.01)


@pytest.mark.parametrize("name, shape", SHAPES)
def test_a_shape_stays_within_the_image(name, shape):
    # The largest size is 9.5 pixels, its middle at most 2 off: 16 - 2 over 9.5.
    inside = covered(shape)
    radius = np.hypot(GRID[None, :], GRID[:, None])
    assert radius[inside].max() < (16 - 2 * np.sqrt(2)) / 9.5


@pytest.mark.parametrize("name, shape", SHAPES)
def test_a_shape_gives_distances_near_its_outline(name, shape):
    distance = shape(GRID[None, :], GRID[:, None])
    slope = np.hypot(*np.gradient(distance, GRID, GRID))
    near = slope[np.abs(distance) < 0.1]
    assert np.median(near) == pytest.approx(1, abs=0.01)
    assert near.max() < 1.05


@pytest.mark.parametrize("name, shape", SHAPES)
def test_a_shape_keeps_single_precision(name, shape):
    points = GRID[:2].astype(np.float32)
    assert shape(points, points).dtype == np.float32


@pytest.mark.parametrize("mirrored", [False, True])
def test_no_shape_looks_like_another(mirrored):
    masks = [covered(shape) for _, shape in SHAPES]
    others = [covered(shape, mirrored) for _, shape in SHAPES]
    for i, mask in enumerate(masks):
        for j, other in enumerate(others):
            if i != j:
                overlap = (mask & other).sum() / (mask | other).sum()
                assert overlap < 0.9, (SHAPES[i][0], SHAPES[j][0])


def test_the_mean_image_of_a_class_shows_its_shape(loaded):
    """The mean distance of pixels from the color of the corners shows the shape."""
    pixels = np.arange(32) - 15.5
    templates = [
        shape(pixels[None, :] / 8, pixels[:, None] / 8).clip(-0.2, 0.2)
        for _, shape in SHAPES
    ]
    for label in range(10):
        images = loaded.train_images[loaded.train_labels == label].astype(np.float32)
        ground = images[:, ::31, ::31].mean((1, 2), keepdims=True)
        contrast = np.abs(images - ground).mean((0, 3))
        match = [-np.corrcoef(contrast.ravel(), t.ravel())[0, 1] for t in templates]
        assert int(np.argmax(match)) == label
