"""Color and geometric operations on images, for the policies.

Each gives the values of Pillow's operation, up to its rounding. The images of a batch
that have an operation of the same kind go through it together.
"""

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# Operations and the units of their values.
OPERATIONS = (
    "identity",
    "shear_x",  # by this times the row
    "shear_y",  # by this times the column
    "translate_x",  # pixels, whole
    "translate_y",
    "rotate",  # degrees, multiples of 1 / PARTS, counterclockwise around the middle
    "brightness",  # factors: 1 does not change the image
    "color",
    "contrast",
    "sharpness",
    "posterize",  # bits that are lost
    "solarize",  # the value from which on values are inverted
    "autocontrast",
    "equalize",
    "blur",  # radius in pixels, the standard deviation, at most MAX_BLUR
)
MOVES = OPERATIONS[1:6]
MAX_BLUR = 2.0
MAX_DEGREES, PARTS = 135, 6

# The weights of red, green and blue (ITU-R BT.601) in units of 2**-16: sums of their
# products with whole values are exact in float32, and so the same in any order.
GRAY = 19595.0, 38470.0, 7471.0


def apply(
    images: tf.Tensor,
    operations: tf.Tensor,
    values: tf.Tensor,
    possible: Sequence[str] = OPERATIONS,
    *,
    bilinear: bool = False,
    on_gpu: bool = False,
) -> tf.Tensor:
    """Apply one operation to each image, float32 [n, height, width, 1 or 3].

    Pixels are whole numbers in 0..255. Operations are indices of OPERATIONS, int64 [n],
    values float64 [n]; those that are not `possible` are not computed. Moved pixels are
    `bilinear`, else the nearest ones. With `on_gpu` every operation is computed for all
    images, as the host would wait for shapes that depend on values.
    """
    kinds = {
        MOVES: functools.partial(_moved, bilinear=bilinear),
        ("brightness", "contrast", "posterize", "solarize", "autocontrast"): _mapped,
        ("color", "sharpness"): _filtered,
        ("equalize",): _equalized,
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
    changed = _whole(function(images, *columns))
    return tf.where(is_concerned[:, None, None, None], changed, images)


def _only(is_concerned, function, images, *columns):
    """Apply the function to the images that are concerned only."""
    n = images.shape[0]
    rows = tf.where(is_concerned)[:, 0]
    changed = _whole(function(*(tf.gather(x, rows) for x in (images, *columns))))
    ranks = tf.cumsum(tf.cast(is_concerned, tf.int64)) - 1
    positions = tf.where(is_concerned, n + ranks, np.arange(n))
    return tf.gather(tf.concat([images, changed], 0), positions)


def _whole(images):
    return tf.round(tf.clip_by_value(tf.cast(images, tf.float32), 0, 255))


def _is(name, operations):
    """Return whether an operation is the named one, bool [n, 1, 1, 1]."""
    return (operations == OPERATIONS.index(name))[:, None, None, None]


def _moved(images, operations, values, bilinear):
    """Apply an affine transform; 0 from outside of the image."""
    _, height, width, channels = images.shape
    values = values[:, None, None, None]

    def value(name):
        return tf.where(_is(name, operations), values, 0.0)[..., 0]

    # From a table, because cosines of TensorFlow depend on their position in a tensor.
    angles = np.arange(-MAX_DEGREES * PARTS, MAX_DEGREES * PARTS + 1) / PARTS
    row = tf.cast(tf.round(value("rotate") * PARTS), tf.int64) + len(angles) // 2
    cos, sin = (tf.gather(f(np.radians(angles)), row) for f in (np.cos, np.sin))
    # Middles of pixels, from the middle of the image.
    x = tf.range(width, dtype=tf.float64) - (width - 1) / 2
    y = (tf.range(height, dtype=tf.float64) - (height - 1) / 2)[:, None]
    shear_x, shear_y = value("shear_x"), value("shear_y")
    # Shears do not move the top and the left.
    columns = cos * x - sin * y + shear_x * (y + height / 2) - value("translate_x")
    rows = sin * x + cos * y + shear_y * (x + width / 2) - value("translate_y")
    columns, rows = columns + width / 2, rows + height / 2
    is_inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    flat = tf.reshape(images, [-1, channels])
    firsts = height * width * _count(images)[:, None, None]

    def pixels(column, row):
        column = tf.clip_by_value(column, 0, width - 1)
        row = tf.clip_by_value(row, 0, height - 1)
        positions = tf.cast(row * width + column, tf.int64)
        return tf.gather(flat, firsts + positions)

    if bilinear:
        left, top = tf.floor(columns - 0.5), tf.floor(rows - 0.5)
        across = tf.cast(columns - 0.5 - left, tf.float32)[..., None]
        down = tf.cast(rows - 0.5 - top, tf.float32)[..., None]
        lines = [
            (1 - across) * pixels(left, y) + across * pixels(left + 1, y)
            for y in (top, top + 1)
        ]
        moved = (1 - down) * lines[0] + down * lines[1]
    else:
        moved = pixels(tf.floor(columns), tf.floor(rows))
    return tf.where(is_inside[..., None], moved, 0.0)


def _mapped(images, operations, values):
    """Look up the operation on each of the 256 values, as pixels of one line."""
    channels = images.shape[3]
    values = tf.cast(values, tf.float32)[:, None, None, None]
    # In float64 sums of whole numbers are the same in any order.
    gray = tf.cast(tf.round(_gray(images)), tf.float64)
    mean = tf.cast(tf.reduce_mean(gray, [1, 2, 3], keepdims=True), tf.float32)
    least = tf.reduce_min(images, [1, 2], keepdims=True)
    extent = tf.reduce_max(images, [1, 2], keepdims=True) - least
    whole = np.tile(np.arange(256)[:, None], channels)
    levels = tf.constant(whole, tf.float32)
    lost = tf.cast(tf.where(_is("posterize", operations), values, 0), tf.int64)
    kept = tf.bitwise.left_shift(tf.bitwise.right_shift(whole, lost), lost)
    tables = {
        "brightness": levels * values,
        "contrast": mean + values * (levels - mean),
        "posterize": tf.cast(kept, tf.float32),
        "solarize": tf.where(levels < values, levels, 255 - levels),
        "autocontrast": tf.where(
            extent > 0, (levels - least) * (255 / tf.maximum(extent, 1)), levels
        ),
    }
    table = levels
    for name, values in tables.items():
        table = tf.where(_is(name, operations), values, table)
    return tf.gather(tf.reshape(_whole(table), [-1]), _table_indices(images))


def _table_indices(images):
    """Return the indices of the values in tables [n, 256, channels], int64."""
    channels = images.shape[3]
    firsts = 256 * channels * _count(images)[:, None, None, None]
    return firsts + channels * tf.cast(images, tf.int64) + np.arange(channels)


def _count(images):
    return tf.range(tf.shape(images, tf.int64)[0])


def _filtered(images, operations, values):
    """Blend the image with a gray or a smooth one, or extrapolate."""
    values = tf.cast(values, tf.float32)[:, None, None, None]
    other = tf.where(_is("color", operations), _gray(images), _smooth(images))
    return other + values * (images - other)


def _gray(images):
    if images.shape[-1] == 1:
        return images
    return tf.add_n([x * images[..., i : i + 1] for i, x in enumerate(GRAY)]) * 2.0**-16


def _smooth(images):
    """Return means of 3x3 pixels, the middle counted five times; the edge stays."""
    _, height, width, _ = images.shape
    sums = images[:, :-2] + images[:, 1:-1] + images[:, 2:]
    sums = sums[:, :, :-2] + sums[:, :, 1:-1] + sums[:, :, 2:]
    sums += 4 * images[:, 1:-1, 1:-1]
    means = tf.pad(sums * (1 / 13), [[0, 0], [1, 1], [1, 1], [0, 0]])
    is_inside = np.zeros((height, width, 1), bool)
    is_inside[1:-1, 1:-1] = True
    return tf.where(tf.constant(is_inside), means, images)


def _equalized(images, operations, values):
    """Make all values of a channel about equally frequent, by a lookup table."""
    channels, positions = images.shape[3], _table_indices(images)
    flat = tf.reshape(positions, [-1])
    counts = tf.math.unsorted_segment_sum(
        tf.ones_like(flat, tf.float32), flat, 256 * channels * tf.shape(images)[0]
    )
    counts = tf.cast(tf.reshape(counts, [-1, 256, channels]), tf.float64)
    levels = tf.range(256, dtype=tf.float64)[:, None]
    greatest = tf.reduce_max(tf.where(counts > 0, levels, -1.0), 1, keepdims=True)
    others = tf.reduce_sum(tf.where(levels < greatest, counts, 0), 1, keepdims=True)
    # Half more against rounding: a graph multiplies by 1 / 255.
    step = tf.floor((others + 0.5) / 255)
    below = tf.floor(step / 2) + tf.cumsum(counts, axis=1, exclusive=True)
    table = tf.where(step > 0, tf.floor(below / tf.maximum(step, 1)), levels)
    return tf.gather(tf.reshape(_whole(table), [-1]), positions)


def _blurred(images, operations, values):
    """Apply Pillow's Gaussian blur: three box blurs each way (Gwosdek et al. 2011)."""
    variance = tf.square(values)[:, None, None, None] * (1 / 3)  # of each mean
    # A box of 1 + 2 (whole + part) pixels; whole is 0 or 1.
    whole = tf.where(variance >= 2 / 3, tf.ones_like(variance), 0)
    part = (2 * whole + 1) * (3 * variance - whole * (whole + 1))
    part /= 6 * (tf.square(whole + 1) - variance)
    middle = 1 / (1 + 2 * (whole + part))
    near = middle * tf.where(whole > 0, tf.ones_like(part), part)
    far = middle * tf.where(whole > 0, part, 0)
    blurred = tf.cast(images, tf.float64)
    for axis in (2, 2, 2, 1, 1, 1):
        count = images.shape[axis]
        positions = np.clip(np.arange(-2, count + 2), 0, count - 1)
        wide = tf.gather(blurred, positions, axis=axis)
        a, b, c, d, e = (
            wide[:, k : k + count] if axis == 1 else wide[:, :, k : k + count]
            for k in range(5)
        )
        blurred = tf.round(middle * c + near * (b + d) + far * (a + e))
    return blurred
