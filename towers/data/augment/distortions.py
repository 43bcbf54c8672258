"""Distortions that training may add to an augmentation, image by image.

Colors are jittered first, then comes the augmentation, except for crops that are made
as a file is read; then rectangles and squares are erased.
"""

import tensorflow as tf

from towers.data.augment.augmentation import Augment, choose
from towers.data.randomness import Draw


def extend(
    augment: Augment,
    *,
    color_jitter: float = 0.0,
    random_gray: float = 0.0,
    random_erasing: float = 0.0,
    cutout_size: int = 0,
) -> Augment:
    """Add distortions to an augmentation in training; 0 adds nothing.

    ValueError if the square of side `cutout_size` is larger than the images.
    """
    height, width, _ = augment.image_shape
    if cutout_size > min(height, width):
        images = f"images of {height}x{width}"
        raise ValueError(f"cutout_size={cutout_size} with {images}; lower it")

    def extended(train):
        def train_with_distortions(images, draw):
            if color_jitter:
                images = jitter_colors(images, draw, color_jitter)
            if random_gray:
                images = gray_randomly(images, draw, random_gray)
            images = train(images, draw)
            if random_erasing:
                images = erase_randomly(images, draw, random_erasing)
            if cutout_size:
                images = cut_out(images, draw, cutout_size)
            return images

        return train_with_distortions

    return augment.with_train(extended)


def gray_randomly(images: tf.Tensor, draw: Draw, probability: float) -> tf.Tensor:
    """Make some images [n, height, width, 3 or 1] gray, by "random_gray" [n, 1]."""
    is_gray = draw("random_gray", [images.shape[0], 1]) < probability
    images = tf.cast(images, tf.float32)
    return tf.where(is_gray[..., None, None], _gray(images), images)


def jitter_colors(images: tf.Tensor, draw: Draw, strength: float) -> tf.Tensor:
    """Multiply brightness, contrast and saturation of each image by random factors.

    They are uniform in [max(0, 1 - strength), 1 + strength]. Contrast is the distance
    from the image's mean gray, saturation the distance from each pixel's own gray
    (ITU-R BT.601). Draws "color_jitter" [n, 3].
    """
    n, _, _, channels = images.shape
    low = max(0.0, 1 - strength)
    factors = low + (1 + strength - low) * draw("color_jitter", [n, 3])
    factors = tf.reshape(factors, [n, 3, 1, 1, 1])
    brightness, contrast, saturation = tf.unstack(factors, axis=1)
    images = tf.cast(images, tf.float32) * brightness
    mean = tf.reduce_mean(_gray(images), [1, 2], keepdims=True)
    images = mean + (images - mean) * contrast
    if channels == 3:
        gray = _gray(images)
        images = gray + (images - gray) * saturation
    return tf.clip_by_value(images, 0.0, 255.0)


def _gray(images):
    if images.shape[-1] == 1:
        return images
    # Five times as fast as a product with the weights and a sum. Not a sum of three: a
    # graph adds them in the order of its nodes' names, so the bits would differ from
    # an eager call.
    red, green, blue = (images[..., i : i + 1] for i in range(3))
    return 0.114 * blue + 0.587 * (green + (0.299 / 0.587) * red)


def erase_randomly(images: tf.Tensor, draw: Draw, probability: float) -> tf.Tensor:
    """Erase a random rectangle of some standardized images, with a probability.

    Its area is 2 % to 40 % of the image, its height over its width 0.3 to 1 / 0.3, as
    for CIFAR in Zhong et al. 2017, arXiv:1708.04896. Draws "random_erasing" [n, 5].
    """
    n, height, width, _ = images.shape
    numbers = draw("random_erasing", [n, 5])
    erased, area, aspect, row, column = tf.unstack(numbers, axis=1)
    area = 0.02 * height * width + 0.38 * height * width * area
    aspect = 0.3 + (1 / 0.3 - 0.3) * aspect
    heights = tf.clip_by_value(tf.round(tf.sqrt(area * aspect)), 1, height)
    widths = tf.clip_by_value(tf.round(tf.sqrt(area / aspect)), 1, width)
    tops = choose(row, height - heights + 1)
    lefts = choose(column, width - widths + 1)
    heights *= tf.cast(erased < probability, tf.float32)
    return images * (1 - rectangles(tops, lefts, heights, widths, height, width))


def cut_out(images: tf.Tensor, draw: Draw, size: int) -> tf.Tensor:
    """Set a square of each standardized image to 0, the mean color.

    Its center, "cutout" [n, 2], is any pixel (DeVries and Taylor 2017,
    arXiv:1708.04552).
    """
    n, height, width, _ = images.shape
    centers = choose(draw("cutout", [n, 2]), tf.constant([height, width], tf.float32))
    tops, lefts = tf.unstack(centers - size // 2, axis=1)
    sizes = tf.fill([n], float(size))
    return images * (1 - rectangles(tops, lefts, sizes, sizes, height, width))


def rectangles(
    tops: tf.Tensor,
    lefts: tf.Tensor,
    heights: tf.Tensor,
    widths: tf.Tensor,
    height: int,
    width: int,
) -> tf.Tensor:
    """Return masks float32 [n, height, width, 1], 1 in a rectangle each, 0 outside."""

    def inside(first, length, count):
        positions = tf.range(count, dtype=tf.float32)
        return (positions >= first[:, None]) & (positions < (first + length)[:, None])

    rows, columns = inside(tops, heights, height), inside(lefts, widths, width)
    return tf.cast(rows[:, :, None, None] & columns[:, None, :, None], tf.float32)
