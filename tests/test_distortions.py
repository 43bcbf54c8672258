"""Jittered colors and erased pieces against loops in NumPy, image by image."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from test_augment import DEVIATION, MEAN, SHAPE, Drawn, N, random_images

from towers.config.choices import AUGMENTS
from towers.data.augment.augmentation import create_augment
from towers.data.augment.distortions import (
    cut_out,
    erase_randomly,
    extend,
    gray_randomly,
    jitter_colors,
)

SETTINGS = {
    "color_jitter": 0.4,
    "random_gray": 0.5,
    "random_erasing": 0.5,
    "cutout_size": 8,
}


def ones(n, height=12, width=10):
    return tf.ones([n, height, width, 2])


def erased_by(found):
    """Where images of ones, of two channels, were erased: bool [n, height, width]."""
    found = np.asarray(found)
    assert set(np.unique(found)) <= {0.0, 1.0}
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    return found[..., 0] == 0


# Colours.


def jittered(image, brightness, contrast, saturation):
    """One image in float64, pixel by pixel."""
    image = image.astype(np.float64) * brightness
    weights = [0.299, 0.587, 0.114] if image.shape[2] == 3 else [1.0]
    mean = np.mean(image @ weights)
    for row in image:
        for pixel in row:
            pixel[:] = mean + contrast * (pixel - mean)
            if len(pixel) == 3:
                grey = pixel @ weights
                pixel[:] = grey + saturation * (pixel - grey)
    return np.clip(image, 0, 255)


@pytest.mark.parametrize("shape", [(9, 8, 3), (9, 8, 1)])
@pytest.mark.parametrize("strength,low,high", [(0.4, 0.6, 1.4), (1.5, 0.0, 2.5)])
def test_jittered_colors_equal_loops_over_pixels(shape, strength, low, high):
    images, drawn = random_images(N, shape), Drawn()
    found = jitter_colors(tf.constant(images), drawn, strength)
    assert found.dtype == tf.float32 and found.shape == images.shape
    (numbers,) = drawn.numbers.values()
    factors = low + (high - low) * numbers.astype(np.float64)
    assert np.ptp(factors, axis=0).min() > 0.7 * (high - low)
    for i, image in enumerate(images):
        expected = jittered(image, *factors[i])
        np.testing.assert_allclose(found[i], expected, atol=1e-3, err_msg=f"image {i}")


@pytest.mark.parametrize("shape", [(9, 8, 3), (9, 8, 1)])
def test_some_images_become_gray_as_by_pillow(shape):
    images, drawn = random_images(N, shape), Drawn()
    found = gray_randomly(tf.constant(images), drawn, 0.4).numpy()
    is_gray = drawn.numbers["random_gray"][:, 0] < 0.4
    assert 0.1 < np.mean(is_gray) < 0.7
    for image, expected, gray in zip(found, images, is_gray, strict=True):
        if gray and shape[2] == 3:
            by_pillow = np.asarray(Image.fromarray(expected).convert("L"))
            np.testing.assert_allclose(image, by_pillow[..., None] + 0 * image, atol=1)
        else:
            np.testing.assert_array_equal(image, expected)


# Rectangles.


def test_erased_rectangles_equal_loops_over_pixels():
    n, height, width = 300, 12, 10
    drawn = Drawn()
    found = erased_by(erase_randomly(ones(n), drawn, 0.6))
    numbers = drawn.numbers["random_erasing"].astype(np.float64)
    for i, (chance, area, aspect, row, column) in enumerate(numbers):
        expected = np.zeros((height, width), bool)
        pixels = (0.02 + 0.38 * area) * height * width
        ratio = 0.3 + (1 / 0.3 - 0.3) * aspect
        tall = min(max(round(np.sqrt(pixels * ratio)), 1), height)
        wide = min(max(round(np.sqrt(pixels / ratio)), 1), width)
        top = int(row * (height - tall + 1))
        left = int(column * (width - wide + 1))
        if chance < 0.6:
            for y in range(top, top + tall):
                for x in range(left, left + wide):
                    expected[y, x] = True
        np.testing.assert_array_equal(found[i], expected, err_msg=f"image {i}")


# Squares.


@pytest.mark.parametrize("size", [1, 4, 5])
def test_cut_out_squares_equal_loops_over_pixels(size):
    n, height, width = 300, 12, 10
    drawn = Drawn()
    found = erased_by(cut_out(ones(n), drawn, size))
    for i, (row, column) in enumerate(drawn.numbers["cutout"].astype(np.float64)):
        expected = np.zeros((height, width), bool)
        top, left = int(row * height) - size // 2, int(column * width) - size // 2
        for y in range(top, top + size):
            for x in range(left, left + size):
                if 0 <= y < height and 0 <= x < width:
                    expected[y, x] = True
        np.testing.assert_array_equal(found[i], expected, err_msg=f"image {i}")


# All of it, on top of an augmentation.


def test_the_order_is_colors_augmentation_rectangles_squares():
    images, drawn = tf.constant(random_images()), Drawn()
    augment = create_augment("pad_crop_flip", SHAPE, MEAN, DEVIATION)
    found = extend(augment, **SETTINGS).train(images, drawn)
    plain = extend(augment).train(images, drawn)
    np.testing.assert_array_equal(plain, augment.train(images, drawn))
    steps = gray_randomly(jitter_colors(images, drawn, 0.4), drawn, 0.5)
    steps = augment.train(steps, drawn)
    steps = cut_out(erase_randomly(steps, drawn, 0.5), drawn, 8)
    np.testing.assert_array_equal(found, steps)
    purposes = {"color_jitter", "random_gray", "crop", "flip"}
    purposes |= {"random_erasing", "cutout"}
    assert set(drawn.numbers) == purposes


class OncePerPurpose(Drawn):
    """Two draws for one purpose would be the same numbers."""

    def __call__(self, purpose, shape):
        assert purpose not in self.numbers
        return super().__call__(purpose, shape)


@pytest.mark.parametrize("name", AUGMENTS)
def test_evaluation_and_shapes_stay_and_images_keep_to_themselves(name):
    """So that a batch may be cut in any way."""
    images, drawn = random_images(), OncePerPurpose()
    plain = create_augment(name, SHAPE, MEAN, DEVIATION)
    augment = extend(plain, **SETTINGS)
    assert (augment.evaluate, augment.image_shape) == (
        plain.evaluate,
        plain.image_shape,
    )
    whole = augment.train(tf.constant(images), drawn)
    assert whole.shape == [N, *augment.image_shape] and whole.dtype == tf.float32
    numbers = {k: v[5:9] for k, v in drawn.numbers.items()}
    numbers["views"] = drawn.views.numpy()[5:9]
    part = augment.train(tf.constant(images[5:9]), Drawn(n=4, **numbers))
    np.testing.assert_array_equal(part, whole[5:9])
