"""RandAugment (Cubuk et al. 2020, arXiv:1909.13719): of fourteen operations two are
drawn for each image, and applied one after the other at a fixed magnitude.

The operations and their magnitudes are those of torchvision's `RandAugment` with its
defaults, two operations at magnitude 9 of 0 to 30. On whole pixel values each gives
what Pillow gives, bit for bit on a CPU.

An operation moves pixels, or looks values up in a table, or blends the image with
another one made of it. All images go through these three, with an identity where theirs
is another, so that a batch is computed at once, whatever is drawn.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers.data.augment import CROP_SCALE, Augment, choose, standardize
from towers.data.crops import crop_resize_flip, flip
from towers.data.randomness import Draw

NUM_OPERATIONS = 2
MAGNITUDE, MOST = 9, 30

OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
# Each of them twice, as it is and with its magnitude negated where it has a direction.
SIGNS = (1, -1)

# At the highest magnitude.
MOST_SHEAR = 0.3
MOST_TRANSLATION = 150 / 331  # of the side
MOST_DEGREES = 30.0
MOST_ENHANCEMENT = 0.9
MOST_BITS = 4

# Pillow's fixed-point numbers for places of pixels have so many bits of fraction.
FRACTION_BITS = 16


def rand_augment(
    image_shape: tuple[int, int, int],
    mean: Sequence[float],
    deviation: Sequence[float],
    crop_scale: tuple[float, float] = CROP_SCALE,
) -> Augment:
    """A random crop of random size, a flip, and RandAugment."""
    evaluate = functools.partial(standardize, mean=mean, deviation=deviation)

    def train(images, draw):
        images = tf.round(crop_resize_flip(images, draw, crop_scale))
        return evaluate(transform_randomly(images, draw))

    def train_on_crops(images, draw):
        return evaluate(transform_randomly(flip(images, draw), draw))

    return Augment(train, evaluate, image_shape, train_on_crops, crop_scale)


def transform_randomly(images: tf.Tensor, draw: Draw) -> tf.Tensor:
    """NUM_OPERATIONS random operations on each image.

    Args:
        images: float32 [n, height, width, 1 or 3], whole numbers in 0..255.
        draw: gives "rand_augment" [n, NUM_OPERATIONS, 2]: operation and sign.

    Returns:
        Images as the given ones.
    """
    numbers = draw("rand_augment", [images.shape[0], NUM_OPERATIONS, 2])
    for place in range(NUM_OPERATIONS):
        operation = choose(numbers[:, place, 0], float(len(OPERATIONS)))
        is_negative = tf.cast(numbers[:, place, 1] >= 0.5, tf.float32)
        rows = tf.cast(operation * len(SIGNS) + is_negative, tf.int64)
        images = apply(images, rows)
    return images


def apply(images: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """One operation on each image.

    Args:
        images: float32 [n, height, width, 1 or 3], whole numbers in 0..255.
        rows: int64 [n], which operation: its place in OPERATIONS x SIGNS.
    """
    images = _moved(images, rows)
    images = _looked_up(images, rows)
    return _blended(images, rows)


def _strength(most: float) -> float:
    return most * MAGNITUDE / MOST


def _is(name, rows):
    """bool [n, 1, 1, 1]: whether an operation is the named one."""
    is_named = rows // len(SIGNS) == OPERATIONS.index(name)
    return is_named[:, None, None, None]


# Pixels that move.


def matrices(height: int, width: int) -> np.ndarray:
    """float64 [operations x signs, 6]: a to f, by which the pixel at (column x, row y)
    is that of the image at (a x + b y + c, d x + e y + f), as Pillow has them."""
    found = []
    for name in OPERATIONS:
        for sign in SIGNS:
            matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
            if name == "shear_x":
                matrix[1] = sign * _strength(MOST_SHEAR)
            elif name == "shear_y":
                matrix[3] = sign * _strength(MOST_SHEAR)
            elif name == "translate_x":
                matrix[2] = -float(int(sign * _strength(MOST_TRANSLATION * width)))
            elif name == "translate_y":
                matrix[5] = -float(int(sign * _strength(MOST_TRANSLATION * height)))
            elif name == "rotate":
                matrix = _rotation(sign * _strength(MOST_DEGREES), height, width)
            found.append(matrix)
    return np.array(found)


def _rotation(degrees, height, width):
    """Counterclockwise, around the middle."""
    angle = -math.radians(degrees)
    a, b = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return [a, b, x - a * x - b * y, -b, a, y + b * x - a * y]


def _fixed_point(matrix: np.ndarray) -> np.ndarray:
    """int64 of the shape: the matrices for the centers of pixels, in units of
    2**-FRACTION_BITS."""
    halves = matrix.copy()
    halves[:, 2] += 0.5 * (matrix[:, 0] + matrix[:, 1])
    halves[:, 5] += 0.5 * (matrix[:, 3] + matrix[:, 4])
    return np.floor(halves * 2.0**FRACTION_BITS + 0.5).astype(np.int64)


def _moved(images, rows):
    """The nearest pixel; 0 from outside of the image."""
    n, height, width, channels = images.shape
    table = tf.constant(_fixed_point(matrices(height, width)))
    matrix = tf.reshape(tf.gather(table, rows), [n, 6, 1, 1])
    # On a GPU int32 is computed by the host.
    x, y = (tf.range(count, dtype=tf.int64) for count in (width, height))
    x, y = x[None, None, :], y[None, :, None]
    shift = tf.constant(FRACTION_BITS, tf.int64)
    columns, lines = (
        tf.bitwise.right_shift(
            matrix[:, k] * x + matrix[:, k + 1] * y + matrix[:, k + 2], shift
        )
        for k in (0, 3)
    )
    is_inside = (columns >= 0) & (columns < width) & (lines >= 0) & (lines < height)
    firsts = height * width * tf.range(n, dtype=tf.int64)[:, None, None]
    places = tf.where(is_inside, firsts + lines * width + columns, 0)
    pixels = tf.gather(tf.reshape(images, [-1, channels]), places)
    return tf.where(is_inside[..., None], pixels, 0.0)


# Values that are looked up.


def tables() -> np.ndarray:
    """float32 [operations x signs, 256]: the value that each value becomes, by those
    operations that need not know the image."""
    values = np.arange(256)
    found = []
    for name in OPERATIONS:
        for sign in SIGNS:
            table = values
            if name == "brightness":
                table = np.float32(1 + sign * _strength(MOST_ENHANCEMENT)) * values
                table = np.floor(np.minimum(table.astype(np.float32), 255))
            elif name == "posterize":
                lost = round(_strength(MOST_BITS))
                table = values >> lost << lost
            elif name == "solarize":
                threshold = 255 - _strength(255)
                table = np.where(values < threshold, values, 255 - values)
            found.append(table)
    return np.array(found, np.float32)


def _looked_up(images, rows):
    n, _, _, channels = images.shape
    firsts = tf.reshape(
        256 * tf.range(n * channels, dtype=tf.int64), [n, 1, 1, channels]
    )
    places = firsts + tf.cast(images, tf.int64)
    flat = tf.reshape(places, [-1])
    counts = tf.math.unsorted_segment_sum(
        tf.ones(flat.shape, tf.float32), flat, n * channels * 256
    )
    counts = tf.cast(tf.reshape(counts, [n, channels, 256]), tf.float64)
    table = tf.gather(tf.constant(tables()), rows)[:, None]
    for name, values in (
        ("contrast", _contrast(images, rows)),
        ("autocontrast", _autocontrast(counts)),
        ("equalize", _equalize(counts)),
    ):
        table = tf.where(_is(name, rows)[..., 0], values, table)
    table = tf.broadcast_to(table, [n, channels, 256])
    return tf.gather(tf.reshape(table, [-1]), places)


def _contrast(images, rows):
    """float32 [n, 1, 256]: blended with the mean gray, which is a whole number."""
    _, height, width, _ = images.shape
    lines = tf.cast(tf.reduce_sum(_gray(images), [2, 3]), tf.int64)  # exact
    count = height * width
    mean = (2 * tf.reduce_sum(lines, 1) + count) // (2 * count)
    mean = tf.cast(mean, tf.float32)[:, None, None]
    values = tf.range(256, dtype=tf.float32)
    return _blend(mean, values, _factors(rows)[..., 0])


def _autocontrast(counts):
    """float32 [n, channels, 256]: the least value becomes 0 and the greatest 255."""
    values = tf.range(256, dtype=tf.float64)
    least = tf.reduce_min(tf.where(counts > 0, values, 256.0), 2, keepdims=True)
    greatest = tf.reduce_max(tf.where(counts > 0, values, -1.0), 2, keepdims=True)
    scale = 255 / tf.maximum(greatest - least, 1)
    # In the order and the precision of Pillow's.
    found = tf.floor(tf.clip_by_value(values * scale + -least * scale, 0, 255))
    return tf.cast(tf.where(greatest > least, found, values), tf.float32)


def _equalize(counts):
    """float32 [n, channels, 256]: values that all stand about equally often."""
    values = tf.range(256, dtype=tf.float64)
    greatest = tf.reduce_max(tf.where(counts > 0, values, -1.0), 2, keepdims=True)
    others = tf.reduce_sum(tf.where(values < greatest, counts, 0), 2, keepdims=True)
    # Half more, so that rounding does not count: a graph multiplies by 1 / 255.
    step = tf.floor((others + 0.5) / 255)
    below = tf.floor(step / 2) + tf.cumsum(counts, axis=2, exclusive=True)
    found = tf.minimum(tf.floor(below / tf.maximum(step, 1)), 255)
    return tf.cast(tf.where(step > 0, found, values), tf.float32)


# Images that are blended.


def _factors(rows):
    """float32 [n, 1, 1, 1]: of the image in a blend; above 1 it leads away from the
    other one."""
    factors = [1 + sign * _strength(MOST_ENHANCEMENT) for sign in SIGNS]
    signs = tf.gather(tf.constant(factors, tf.float32), rows % len(SIGNS))
    return signs[:, None, None, None]


def _blend(first, second, factor):
    """As Pillow's: cut off to whole numbers in 0..255."""
    return tf.floor(tf.clip_by_value(first + factor * (second - first), 0, 255))


def _blended(images, rows):
    is_color, is_sharpness = _is("color", rows), _is("sharpness", rows)
    others = tf.where(is_color, _gray(images), _smooth(images))
    blended = _blend(others, images, _factors(rows))
    return tf.where(is_color | is_sharpness, blended, images)


def _gray(images):
    """Pillow's (ITU-R BT.601): in units of 2**-16, which float32 has exactly."""
    if images.shape[-1] == 1:
        return images
    red, green, blue = (images[..., i : i + 1] for i in range(3))
    return tf.floor((19595 * red + 38470 * green + (7471 * blue + 32768)) * 2.0**-16)


def _smooth(images):
    """Means of 3x3 pixels in which the middle one counts five times; the edge of the
    image stays."""
    _, height, width, _ = images.shape
    sums = images[:, :-2] + images[:, 1:-1] + images[:, 2:]
    sums = sums[:, :, :-2] + sums[:, :, 1:-1] + sums[:, :, 2:]
    sums += 4 * images[:, 1:-1, 1:-1]
    edges = [[0, 0], [1, 1], [1, 1], [0, 0]]
    means = tf.pad(tf.floor(sums * (1 / 13) + 0.5), edges)
    is_inside = np.zeros((height, width, 1), bool)
    is_inside[1:-1, 1:-1] = True
    return tf.where(tf.constant(is_inside), means, images)
