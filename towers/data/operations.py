"""Operations on the colors and places of pixels, of which the policies are made.

On whole pixel values each gives what Pillow gives, bit for bit on a CPU.

An operation moves pixels, or looks values up in a table, or blends the image with
another one made of it, or blurs it. The images of a batch that have one of the same
kind go through it together.
"""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# Each with its value.
OPERATIONS = (
    "identity",
    "shear_x",  # by this times the row
    "shear_y",  # by this times the column
    "translate_x",  # pixels, whole
    "translate_y",
    "rotate",  # degrees, multiples of 1 / PARTS, counterclockwise around the middle
    "brightness",  # factors: 1 leaves the image as it is
    "color",
    "contrast",
    "sharpness",
    "posterize",  # bits that are lost
    "solarize",  # the value from which on values are inverted
    "autocontrast",
    "equalize",
    "blur",  # radius in pixels, the standard deviation, at most MOST_BLUR
)
MOVES = OPERATIONS[1:6]
BY_HISTOGRAM = "autocontrast", "equalize"
MOST_BLUR = 2.0
MOST_DEGREES, PARTS = 135, 6

# Pillow's fixed-point numbers for places of pixels have so many bits of fraction, and
# those for the weights of a blur.
FRACTION_BITS, WEIGHT_BITS = 16, 24


def apply(
    images: tf.Tensor,
    operations: tf.Tensor,
    values: tf.Tensor,
    possible: Sequence[str] = OPERATIONS,
    *,
    bilinear: bool = False,
    on_gpu: bool = False,
) -> tf.Tensor:
    """One operation on each image.

    Args:
        images: float32 [n, height, width, 1 or 3], whole numbers in 0..255.
        operations: int64 [n], places in OPERATIONS.
        values: float64 [n], of the operations, see there.
        possible: the operations that may occur; others are not computed.
        bilinear: moved pixels are interpolated, as by Pillow, and not the nearest.
        on_gpu: every operation is computed of all images: for a shape that depends on
            values the host would wait. The result is the same.

    Returns:
        Images as the given ones.
    """
    kinds = {
        MOVES: _interpolated if bilinear else _nearest,
        ("brightness", "contrast", "posterize", "solarize"): _looked_up,
        BY_HISTOGRAM: _equalized,
        ("color",): _colored,
        ("sharpness",): _sharpened,
        ("blur",): _blurred,
    }
    for names, function in kinds.items():
        if set(names) & set(possible):
            numbers = [OPERATIONS.index(name) for name in names]
            is_concerned = tf.reduce_any(operations[:, None] == numbers, 1)
            changed = _of_all if on_gpu else _only
            images = changed(is_concerned, function, images, operations, values)
    return images


def _of_all(is_concerned, function, images, *columns):
    """As `_only`; the function is called with all images."""
    changed = function(images, *columns)
    return tf.where(is_concerned[:, None, None, None], changed, images)


def _only(is_concerned, function, images, *columns):
    """The images, of which the function has changed those that are concerned; it is
    called with these, and the entries of the columns for them."""
    n = images.shape[0]
    rows = tf.where(is_concerned)[:, 0]
    changed = function(*(tf.gather(x, rows) for x in (images, *columns)))
    ranks = tf.cumsum(tf.cast(is_concerned, tf.int64)) - 1
    places = tf.where(is_concerned, n + ranks, np.arange(n))
    return tf.gather(tf.concat([images, changed], 0), places)


def _is(name, operations):
    """bool [n]: whether an operation is the named one."""
    return operations == OPERATIONS.index(name)


# Pixels that move.


def _matrices(operations, values, height, width):
    """float64 [6, n]: a to f, by which the pixel at (column x, row y) is that of the
    image at (a x + b y + c, d x + e y + f), as Pillow has them."""

    def value(name, otherwise=0.0):
        return tf.where(_is(name, operations), values, otherwise)

    # From a table, because cosines of TensorFlow depend on their place in a tensor.
    angles = np.arange(-MOST_DEGREES * PARTS, MOST_DEGREES * PARTS + 1) / PARTS
    rows = tf.cast(tf.round(value("rotate") * PARTS), tf.int64) + len(angles) // 2
    cosines, sines = (
        tf.gather(np.array([round(f(-math.radians(x)), 15) for x in angles]), rows)
        for f in (math.cos, math.sin)
    )
    x, y = width / 2, height / 2
    return tf.stack(
        [
            cosines,
            value("shear_x", sines),
            x - cosines * x - sines * y - value("translate_x"),
            value("shear_y", -sines),
            cosines,
            y + sines * x - cosines * y - value("translate_y"),
        ]
    )


def _places(matrices, height, width, first):
    """Columns and rows [n, height, width] of the image from which pixels come; `first`
    is the place of the first ones."""
    # On a GPU the host computes Unpack of int64, and everything of int32. New axes in
    # the slices of a Pack are lost by Grappler (TensorFlow 2.21).
    a, b, c, d, e, f = (tf.reshape(matrices[i], [-1, 1, 1]) for i in range(6))
    x, y = (first + tf.range(count, dtype=matrices.dtype) for count in (width, height))
    x, y = x[None, None, :], y[None, :, None]
    return a * x + b * y + c, d * x + e * y + f


def _nearest(images, operations, values):
    """The nearest pixel; 0 from outside of the image."""
    _, height, width, _ = images.shape
    a, b, c, d, e, f = tf.unstack(_matrices(operations, values, height, width))
    centers = tf.stack([a, b, c + 0.5 * (a + b), d, e, f + 0.5 * (d + e)])
    fixed = tf.cast(tf.floor(centers * 2.0**FRACTION_BITS + 0.5), tf.int64)
    shift = tf.constant(FRACTION_BITS, tf.int64)
    columns, rows = (
        tf.bitwise.right_shift(x, shift) for x in _places(fixed, height, width, 0)
    )
    is_inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    pixels = _pixels(images, tf.where(is_inside, rows * width + columns, 0))
    return tf.where(is_inside[..., None], pixels, 0.0)


def _interpolated(images, operations, values):
    """Between the four nearest pixels, cut off to a whole number; 0 from outside of the
    image."""
    _, height, width, _ = images.shape
    matrices = _matrices(operations, values, height, width)
    columns, rows = _places(matrices, height, width, 0.5)
    is_inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    left, top = tf.floor(columns - 0.5), tf.floor(rows - 0.5)
    across, down = ((columns - 0.5) - left)[..., None], ((rows - 0.5) - top)[..., None]

    def line(below):
        y = tf.clip_by_value(top + below, 0, height - 1)
        first, second = (
            tf.cast(_pixels(images, tf.cast(y * width + x, tf.int64)), tf.float64)
            for x in (tf.clip_by_value(left + k, 0, width - 1) for k in (0, 1))
        )
        return first + (second - first) * across

    first, second = line(0), line(1)
    pixels = tf.cast(tf.floor(first + (second - first) * down), tf.float32)
    return tf.where(is_inside[..., None], pixels, 0.0)


def _pixels(images, places):
    """[n, height, width, channels]: those at some places, int64 [n, height, width],
    counted row by row in each image."""
    _, height, width, channels = images.shape
    firsts = height * width * _count(images)[:, None, None]
    return tf.gather(tf.reshape(images, [-1, channels]), firsts + places)


def _count(images):
    """int64 [n]: 0, 1, ..."""
    return tf.range(tf.shape(images, tf.int64)[0])


# Values that are looked up.


def _looked_up(images, operations, values):
    values = tf.cast(values, tf.float32)[:, None, None]
    levels = tf.range(256, dtype=tf.float32)[None, None]
    lost = tf.where(_is("posterize", operations)[:, None, None], values, 0)
    lost, whole = tf.cast(lost, tf.int64), tf.range(256, dtype=tf.int64)
    shifted = tf.bitwise.left_shift(tf.bitwise.right_shift(whole, lost), lost)
    tables = tf.cast(shifted, tf.float32)
    for name, table in (
        ("brightness", _blend(0.0, levels, values)),
        ("contrast", _blend(_mean_gray(images), levels, values)),
        ("solarize", tf.where(levels < values, levels, 255 - levels)),
    ):
        tables = tf.where(_is(name, operations)[:, None, None], table, tables)
    places = 256 * _count(images)[:, None, None, None] + tf.cast(images, tf.int64)
    return tf.gather(tf.reshape(tables, [-1]), places)


def _equalized(images, operations, values):
    """By a table for each channel, which depends on how often its values occur."""
    channels = images.shape[3]
    firsts = channels * _count(images)[:, None, None, None] + np.arange(channels)
    places = 256 * firsts + tf.cast(images, tf.int64)
    flat = tf.reshape(places, [-1])
    counts = tf.math.unsorted_segment_sum(
        tf.ones_like(flat, tf.float32), flat, 256 * channels * tf.shape(images)[0]
    )
    counts = tf.cast(tf.reshape(counts, [-1, channels, 256]), tf.float64)
    is_equalized = _is("equalize", operations)[:, None, None]
    tables = tf.where(is_equalized, _equalize(counts), _autocontrast(counts))
    return tf.gather(tf.reshape(tables, [-1]), places)


def _mean_gray(images):
    """float32 [n, 1, 1]: a whole number."""
    _, height, width, _ = images.shape
    lines = tf.cast(tf.reduce_sum(_gray(images), [2, 3]), tf.int64)  # exact
    count = height * width
    mean = (2 * tf.reduce_sum(lines, 1) + count) // (2 * count)
    return tf.cast(mean, tf.float32)[:, None, None]


def _autocontrast(counts):
    """float32 [n, channels, 256]: the least value becomes 0 and the greatest 255."""
    values = tf.range(256, dtype=tf.float64)
    least = tf.reduce_min(tf.where(counts > 0, values, 256.0), 2, keepdims=True)
    greatest = tf.reduce_max(tf.where(counts > 0, values, -1.0), 2, keepdims=True)
    scale = 255 / tf.maximum(greatest - least, 1)
    # In the order and the precision of Pillow's.
    table = tf.floor(tf.clip_by_value(values * scale + -least * scale, 0, 255))
    return tf.cast(tf.where(greatest > least, table, values), tf.float32)


def _equalize(counts):
    """float32 [n, channels, 256]: values that all stand about equally often."""
    values = tf.range(256, dtype=tf.float64)
    greatest = tf.reduce_max(tf.where(counts > 0, values, -1.0), 2, keepdims=True)
    others = tf.reduce_sum(tf.where(values < greatest, counts, 0), 2, keepdims=True)
    # Half more, so that rounding does not count: a graph multiplies by 1 / 255.
    step = tf.floor((others + 0.5) / 255)
    below = tf.floor(step / 2) + tf.cumsum(counts, axis=2, exclusive=True)
    table = tf.minimum(tf.floor(below / tf.maximum(step, 1)), 255)
    return tf.cast(tf.where(step > 0, table, values), tf.float32)


# Images that are blended.


def _blend(first, second, factor):
    """As Pillow's: cut off to whole numbers in 0..255."""
    return tf.floor(tf.clip_by_value(first + factor * (second - first), 0, 255))


def _colored(images, operations, values):
    return _blend(_gray(images), images, _factors(values))


def _sharpened(images, operations, values):
    return _blend(_smooth(images), images, _factors(values))


def _factors(values):
    return tf.cast(values, tf.float32)[:, None, None, None]


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


# Images that are blurred.


def _blurred(images, operations, values):
    """Pillow's Gaussian blur: three times the weighted mean of up to five pixels along
    the rows, then the columns (Gwosdek et al. 2011), rounded to whole numbers. The
    pixels of the edge go on outside of the image."""
    middle, near, far = (x[:, None, None, None] for x in _weights(values))
    blurred, unit = tf.cast(images, tf.float64), 2.0**-WEIGHT_BITS
    for axis in (2, 2, 2, 1, 1, 1):
        count = images.shape[axis]
        places = np.clip(np.arange(-2, count + 2), 0, count - 1)
        wide = tf.gather(blurred, places, axis=axis)
        a, b, c, d, e = (
            wide[:, k : k + count] if axis == 1 else wide[:, :, k : k + count]
            for k in range(5)
        )
        blurred = tf.floor((middle * c + near * (b + d) + far * (a + e)) * unit + 0.5)
    return tf.cast(blurred, tf.float32)


def _weights(radii):
    """float64 [n]: of the pixel, of its neighbors and of those next to them, whole
    numbers in units of 2**-WEIGHT_BITS; from the length of the box, in float32."""
    # Not a division: see `augment.standardize`.
    squares = tf.cast(tf.square(tf.cast(radii, tf.float32)), tf.float64) * (1 / 3)
    squares = tf.cast(squares, tf.float32)
    lengths = tf.sqrt(12 * tf.cast(squares, tf.float64) + 1)
    whole = tf.floor((tf.cast(lengths, tf.float32) - 1) * 0.5)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * squares)
    part /= 6 * (squares - tf.square(whole + 1))
    inner = tf.floor(2.0**WEIGHT_BITS / (2 * (whole + part) + 1))
    inner, whole = tf.cast(inner, tf.float64), tf.cast(whole, tf.float64)
    outer = tf.floor((2.0**WEIGHT_BITS - (2 * whole + 1) * inner) * 0.5)
    is_wide = whole > 0
    return inner, tf.where(is_wide, inner, outer), tf.where(is_wide, outer, 0)
