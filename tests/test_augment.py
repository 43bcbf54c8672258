"""Augmentation of whole batches against tf.image and NumPy, image by image."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from towers.config.choices import AUGMENTS
from towers.data.augment import create_augment, crop_and_flip, standardize
from towers.data.batches import TrainBatches
from towers.data.sources import ArraySource

MEAN, DEVIATION = (100.0, 120.0, 140.0), (50.0, 60.0, 70.0)
SHAPE = (32, 32, 3)
N = 20


def random_images(n=N, shape=SHAPE, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


class Drawn:
    """Random numbers that are remembered under their purpose.

    Args:
        seed: of the numbers that are not fixed.
        n: images.
        fixed: purpose -> numbers; "epochs" are those in which the images are seen.
    """

    def __init__(self, seed=0, n=N, **fixed):
        self._rng = np.random.default_rng(seed)
        self._n = n
        self.numbers = {}
        epochs = fixed.pop("epochs", self._rng.integers(0, 4, n))
        self.epochs = tf.constant(epochs, tf.int64)
        self.numbers |= fixed

    def of_examples(self, purpose, count):
        return self(purpose, [self._n, count])

    of_views = of_examples

    def __call__(self, purpose, shape):
        if purpose not in self.numbers:
            self.numbers[purpose] = self._rng.random(shape, np.float32)
        assert self.numbers[purpose].shape == tuple(shape)
        return tf.constant(self.numbers[purpose])


def coordinates(n, height, width):
    """Images whose pixels say where they are: channel 0 the row, channel 1 the column,
    channel 2 the image."""
    rows, columns = np.indices((height, width))
    images = np.zeros((n, height, width, 3), np.uint8)
    images[..., 0], images[..., 1] = rows, columns
    images[..., 2] = np.arange(n)[:, None, None] % 256
    return images


def places(windows):
    """(top, left, mirrored) of every window that was cut out of `coordinates`."""
    width = windows.shape[2]
    mirrored = windows[:, 0, 0, 1] > windows[:, 0, -1, 1]
    left = np.minimum(windows[:, 0, 0, 1], windows[:, 0, -1, 1])
    right = np.maximum(windows[:, 0, 0, 1], windows[:, 0, -1, 1])
    np.testing.assert_array_equal(right - left, width - 1)
    return windows[:, 0, 0, 0], left, mirrored


def augment(name, shape=SHAPE, **options):
    return create_augment(name, shape, MEAN, DEVIATION, **options)


# Against other implementations.


def test_tutorial_equals_tf_image_image_by_image():
    images, drawn = random_images(), Drawn()
    found = augment("tutorial").train(tf.constant(images), drawn)
    assert found.shape == [N, 24, 24, 3] and found.dtype == tf.float32
    assert set(drawn.numbers) == {"crop", "flip", "brightness", "contrast"}
    deltas, factors = [], []
    for i, image in enumerate(images):
        numbers = {k: v[i].ravel() for k, v in drawn.numbers.items()}
        top, left = np.floor(numbers["crop"] * 9).astype(int)
        x = tf.image.crop_to_bounding_box(image, top, left, 24, 24)
        x = tf.cast(x, tf.float32)
        if numbers["flip"] >= 0.5:
            x = tf.image.flip_left_right(x)
        # As tf.image.random_brightness and random_contrast draw them.
        deltas.append(-63 + 126 * float(numbers["brightness"][0]))
        factors.append(0.2 + 1.6 * float(numbers["contrast"][0]))
        x = tf.image.adjust_brightness(x, deltas[-1])
        x = tf.image.adjust_contrast(x, factors[-1])
        x = tf.image.per_image_standardization(x)
        np.testing.assert_allclose(found[i], x, atol=1e-4, err_msg=f"image {i}")
    # Not all of the images were left nearly alone.
    assert np.ptp(deltas) > 60 and np.ptp(factors) > 0.8


def test_tutorial_evaluates_the_centre():
    images = random_images()
    found = augment("tutorial").evaluate(tf.constant(images))
    for i, image in enumerate(images):
        centre = tf.image.resize_with_crop_or_pad(image, 24, 24)
        expected = tf.image.per_image_standardization(centre)
        np.testing.assert_allclose(found[i], expected, atol=1e-5)


def test_pad_crop_flip_equals_loops_over_pixels():
    images, drawn = random_images(N, (32, 28, 3)), Drawn()
    train = augment("pad_crop_flip", (32, 28, 3)).train
    found = train(tf.constant(images), drawn).numpy()
    assert found.dtype == np.float32 and set(drawn.numbers) == {"crop", "flip"}
    for i, image in enumerate(images):
        # The border has the value of the mean.
        padded = np.full((40, 36, 3), MEAN, np.float64)
        padded[4:36, 4:32] = image
        top, left = np.floor(drawn.numbers["crop"][i] * 9).astype(int)
        expected = np.empty((32, 28, 3))
        for row in range(32):
            for column in range(28):
                from_left = column
                if drawn.numbers["flip"][i, 0] >= 0.5:
                    from_left = 27 - column
                expected[row, column] = padded[top + row, left + from_left]
        expected = (expected - MEAN) / DEVIATION
        np.testing.assert_allclose(found[i], expected, atol=1e-5, err_msg=f"image {i}")


@pytest.mark.parametrize("name", ["none", "pad_crop_flip"])
def test_evaluation_standardises_with_the_moments_of_the_training_set(name):
    images = random_images()
    found = augment(name).evaluate(tf.constant(images))
    np.testing.assert_allclose(found, (images - np.array(MEAN)) / DEVIATION, atol=1e-5)


def test_a_channel_that_is_the_same_everywhere_becomes_0():
    """As the red one of green fluorescence."""
    images = random_images(2)
    images[..., 0] = 7
    found = standardize(tf.constant(images), (7.0, 120.0, 140.0), (0.0, 60.0, 70.0))
    expected = (images[..., 1:] - [120, 140]) / [60, 70]
    np.testing.assert_array_equal(found[..., 0], 0)
    np.testing.assert_allclose(found[..., 1:], expected, rtol=1e-6, atol=1e-6)


# Places.


def test_the_smallest_and_the_largest_number_give_the_first_and_the_last_place():
    largest = np.nextafter(np.float32(1), np.float32(0))
    crop = np.array([[0, 0], [largest, largest], [0, largest]], np.float32)
    flip = np.array([[0], [largest], [0.5]], np.float32)
    images = tf.constant(coordinates(3, 32, 32))
    windows = crop_and_flip(images, Drawn(crop=crop, flip=flip), 24, 24)
    tops, lefts, mirrored = places(windows.numpy())
    assert (list(tops), list(lefts)) == ([0, 8, 0], [0, 8, 8])
    assert list(mirrored) == [False, True, True]


@pytest.mark.parametrize("name,most", [("translate_flip", 2), ("translate_4_flip", 4)])
def test_translate_flip_equals_numpy_image_by_image(name, most):
    images, drawn = random_images(), Drawn()
    found = augment(name).train(tf.constant(images), drawn)
    assert set(drawn.numbers) == {"translation", "flip"}
    standard = (images - np.float64(MEAN)) / DEVIATION
    for i, image in enumerate(standard):
        padded = np.pad(image, [(most, most), (most, most), (0, 0)], mode="reflect")
        corner = drawn.numbers["translation"][i] * (2 * most + 1)
        top, left = np.floor(corner).astype(int)
        image = padded[top : top + 32, left : left + 32]
        if (drawn.numbers["flip"][i] < 0.5) != drawn.epochs[i].numpy() % 2:
            image = image[:, ::-1]
        np.testing.assert_allclose(found[i], image, rtol=1e-5, atol=1e-5)


def test_flips_alternate_and_views_do_not_depend_on_the_batch_size():
    images = coordinates(12, 8, 8)
    source = ArraySource(images, np.zeros(12, np.int32))
    moments = (0.0,) * 3, (1.0,) * 3
    of_translate_flip = create_augment("translate_flip", (8, 8, 3), *moments)
    seen = []
    for size in (6, 5):
        batches = TrainBatches(source, of_translate_flip, seed=1, images_per_step=size)
        views = collections.defaultdict(list)
        for step in range(60 // size):
            step = tf.constant(step, tf.int64)
            of_step = zip(
                batches.indices(step).numpy(), batches(step)["images"], strict=True
            )
            for index, image in of_step:
                views[int(index)].append(image.numpy())
        seen.append(views)
    for index in range(12):
        views = seen[0][index]
        np.testing.assert_array_equal(views, seen[1][index])
        columns = np.stack(views)[..., 1]
        mirrored = columns[:, 0, 2] > columns[:, 0, -3]
        assert list(mirrored) in (
            [True, False] * 2 + [True],
            [False, True] * 2 + [False],
        )
    first = [view[0][0, 2, 1] > view[0][0, -3, 1] for view in seen[0].values()]
    assert 0 < sum(first) < 12


# Shapes, and the same again.


@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 40, 1)])
def test_the_result_has_the_shape_of_the_augmentation(name, shape):
    augmented = create_augment(name, shape, MEAN[: shape[2]], DEVIATION[: shape[2]])
    images = tf.constant(random_images(4, shape))
    assert augmented.train(images, Drawn(n=4)).shape == [4, *augmented.image_shape]
    assert augmented.evaluate(images).shape == [4, *augmented.image_shape]


@pytest.mark.parametrize("name", AUGMENTS)
def test_an_image_of_one_colour_stays_finite(name):
    images = tf.fill([2, *SHAPE], tf.constant(7, tf.uint8))
    train, evaluate = augment(name).train, augment(name).evaluate
    for found in (train(images, Drawn(n=2)), evaluate(images)):
        assert np.all(np.isfinite(found))


@pytest.mark.parametrize("shape", [(23, 32, 3), (32, 23, 3)])
def test_images_too_small_for_the_tutorial_are_refused_with_both_sizes(shape):
    with pytest.raises(ValueError) as caught:
        augment("tutorial", shape)
    assert f"{shape[0]}x{shape[1]}" in str(caught.value)
    assert "24x24" in str(caught.value) and "--augment" in str(caught.value)
