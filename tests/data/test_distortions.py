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


N_ERASED, HEIGHT, WIDTH = 300, 12, 10


def assert_erases(erase, boxes):
    """Erases boxes (top, left, height, width) of images of ones, pixel by pixel."""
    found = erase(tf.ones([N_ERASED, HEIGHT, WIDTH, 2]))
    for i, (top, left, tall, wide) in enumerate(boxes):
        expected = np.ones((HEIGHT, WIDTH, 2))
        for y in range(max(top, 0), min(top + tall, HEIGHT)):
            for x in range(max(left, 0), min(left + wide, WIDTH)):
                expected[y, x] = 0
        np.testing.assert_array_equal(found[i], expected, err_msg=f"image {i}")


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


def test_erased_rectangles_equal_loops_over_pixels():
    drawn = Drawn()
    numbers = drawn("random_erasing", [N_ERASED, 5]).numpy().astype(np.float64)
    boxes = []
    for chance, area, aspect, row, column in numbers:
        pixels = (0.02 + 0.38 * area) * HEIGHT * WIDTH
        ratio = 0.3 + (1 / 0.3 - 0.3) * aspect
        tall = min(max(round(np.sqrt(pixels * ratio)), 1), HEIGHT)
        wide = min(max(round(np.sqrt(pixels / ratio)), 1), WIDTH)
        corner = int(row * (HEIGHT - tall + 1)), int(column * (WIDTH - wide + 1))
        boxes.append((*corner, tall, wide) if chance < 0.6 else (0, 0, 0, 0))
    assert_erases(lambda images: erase_randomly(images, drawn, 0.6), boxes)


@pytest.mark.parametrize("size", [1, 4, 5])
def test_cut_out_squares_equal_loops_over_pixels(size):
    drawn = Drawn()
    middles = drawn("cutout", [N_ERASED, 2]).numpy().astype(np.float64)
    corners = (middles * [HEIGHT, WIDTH]).astype(int) - size // 2
    boxes = [(*corner, size, size) for corner in corners]
    assert_erases(lambda images: cut_out(images, drawn, size), boxes)


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
