"""Policies: random operations on the whole pixel values of a batch.

A policy is a function of images, float32 [n, height, width, 1 or 3] of whole numbers in
0..255, and of the step's `draw`; it returns images of the same shape.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from towers.data.augment.augmentation import (
    CROP_SCALE,
    Augment,
    Moments,
    Shape,
    choose,
    standardize,
)
from towers.data.augment.crops import crop_resize_flip, flip
from towers.data.augment.operations import MAX_BLUR, OPERATIONS, apply
from towers.data.randomness import Draw

# A pair of AutoAugment: two operations, each with its probability and its magnitude, 0
# to 9, which is 0 if the operation has none.
SubPolicy = tuple[tuple[str, float, int], tuple[str, float, int]]
_CIFAR10 = """
    invert 0.1 0 contrast 0.2 6; rotate 0.7 2 translate_x 0.3 9;
    sharpness 0.8 1 sharpness 0.9 3; shear_y 0.5 8 translate_y 0.7 9;
    autocontrast 0.5 0 equalize 0.9 0; shear_y 0.2 7 posterize 0.3 7;
    color 0.4 3 brightness 0.6 7; sharpness 0.3 9 brightness 0.7 9;
    equalize 0.6 0 equalize 0.5 0; contrast 0.6 7 sharpness 0.6 5;
    color 0.7 7 translate_x 0.5 8; equalize 0.3 0 autocontrast 0.4 0;
    translate_y 0.4 3 sharpness 0.2 6; brightness 0.9 6 color 0.2 8;
    solarize 0.5 2 invert 0 0; equalize 0.2 0 autocontrast 0.6 0;
    equalize 0.2 0 equalize 0.6 0; color 0.9 9 equalize 0.6 0;
    autocontrast 0.8 0 solarize 0.2 8; brightness 0.1 3 color 0.7 0;
    solarize 0.4 5 autocontrast 0.9 0; translate_y 0.9 9 translate_y 0.7 9;
    autocontrast 0.9 0 solarize 0.8 3; equalize 0.8 0 invert 0.1 0;
    translate_y 0.7 9 autocontrast 0.9 0
"""
_IMAGENET = """
    posterize 0.4 8 rotate 0.6 9; solarize 0.6 5 autocontrast 0.6 0;
    equalize 0.8 0 equalize 0.6 0; posterize 0.6 7 posterize 0.6 6;
    equalize 0.4 0 solarize 0.2 4; equalize 0.4 0 rotate 0.8 8;
    solarize 0.6 3 equalize 0.6 0; posterize 0.8 5 equalize 1 0;
    rotate 0.2 3 solarize 0.6 8; equalize 0.6 0 posterize 0.4 6;
    rotate 0.8 8 color 0.4 0; rotate 0.4 9 equalize 0.6 0;
    equalize 0 0 equalize 0.8 0; invert 0.6 0 equalize 1 0;
    color 0.6 4 contrast 1 8; rotate 0.8 8 color 1 2;
    color 0.8 8 solarize 0.8 7; sharpness 0.4 7 invert 0.6 0;
    shear_x 0.6 5 equalize 1 0; color 0.4 0 equalize 0.6 0;
    equalize 0.4 0 solarize 0.2 4; solarize 0.6 5 autocontrast 0.6 0;
    invert 0.6 0 equalize 1 0; color 0.6 4 contrast 1 8;
    equalize 0.8 0 equalize 0.6 0
"""


def _parse(text) -> tuple[SubPolicy, ...]:
    rows = (row.split() for row in text.split(";"))
    return tuple(
        ((x, float(p), int(m)), (y, float(q), int(k))) for x, p, m, y, q, k in rows
    )


SUB_POLICIES = {"cifar10": _parse(_CIFAR10), "imagenet": _parse(_IMAGENET)}


# Number of operations and their magnitude in torchvision's RandAugment.
RAND_AUGMENT = 2, 9

RAND_OPERATIONS = OPERATIONS[: OPERATIONS.index("equalize") + 1]

ENHANCEMENTS = "brightness", "color", "contrast", "sharpness"

# AugMix: number of chains, their maximum length, and the severity, of 10.
WIDTH, DEPTH, SEVERITY = 3, 3, 3
MIN_LEVEL = 0.1
MIXED = (
    *("autocontrast", "equalize", "posterize", "rotate", "solarize"),
    *("shear_x", "shear_y", "translate_x", "translate_y"),
)

# three_augment: bounds of the blur, the solarization and the jitter.
MIN_BLUR = 0.1
SOLARIZED_FROM = 128.0
JITTER = 0.3
JITTERED = "brightness", "contrast", "color"


@dataclasses.dataclass(frozen=True)
class Magnitudes:
    """Values of operations at magnitudes from 0 to `most`."""

    most: int
    shear: float  # pixels a pixel
    translation: Callable[[int], float]  # pixels of the side -> pixels
    degrees: float  # of a rotation
    enhancement: float  # difference from a factor of 1
    bits: int  # that posterize loses

    def value(
        self, name: str, magnitude: int, sign: int, height: int, width: int
    ) -> float:
        """Return the value of an operation, signed if it has a direction."""

        def share_of(most):
            return most * magnitude / self.most

        shear, enhanced = sign * share_of(self.shear), share_of(self.enhancement)
        moved = [sign * share_of(self.translation(side)) for side in (width, height)]
        values = {
            **{"shear_x": shear, "shear_y": shear},
            **{"translate_x": int(moved[0]), "translate_y": int(moved[1])},
            "rotate": sign * share_of(self.degrees),
            **dict.fromkeys(ENHANCEMENTS, 1 + sign * enhanced),
            "posterize": round(share_of(self.bits)),
            "solarize": 255 - share_of(255),
        }
        return float(values.get(name, 0))

    def values(
        self, names: Sequence[str], magnitudes: Sequence[int], height: int, width: int
    ) -> np.ndarray:
        """Return float64 [names, magnitudes, 2], for the signs 1 and -1."""
        rows = itertools.product(names, magnitudes, (1, -1))
        values = [self.value(*row, height, width) for row in rows]
        return np.reshape(values, [len(names), len(magnitudes), 2])


# torchvision's `RandAugment`, `AutoAugment` and `TrivialAugmentWide`.
RAND = Magnitudes(30, 0.3, lambda side: 150 / 331 * side, 30.0, 0.9, 4)
AUTO = dataclasses.replace(RAND, most=9)
TRIVIAL = Magnitudes(30, 0.99, lambda side: 32.0, 135.0, 0.99, 6)


def none(images: tf.Tensor, draw: Draw) -> tf.Tensor:
    """Return the images unchanged."""
    return images


def rand_augment(
    images: tf.Tensor,
    draw: Draw,
    rand_augment: tuple[int, int] = RAND_AUGMENT,
    on_gpu: bool = False,
) -> tf.Tensor:
    """Apply operations at one magnitude (Cubuk et al. 2020, arXiv:1909.13719)."""
    n, height, width, _ = images.shape
    count, magnitude = rand_augment
    table = RAND.values(RAND_OPERATIONS, [magnitude], height, width)[:, 0]
    numbers = draw("rand_augment", [n, count, 2])
    for position in range(count):
        operations, signs = _chosen(numbers[:, position], table.shape)
        values = _look_up(table, operations, signs)
        images = apply(images, operations, values, RAND_OPERATIONS, on_gpu=on_gpu)
    return images


def trivial_augment(images: tf.Tensor, draw: Draw, on_gpu: bool = False) -> tf.Tensor:
    """Apply one operation to each image (Müller and Hutter 2021, arXiv:2103.10158)."""
    n, height, width, _ = images.shape
    table = TRIVIAL.values(RAND_OPERATIONS, range(TRIVIAL.most + 1), height, width)
    operations, *position = _chosen(draw("trivial_augment", [n, 3]), table.shape)
    values = _look_up(table, operations, *position)
    return apply(images, operations, values, RAND_OPERATIONS, on_gpu=on_gpu)


def auto_augment(
    images: tf.Tensor, draw: Draw, learned_on: str, on_gpu: bool = False
) -> tf.Tensor:
    """Apply a learned pair of operations (Cubuk et al. 2018, arXiv:1805.09501)."""
    n, height, width, _ = images.shape
    pairs = SUB_POLICIES[learned_on]
    numbers = draw("auto_augment", [n, 5])
    [pair] = _chosen(numbers[:, :1], [len(pairs)])
    for position, chance in enumerate((1, 3)):
        names, chances, table = [], [], []
        for name, probability, magnitude in (p[position] for p in pairs):
            if name == "invert":  # all values from 0 on
                names.append("solarize")
                table.append(AUTO.values(names[-1:], [AUTO.most], height, width)[0, 0])
            else:
                names.append(name)
                table.append(AUTO.values(names[-1:], [magnitude], height, width)[0, 0])
            chances.append(probability)
        [sign] = _chosen(numbers[:, chance + 1 : chance + 2], [2])
        is_applied = numbers[:, chance] < _look_up(np.array(chances, np.float32), pair)
        operations = _look_up(_numbers_of(names), pair)
        operations = tf.where(is_applied, operations, OPERATIONS.index("identity"))
        values = _look_up(np.array(table), pair, sign)
        images = apply(images, operations, values, names, on_gpu=on_gpu)
    return images


def augmix(images: tf.Tensor, draw: Draw, on_gpu: bool = False) -> tf.Tensor:
    """Mix each image with the weighted mean of three chains of one to three operations.

    AugMix (Hendrycks et al. 2020, arXiv:1912.02781), without its Jensen-Shannon
    divergence; the values are not whole.
    """
    n, height, width, _ = images.shape
    numbers = draw("augmix", [n, WIDTH, DEPTH, 3])
    depths = 1 + choose(draw("augmix_depth", [n, WIDTH]), float(DEPTH))
    # The lengths of pieces of a line cut at random have a Dirichlet distribution with
    # parameters 1. Not by logarithms: TensorFlow's depend on the position in a tensor.
    # Beta(1, 1) is uniform.
    first, second, share = tf.unstack(draw("augmix_weights", [n, 3]), axis=1)
    low, high = tf.minimum(first, second), tf.maximum(first, second)
    weights, chains = (low, high - low, 1 - high), []
    operate = functools.partial(apply, possible=MIXED, bilinear=True, on_gpu=on_gpu)
    for chain in range(WIDTH):
        changed = images
        for position in range(DEPTH):
            chosen, level, sign = tf.unstack(numbers[:, chain, position], axis=1)
            [row] = _chosen(chosen[:, None], [len(MIXED)])
            values = _mixed_values(level, sign, height, width)
            values = tf.gather(values, row, axis=1, batch_dims=1)
            operations = _look_up(_numbers_of(MIXED), row)
            operations = tf.where(position < depths[:, chain], operations, 0)
            changed = operate(changed, operations, values)
        chains.append(weights[chain][:, None, None, None] * changed)
    share = share[:, None, None, None]
    return (1 - share) * images + share * tf.add_n(chains)


def _mixed_values(level, sign, height, width):
    """Return values of AugMix's operations as its authors, float64 [n, operations]."""
    level, sign = tf.cast(level, tf.float64), tf.cast(sign, tf.float64)
    level = MIN_LEVEL + (SEVERITY - MIN_LEVEL) * level
    sign = tf.where(sign < 0.5, tf.ones_like(sign), -1)

    # Not divisions: see `augmentation.standardize`.
    values = {
        "posterize": 4 + tf.floor(level * (4 / 10)),
        "rotate": sign * tf.floor(level * (30 / 10)),
        "solarize": 256 - tf.floor(level * (256 / 10)),
        "shear_x": sign * level * (0.3 / 10),
        "shear_y": sign * level * (0.3 / 10),
        "translate_x": sign * tf.floor(level * (width / 3 / 10)),
        "translate_y": sign * tf.floor(level * (height / 3 / 10)),
    }
    return tf.stack([values.get(name, tf.zeros_like(level)) for name in MIXED], 1)


def three_augment(images: tf.Tensor, draw: Draw, on_gpu: bool = False) -> tf.Tensor:
    """Apply 3-Augment, then jitter colors (Touvron et al. 2022, arXiv:2204.07118)."""
    numbers = draw("three_augment", [images.shape[0], 6])
    three = "color", "solarize", "blur"
    which, order = _chosen(numbers[:, 0:3:2], [3, 6])
    radii = MIN_BLUR + (MAX_BLUR - MIN_BLUR) * tf.cast(numbers[:, 1], tf.float64)
    values = _look_up(np.array([0, SOLARIZED_FROM, 0]), which)
    values = tf.where(which == three.index("blur"), radii, values)
    operations = _look_up(_numbers_of(three), which)
    images = apply(images, operations, values, three, on_gpu=on_gpu)
    factors = 1 - JITTER + 2 * JITTER * tf.cast(numbers[:, 3:], tf.float64)
    orders = np.array([*itertools.permutations(range(len(JITTERED)))])
    for position in range(len(JITTERED)):
        row = _look_up(orders[:, position], order)
        values = tf.gather(factors, row, axis=1, batch_dims=1)
        operations = _look_up(_numbers_of(JITTERED), row)
        images = apply(images, operations, values, JITTERED, on_gpu=on_gpu)
    return images


def crop_rand_augment(
    image_shape: Shape,
    mean: Moments,
    std: Moments,
    crop_scale: tuple[float, float] = CROP_SCALE,
    on_gpu: bool = False,
) -> Augment:
    """Take a random crop of random size, flip it, and apply RandAugment."""
    evaluate = functools.partial(standardize, mean=mean, std=std)

    def train(images, draw):
        images = tf.round(crop_resize_flip(images, draw, crop_scale))
        return evaluate(rand_augment(images, draw, on_gpu=on_gpu))

    def train_on_crops(images, draw):
        images = tf.round(flip(images, draw))
        return evaluate(rand_augment(images, draw, on_gpu=on_gpu))

    return Augment(train, evaluate, image_shape, train_on_crops, crop_scale)


def _chosen(numbers, counts):
    """Return whole numbers below the counts, int64 [n] each, from [n, counts]."""
    positions = tf.cast(choose(numbers, tf.constant([*counts], tf.float32)), tf.int64)
    # On a GPU the host computes Unpack of int64.
    return [positions[:, number] for number in range(len(counts))]


def _numbers_of(names):
    return np.array([OPERATIONS.index(name) for name in names])


def _look_up(table, *positions):
    """Return the entries [n] of an array at positions, int64 [n] for each axis."""
    flat = positions[0]
    for size, position in zip(table.shape[1:], positions[1:], strict=True):
        flat = flat * size + position
    return tf.gather(tf.constant(table.ravel()), flat)
