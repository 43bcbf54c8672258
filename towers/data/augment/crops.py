"""Crops of random sizes and shapes, resized to the size of the images.

They are torchvision's `RandomResizedCrop` for a whole batch: of the image files if a
source reads such (`Source.reads_crops`), else of the stored images.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.data.augment.augmentation import (
    CROP_SCALE,
    Augment,
    Moments,
    Shape,
    choose,
    pad_crop_flip,
    standardize,
)
from towers.data.randomness import Draw

RATIO = (3 / 4, 4 / 3)  # width over height
ATTEMPTS = 10

LARGE = 64  # shorter side from which `by_size` takes crops of random sizes


class Boxes(NamedTuple):
    """Rectangles in the images of a batch: whole numbers, float32 [n] each."""

    tops: tf.Tensor
    lefts: tf.Tensor
    heights: tf.Tensor
    widths: tf.Tensor


def random_resized_crop(
    image_shape: Shape,
    mean: Moments,
    std: Moments,
    crop_scale: tuple[float, float] = CROP_SCALE,
    whole_pixels: bool = False,
) -> Augment:
    """Resize a crop of `crop_scale` of the area and of the ratio 3:4 to 4:3; flip it.

    Source: Szegedy et al. 2014, arXiv:1409.4842, section 6. With `whole_pixels` the
    values are rounded before they are standardized.
    """
    evaluate = functools.partial(standardize, mean=mean, std=std)

    def train(images, draw):
        images = crop_resize_flip(images, draw, crop_scale)
        return evaluate(tf.round(images) if whole_pixels else images)

    def train_on_crops(images, draw):
        return evaluate(flip(images, draw))

    return Augment(train, evaluate, image_shape, train_on_crops, crop_scale)


def by_size(
    image_shape: Shape,
    mean: Moments,
    std: Moments,
    crop_scale: tuple[float, float] = CROP_SCALE,
    whole_pixels: bool = False,
) -> Augment:
    """Choose `pad_crop_flip` if the shorter side is below LARGE, else random crops."""
    if min(image_shape[:2]) < LARGE:
        return pad_crop_flip(image_shape, mean, std)
    return random_resized_crop(image_shape, mean, std, crop_scale, whole_pixels)


def flip(images: tf.Tensor, draw: Draw) -> tf.Tensor:
    """Mirror each image [n, h, w, channels] with probability 1/2; return float32."""
    images = tf.cast(images, tf.float32)
    is_flipped = draw("flip", [images.shape[0], 1]) >= 0.5
    return tf.where(is_flipped[..., None, None], images[:, :, ::-1], images)


def crop_resize_flip(
    images: tf.Tensor, draw: Draw, crop_scale: tuple[float, float] = CROP_SCALE
) -> tf.Tensor:
    """Resize a random crop of each image, and mirror by "flip" [n, 1]; float32."""
    n, height, width, _ = images.shape
    boxes = random_boxes(draw_numbers(draw, n, crop_scale), height, width)
    return resized(images, boxes, draw("flip", [n, 1]) >= 0.5)


def draw_numbers(
    draw: Draw, n: int, crop_scale: tuple[float, float] = CROP_SCALE
) -> tf.Tensor:
    """Draw the random numbers of the crops of n images, float32 [n, ATTEMPTS + 1, 2].

    An attempt has two: the share of the area, uniform in `crop_scale`, and one for the
    aspect; the last two are for the position. Draws "crop_size" and "crop_place".
    """
    low, high = crop_scale
    shares, aspects = tf.unstack(draw("crop_size", [n, ATTEMPTS, 2]), axis=2)
    sizes = tf.stack([low + (high - low) * shares, aspects], 2)
    return tf.concat([sizes, draw("crop_place", [n, 2])[:, None]], 1)


def random_box(numbers: np.ndarray, height: int, width: int) -> tuple[int, ...]:
    """Return top, left, height and width of a rectangle as torchvision draws it.

    Of the ATTEMPTS it is the first that fits, else the middle in the nearest ratio.
    """
    *sizes, (row, column) = numbers.tolist()
    low, high = map(math.log, RATIO)
    for area_share, number in sizes:
        area = height * width * area_share
        aspect = math.exp(low + (high - low) * number)
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 1 <= h <= height and 1 <= w <= width:
            return int(row * (height - h + 1)), int(column * (width - w + 1)), h, w
    return _middle_box(height, width)


def _middle_box(height, width):
    h, w = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def random_boxes(numbers: tf.Tensor, height: int, width: int) -> Boxes:
    """Return `random_box` for a batch, from numbers [n, ATTEMPTS + 1, 2]."""
    sizes, positions = numbers[:, :-1], numbers[:, -1]
    area_share, aspect = tf.unstack(sizes, axis=2)
    areas = height * width * area_share
    low, high = map(math.log, RATIO)
    aspects = tf.exp(low + (high - low) * aspect)
    heights = tf.round(tf.sqrt(areas / aspects))
    widths = tf.round(tf.sqrt(areas * aspects))
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    fits = tf.cast(fits, tf.float32)
    # 1 at the first that fits; `argmax` may return any of equal entries.
    is_first = fits * tf.cast(tf.cumsum(fits, axis=1, exclusive=True) < 1, tf.float32)
    heights = tf.reduce_sum(heights * is_first, 1)
    widths = tf.reduce_sum(widths * is_first, 1)
    rows, columns = tf.unstack(positions, axis=1)
    tops = choose(rows, height - heights + 1)
    lefts = choose(columns, width - widths + 1)
    middle = map(float, _middle_box(height, width))
    pairs = zip((tops, lefts, heights, widths), middle, strict=True)
    return Boxes(*(tf.where(heights > 0, x, y) for x, y in pairs))


def resized(images: tf.Tensor, boxes: Boxes, is_flipped: tf.Tensor) -> tf.Tensor:
    """Enlarge a box of each image bilinearly, flipped by `is_flipped`; float32."""
    n, height, width, channels = images.shape
    images = tf.cast(images, tf.float32)
    counts = functools.partial(tf.range, dtype=tf.float32)
    upper, lower, down = _between(counts(height)[None], boxes.heights, height)
    columns = tf.where(is_flipped, width - 1 - counts(width), counts(width))
    left, right, across = _between(columns, boxes.widths, width)

    # On a GPU int32 is computed by the host.
    tops, lefts = (tf.cast(x, tf.int64)[:, None] for x in boxes[:2])
    firsts = tops + height * tf.range(n, dtype=tf.int64)[:, None]
    rows = tf.reshape(images, [n * height, width * channels])
    first, second = (tf.gather(rows, firsts + x) for x in (upper, lower))
    images = first + down[:, :, None] * (second - first)

    firsts = width * tf.reshape(tf.range(n * height, dtype=tf.int64), [n, height, 1])
    pixels = tf.reshape(images, [n * height * width, channels])
    first, second = (
        tf.gather(pixels, firsts + (lefts + x)[:, None]) for x in (left, right)
    )
    return first + across[:, None, :, None] * (second - first)


def _between(positions, lengths, size):
    """Return the neighbors in a part of the image of positions of the result.

    They are int64 [n, size] twice; the share of the second is float32 [n, size].
    """
    # Not a division: see `augmentation.standardize`.
    centers = (positions + 0.5) * (lengths * (1 / size))[:, None] - 0.5
    last = lengths[:, None] - 1
    centers = tf.clip_by_value(centers, 0.0, last)
    first = tf.floor(centers)
    second = tf.minimum(first + 1, last)
    return tf.cast(first, tf.int64), tf.cast(second, tf.int64), centers - first
