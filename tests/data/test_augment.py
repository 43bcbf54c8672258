"""Augmentation of whole batches against tf.image and NumPy, image by image."""

import numpy as np
import pytest
import tensorflow as tf

from towers.config.choices import AUGMENTS
from towers.data.augment.augmentation import create_augment, standardize

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
        fixed: purpose -> numbers; "views" are the epochs in which the images are seen.
    """

    def __init__(self, seed=0, n=N, **fixed):
        self._rng = np.random.default_rng(seed)
        self._n = n
        self.numbers = {}
        views = fixed.pop("views", self._rng.integers(0, 4, n))
        self.views = tf.constant(views, tf.int64)
        self.numbers |= fixed

    def per_example(self, purpose, count):
        return self(purpose, [self._n, count])

    per_view = per_example

    def __call__(self, purpose, shape):
        if purpose not in self.numbers:
            self.numbers[purpose] = self._rng.random(shape, np.float32)
        assert self.numbers[purpose].shape == tuple(shape)
        return tf.constant(self.numbers[purpose])


def augment(name, shape=SHAPE, **options):
    return create_augment(name, shape, MEAN, DEVIATION, **options)


def test_tutorial_equals_tf_image_image_by_image():
    images, drawn = random_images(), Drawn()
    found = augment("tutorial").train(tf.constant(images), drawn)
    evaluated = augment("tutorial").evaluate(tf.constant(images))
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
        centre = tf.image.resize_with_crop_or_pad(image, 24, 24)
        expected = tf.image.per_image_standardization(centre)
        np.testing.assert_allclose(evaluated[i], expected, atol=1e-5)
    # Not all of the images were left nearly alone.
    assert np.ptp(deltas) > 60 and np.ptp(factors) > 0.8


def test_pad_crop_flip_equals_numpy_image_by_image():
    images, drawn = random_images(N, (32, 28, 3)), Drawn()
    train = augment("pad_crop_flip", (32, 28, 3)).train
    found = train(tf.constant(images), drawn).numpy()
    assert found.dtype == np.float32 and set(drawn.numbers) == {"crop", "flip"}
    for i, image in enumerate(images):
        # The border has the value of the mean.
        padded = np.full((40, 36, 3), MEAN, np.float64)
        padded[4:36, 4:32] = image
        top, left = np.floor(drawn.numbers["crop"][i] * 9).astype(int)
        expected = padded[top : top + 32, left : left + 28]
        if drawn.numbers["flip"][i, 0] >= 0.5:
            expected = expected[:, ::-1]
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
        expected = padded[top : top + 32, left : left + 32]
        if (drawn.numbers["flip"][i] < 0.5) != drawn.views[i].numpy() % 2:
            expected = expected[:, ::-1]
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 40, 1)])
def test_images_of_one_colour_stay_finite_and_have_the_shape_of_the_augmentation(
    name, shape
):
    augmented = create_augment(name, shape, MEAN[: shape[2]], DEVIATION[: shape[2]])
    images = tf.fill([4, *shape], tf.constant(7, tf.uint8))
    for shown in (augmented.train(images, Drawn(n=4)), augmented.evaluate(images)):
        assert shown.shape == [4, *augmented.image_shape]
        assert np.all(np.isfinite(shown))
