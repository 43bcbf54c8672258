"""Augmentation: from stored pixels to the input of the network, a batch at a time.

All functions take images [n, height, width, channels], an `Augment` stored ones, and
return float32. Those for training also take `draw`, which gives the step's random
numbers, uniform in [0, 1); they hold no state.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.config import factories
from towers.config.choices import find
from towers.data.randomness import Draw, uniform
from towers.errors import ConfigError

Shape = tuple[int, int, int]  # height, width, channels
Moments = Sequence[float]  # of each channel

TUTORIAL_SIZE = 24
PADDING = 4
CROP_SCALE = (0.08, 1.0)

# Number of images to try an augmentation in a file on, and maximum number of values.
NUM_TRIED = 32
MAX_TRIED_VALUES = 2**22


@dataclasses.dataclass(frozen=True)
class Augment:
    """The augmentation of a data set's images, [n, height, width, channels]."""

    # (images, draw) -> float32 images, random. The images are the stored ones, uint8,
    # or float32 in 0..255 of other pixels or after distortions.
    train: Callable[[tf.Tensor, Draw], tf.Tensor]
    # Stored images -> float32 images, the same every time.
    evaluate: Callable[[tf.Tensor], tf.Tensor]
    image_shape: Shape  # of the results
    # As `train`, for random crops, see `Source.read`; None if it takes none.
    train_on_crops: Callable[[tf.Tensor, Draw], tf.Tensor] | None = None
    crop_scale: tuple[float, float] = CROP_SCALE  # bounds of the share of their area

    def with_train(self, wrap: Callable[[Callable], Callable]) -> "Augment":
        """Return the same with `train` and `train_on_crops` wrapped."""
        train, on_crops = wrap(self.train), self.train_on_crops
        on_crops = on_crops and wrap(on_crops)
        return dataclasses.replace(self, train=train, train_on_crops=on_crops)

    def with_scale(self, scale: Callable[[tf.Tensor], tf.Tensor]) -> "Augment":
        """Return the same for stored images that `scale` makes float32 in 0..255."""
        scaled = self.with_train(lambda f: lambda images, draw: f(scale(images), draw))
        evaluate = self.evaluate
        return dataclasses.replace(scaled, evaluate=lambda x: evaluate(scale(x)))


def none(image_shape: Shape, mean: Moments, std: Moments) -> Augment:
    """Standardize images by mean and standard deviation only."""
    evaluate = functools.partial(standardize, mean=mean, std=std)
    return Augment(lambda images, draw: evaluate(images), evaluate, image_shape)


def tutorial(image_shape: Shape, mean: Moments, std: Moments) -> Augment:
    """Augment as the CIFAR-10 tutorial: 24x24 crop, flip, brightness and contrast."""
    height, width, channels = image_shape
    size = TUTORIAL_SIZE
    if min(height, width) < size:
        why = f"crops {size}x{size} images, but the data set's are {height}x{width}"
        raise ValueError(f"augment=tutorial {why}; choose --augment=pad_crop_flip")

    def train(images, draw):
        n = images.shape[0]
        images = crop_and_flip(tf.cast(images, tf.float32), draw, size, size)
        images += 63 * (2 * draw("brightness", [n, 1, 1, 1]) - 1)
        contrast = 0.2 + 1.6 * draw("contrast", [n, 1, 1, 1])
        wide = tf.tile(tf.reduce_mean(images, [1, 2]), [1, size])[:, None, :]
        rows = (flat_rows(images) - wide) * contrast[:, 0] + wide
        images = tf.reshape(rows, [n, size, size, channels])
        return tf.image.per_image_standardization(images)

    def evaluate(images):
        top, left = (height - size) // 2, (width - size) // 2
        images = images[:, top : top + size, left : left + size]
        return tf.image.per_image_standardization(tf.cast(images, tf.float32))

    return Augment(train, evaluate, (size, size, channels))


def pad_crop_flip(image_shape: Shape, mean: Moments, std: Moments) -> Augment:
    """Crop the image padded by 4 pixels of the mean, and flip it (He et al. 2015)."""
    height, width, _ = image_shape
    evaluate = functools.partial(standardize, mean=mean, std=std)

    def train(images, draw):
        images = evaluate(images)
        edges = [PADDING, PADDING]
        images = tf.pad(images, [[0, 0], edges, edges, [0, 0]])
        return crop_and_flip(images, draw, height, width)

    return Augment(train, evaluate, image_shape)


def translate_flip(
    image_shape: Shape, mean: Moments, std: Moments, pixels: int = 2
) -> Augment:
    """Translate by up to `pixels`, mirrored at the edges, and flip in alternation.

    Each image is mirrored at random in the first epoch, then every other epoch (Jordan
    2024, arXiv:2404.00498, section 3.6); with a `BalancedOrder` at random.
    """
    height, width, _ = image_shape
    if min(height, width) <= pixels:
        why = f"{pixels} pixels are mirrored at the edges of {height}x{width} images"
        raise ValueError(f"augment: {why}; choose --augment=none")
    evaluate = functools.partial(standardize, mean=mean, std=std)

    def train(images, draw):
        counts = tf.fill([2], 2.0 * pixels + 1)
        corners = tf.cast(choose(draw.per_view("translation", 2), counts), tf.int64)
        odd = tf.cast(draw.views % 2, tf.bool)[:, None]
        is_flipped = (draw.per_example("flip", 1) < 0.5) != odd
        images = tf.cast(images, tf.float32)
        images = windows(images, corners - pixels, is_flipped, height, width, True)
        return evaluate(images)

    return Augment(train, evaluate, image_shape)


def create_augment(
    name: str,
    image_shape: Shape,
    mean: Moments,
    std: Moments,
    crop_scale: tuple[float, float] = CROP_SCALE,
    policy: str = "none",
    on_gpu: bool = False,
    **policy_options: Any,
) -> Augment:
    """Create an augmentation by its name, followed in training by a policy.

    `image_shape` is that of the stored images; `mean` and `std` are of the training
    images, per channel, in units of 0..255; the policy gets the `policy_options` that
    its signature names. ValueError if the augmentation does not fit the images; or one
    in a file has a state, or standardizes by other moments before a policy.
    """
    augment = factories.create(
        "augment",
        name,
        image_shape=image_shape,
        mean=mean,
        std=std,
        crop_scale=crop_scale,
        on_gpu=on_gpu,
        whole_pixels=policy != "none",
    )
    if not isinstance(augment, Augment):
        kind = type(augment).__name__
        way = "return a towers.data.augment.augmentation.Augment"
        raise ConfigError(f"augment={name}: gave {kind}; {way}")
    if find("augment", name).is_in_a_file:
        moments = None if policy == "none" else (mean, std)
        _validate(name, augment, image_shape, moments)
    if policy == "none":
        return augment
    operate = factories.resolve("policy", policy)
    options = factories.named_by(operate, policy_options | {"on_gpu": on_gpu})

    def followed(train):
        def train_with_policy(images, draw):
            if images.dtype != np.uint8:  # jittered
                images = tf.round(images)
            images = pixels(train(images, draw), mean, std)
            return standardize(operate(images, draw, **options), mean, std)

        return train_with_policy

    return augment.with_train(followed)


def _validate(name, augment, image_shape, moments):
    """Refuse an augmentation with a state, or that standardizes by other moments."""
    count = max(2, min(NUM_TRIED, MAX_TRIED_VALUES // math.prod(image_shape)))
    with tf.device("CPU:0"):
        indices = tf.range(count, dtype=tf.int64)
        step = tf.constant(0, tf.int64)
        draw = Draw(0, step, indices, tf.zeros_like(indices))
        images = 256 * uniform(0, "images", step, [count, *image_shape])
        images = tf.cast(images, tf.uint8)
        for part in ("train", "train_on_crops", "evaluate"):
            function = getattr(augment, part)
            if function is None:
                continue
            more = () if part == "evaluate" else (draw,)
            first, second = (np.asarray(function(images, *more)) for _ in range(2))
            if not np.array_equal(first, second, equal_nan=True):
                raise ConfigError(
                    f"augment={name}: its {part} gives other images for the same seed "
                    "and step; take all random numbers from draw(purpose, shape), not "
                    "from a layer or generator with a state"
                )
        evaluated = tf.cast(augment.evaluate(images), tf.float32)
        if not moments or evaluated.shape != images.shape:
            return
        if not np.array_equal(pixels(evaluated, *moments), images):
            why = "does not standardize by the given mean and std, as policies need"
            way = "use towers.data.augment.augmentation.standardize, or --policy=none"
            raise ConfigError(f"augment={name}: {why}; {way}")


def standardize(images: tf.Tensor, mean: Moments, std: Moments) -> tf.Tensor:
    """Return (pixel - mean) / std per channel, in 0..255; a std of 0 counts as 1."""
    # Not a division: a graph turns one by a constant into this product, an eager call
    # and `tf.data` do not, and a batch should be the same bits in all of them.
    factors = [1 / (value or 1) for value in std]
    *_, width, _ = images.shape
    means, factors = (tf.constant([*x] * width, tf.float32) for x in (mean, factors))
    rows = (tf.cast(flat_rows(images), tf.float32) - means) * factors
    return tf.reshape(rows, tf.shape(images))


def pixels(images: tf.Tensor, mean: Moments, std: Moments) -> tf.Tensor:
    """Return whole pixel values, float32 in 0..255, nearest to standardized images."""
    *_, width, _ = images.shape
    factors = [value or 1 for value in std]
    means, factors = (tf.constant([*x] * width, tf.float32) for x in (mean, factors))
    rows = tf.round(flat_rows(images) * factors + means)
    return tf.reshape(tf.clip_by_value(rows, 0.0, 255.0), images.shape)


def flat_rows(images: tf.Tensor) -> tf.Tensor:
    """Return [n, height, width * channels]: a long last axis is faster."""
    _, height, width, channels = images.shape
    return tf.reshape(images, [-1, height, width * channels])


def crop_and_flip(images: tf.Tensor, draw: Draw, height: int, width: int) -> tf.Tensor:
    """Return a random window of each image, by "crop" [n, 2] and "flip" [n, 1]."""
    n, full_height, full_width, _ = images.shape
    counts = tf.constant([full_height - height + 1, full_width - width + 1], tf.float32)
    corners = tf.cast(choose(draw("crop", [n, 2]), counts), tf.int64)
    return windows(images, corners, draw("flip", [n, 1]) >= 0.5, height, width)


def windows(
    images: tf.Tensor,
    corners: tf.Tensor,
    is_flipped: tf.Tensor,
    height: int,
    width: int,
    exceeds: bool = False,
) -> tf.Tensor:
    """Return a window [n, height, width, channels] of each image.

    `corners`, int64 [n, 2], are row and column of its upper left pixel; `is_flipped`
    [n, 1] mirrors it. Windows that `exceeds` lets begin or end beyond the edges see the
    image mirrored there. A GPU gathers no uint8.
    """
    n, full_height, full_width, channels = images.shape
    # Constants: on a GPU the host would compute a range.
    rows = corners[:, :1] + np.arange(height)
    columns = tf.where(is_flipped, np.arange(width)[::-1].copy(), np.arange(width))
    columns += corners[:, 1:]
    if exceeds:
        rows, columns = mirrored(rows, full_height), mirrored(columns, full_width)
    # One gather of whole pixels costs half of a gather of rows and one of columns.
    firsts = np.arange(n)[:, None, None] * (full_height * full_width)
    pixels = firsts + rows[:, :, None] * full_width + columns[:, None, :]
    return tf.gather(tf.reshape(images, [-1, channels]), pixels)


def mirrored(positions: tf.Tensor, count: int) -> tf.Tensor:
    """Map positions outside of 0..count - 1 into it, as a mirror does: -1 -> 1."""
    return count - 1 - tf.abs(count - 1 - tf.abs(positions))


def choose(numbers: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Return whole numbers, as floats, below `counts`, from uniform ones in [0, 1)."""
    # Rounding may give the count itself.
    return tf.minimum(tf.floor(numbers * counts), counts - 1)
