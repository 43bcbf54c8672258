"""RandAugment against Pillow, operation by operation, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps
from test_augment import DEVIATION, MEAN, Drawn, augment, random_images

from towers.data import rand_augment
from towers.data.crops import crop_resize_flip
from towers.data.rand_augment import OPERATIONS, SIGNS

AFFINE, NEAREST = Image.Transform.AFFINE, Image.Resampling.NEAREST


def some_images(shape):
    """Noise, narrow noise, smooth, of one value, and of two."""
    height, width, channels = shape
    images = random_images(5, shape)
    rows, columns = np.mgrid[:height, :width]
    images[1] = 90 + images[1] // 4
    images[2] = (3 * rows + 2 * columns)[..., None] + 9 * np.arange(channels)
    images[3] = 77
    images[4] = np.where(images[4] < 200, 10, 250)
    return images


def by_pillow(image, name, sign, magnitude):
    """An operation of torchvision's RandAugment on uint8 [height, width, channels]."""
    shape, share = image.shape, magnitude / 30
    image = Image.fromarray(image.squeeze())
    width, height = image.size

    def moved(*matrix):
        return image.transform(image.size, AFFINE, matrix, NEAREST)

    factor = 1 + sign * 0.9 * share
    operations = {
        "identity": lambda: image,
        "shear_x": lambda: moved(1, sign * 0.3 * share, 0, 0, 1, 0),
        "shear_y": lambda: moved(1, 0, 0, sign * 0.3 * share, 1, 0),
        "translate_x": lambda: moved(
            1, 0, -int(sign * 150 / 331 * width * share), 0, 1, 0
        ),
        "translate_y": lambda: moved(
            1, 0, 0, 0, 1, -int(sign * 150 / 331 * height * share)
        ),
        "rotate": lambda: image.rotate(sign * 30 * share, NEAREST),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "color": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
        "posterize": lambda: ImageOps.posterize(image, 8 - round(4 * share)),
        "solarize": lambda: ImageOps.solarize(image, 255 - 255 * share),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
    }
    return np.asarray(operations[name]()).reshape(shape)


@pytest.mark.parametrize("magnitude", [9, 22])
@pytest.mark.parametrize("shape", [(32, 32, 3), (21, 40, 3), (28, 28, 1)])
def test_every_operation_equals_that_of_pillow(shape, magnitude, monkeypatch):
    monkeypatch.setattr(rand_augment, "MAGNITUDE", magnitude)
    images = some_images(shape)
    operations = [(name, sign) for name in OPERATIONS for sign in SIGNS]
    # All operations in one batch, each image once with every one.
    everything = np.concatenate([images] * len(operations)).astype(np.float32)
    rows = np.repeat(np.arange(len(operations)), len(images))
    actual = rand_augment.apply(tf.constant(everything), tf.constant(rows)).numpy()
    changed = set()
    for i, row in enumerate(rows):
        name, sign = operations[row]
        image = images[i % len(images)]
        expected = by_pillow(image, name, sign, magnitude)
        np.testing.assert_array_equal(actual[i], expected, err_msg=f"{name} {sign} {i}")
        if (expected != image).any():
            changed.add(name)
    without_color = {"color"} if shape[2] == 1 else set()
    assert changed == set(OPERATIONS) - {"identity"} - without_color


def test_two_operations_follow_each_other():
    images, drawn = some_images((32, 32, 3)), Drawn(n=5)
    actual = rand_augment.transform_randomly(tf.constant(images, tf.float32), drawn)
    assert set(drawn.numbers) == {"rand_augment"}
    names = []
    for i, numbers in enumerate(drawn.numbers["rand_augment"].astype(np.float64)):
        expected = images[i]
        for operation, sign in numbers:
            names.append(OPERATIONS[int(operation * 14)])
            expected = by_pillow(expected, names[-1], -1 if sign >= 0.5 else 1, 9)
        np.testing.assert_array_equal(actual[i], expected)
    assert len(set(names)) > 4


def test_every_operation_and_sign_is_drawn_about_equally_often(monkeypatch):
    drawn_rows = []
    monkeypatch.setattr(
        rand_augment, "apply", lambda images, rows: drawn_rows.append(rows) or images
    )
    n = 28_000
    rand_augment.transform_randomly(tf.zeros([n, 1, 1, 1]), Drawn(n=n))
    assert len(drawn_rows) == 2
    for rows in drawn_rows:
        counts = np.bincount(rows, minlength=28)
        np.testing.assert_allclose(counts, 1000, atol=5 * 1000**0.5)


def test_the_augmentation_is_a_crop_then_the_operations_on_whole_values():
    images, drawn = tf.constant(random_images()), Drawn()
    actual = augment("rand_augment").train(images, drawn)
    whole = tf.round(crop_resize_flip(images, drawn))
    expected = rand_augment.transform_randomly(whole, drawn)
    expected = (expected - MEAN) / DEVIATION
    np.testing.assert_allclose(actual, expected, atol=1e-5)
