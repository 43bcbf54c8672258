"""Ten classes of small color images that are drawn, so that no file is needed.

Each image shows one shape on a shaded ground with two blots, under noise. The shapes
stay near the middle, so that a 24x24 crop keeps them, and none becomes another when it
is mirrored. All cover the same area for their size, so neither the colors nor the
brightness of an image tells its class.
"""

import math
from collections.abc import Callable

import numpy as np

from towers.data.sources import ArraySource, DataSet, channel_moments

SIZE = 32  # Height and width of an image, in pixels.
NUM_TRAIN = 10_000
NUM_TEST = 2_000

# By how much the shapes' colors start above the ground's, in steps of 0..255. Without
# it a weakly initialized network learns nothing for some epochs. Ridge regression on
# the pixels finds 0.25 of the classes without it, 0.35 with it, 0.44 with twice that.
LIGHTER = 8.0

CHUNK = 50  # images drawn at once, so that intermediate arrays fit into a core's cache

# (x, y) from the shape's middle, x to the right, y down, in its unit of length -> the
# distance to its outline, negative inside; near the outline it grows by 1 per unit.
Shape = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _plus(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.minimum(x, y) - 0.275, np.maximum(x, y) - 1.0)


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Five points, one at the top: ten mirrored copies of one edge."""
    tenth = math.pi / 5
    angle = np.abs(np.mod(np.arctan2(x, -y) + tenth, 2 * tenth) - tenth)
    radius = np.hypot(x, y)
    x, y = radius * np.sin(angle), radius * np.cos(angle)
    point, notch = 1.25, 0.517
    slope = math.atan2(point - notch * math.cos(tenth), notch * math.sin(tenth))
    return math.sin(slope) * x + math.cos(slope) * (y - point)


def _heart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    half = 0.516
    x, y = np.abs(x), y - 0.1
    along, across = (y + x) * math.sqrt(0.5), (y - x) * math.sqrt(0.5)
    square = np.maximum(np.abs(along), np.abs(across)) - half
    lobe = np.hypot(along, across + half) - half
    return np.minimum(square, lobe)


SHAPES: dict[str, Shape] = {
    "disc": lambda x, y: np.hypot(x, y) - 0.778,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.79) - 0.191,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.689,
    # Equilateral, a corner at the top.
    "triangle": lambda x, y: (
        np.maximum(y, math.sqrt(0.75) * np.abs(x) - 0.5 * y) - 0.605
    ),
    "plus": _plus,
    "cross": lambda x, y: _plus((x + y) * math.sqrt(0.5), (x - y) * math.sqrt(0.5)),
    "star": _star,
    # A disc without a smaller one that overlaps its right side.
    "crescent": lambda x, y: np.maximum(
        np.hypot(x, y) - 1.02, 0.753 - np.hypot(x - 0.6, y)
    ),
    "heart": _heart,
    # Three, lying, one above the other.
    "bars": lambda x, y: np.maximum(
        np.minimum(np.abs(y), np.abs(np.abs(y) - 0.72)) - 0.166, np.abs(x) - 0.954
    ),
}


def load(*, seed: int = 0) -> DataSet:
    """Draw 10,000 training and 2,000 test images, uint8 [n, 32, 32, 3].

    Label i is the i-th key of SHAPES. The images are the same bits on one machine;
    under another NumPy or processor a few values may be rounded to the other side.
    """
    # The generator by its name: NumPy may change what default_rng stands for.
    streams = (np.random.Philox(np.random.SeedSequence([seed, i])) for i in range(2))
    train_rng, test_rng = map(np.random.Generator, streams)
    train_images, train_labels = _draw_all(NUM_TRAIN, train_rng)
    test_images, test_labels = _draw_all(NUM_TEST, test_rng)
    mean, std = channel_moments(train_images)
    return DataSet(
        name="shapes",
        train=ArraySource(train_images, train_labels),
        test=ArraySource(test_images, test_labels),
        class_names=tuple(SHAPES),
        mean=mean,
        std=std,
        origin=f"drawn, seed {seed}",
    )


def _draw_all(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw images uint8 [count, 32, 32, 3] and labels int32 [count]."""
    labels = np.arange(count, dtype=np.int32) % len(SHAPES)
    images = np.empty((count, SIZE, SIZE, 3), np.uint8)
    for label, shape in enumerate(SHAPES.values()):
        indices = np.flatnonzero(labels == label)
        for first in range(0, len(indices), CHUNK):
            chunk = indices[first : first + CHUNK]
            images[chunk] = _draw(shape, len(chunk), rng)
    return images, labels


def _draw(shape: Shape, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw images uint8 [count, 32, 32, 3] of one class."""

    def uniform(low: float, high: float, *dims: int) -> np.ndarray:
        return rng.uniform(low, high, (count, *dims)).astype(np.float32)

    # Channels first: NumPy is slow on a short last axis.
    middle = np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2
    x, y = middle[None, None, :], middle[None, :, None]

    # The ground: a mixture of two colors that changes across the image.
    first, second = uniform(0, 255 - LIGHTER, 2, 3, 1, 1).swapaxes(0, 1)
    direction = uniform(0, 2 * math.pi, 1, 1)
    along = (x * np.cos(direction) + y * np.sin(direction)) / SIZE
    images = first + (second - first) * (0.5 + 0.4 * along)[:, None]

    for _ in range(2):
        right = x - uniform(-SIZE / 2, SIZE / 2, 1, 1)
        down = y - uniform(-SIZE / 2, SIZE / 2, 1, 1)
        blot = np.hypot(right, down) - uniform(1.0, 2.5, 1, 1)
        _paint(images, blot, uniform(0, 255, 3, 1, 1))

    size, tilt = uniform(7.0, 9.5, 1, 1), uniform(-0.25, 0.25, 1, 1)
    right, down = x - uniform(-2, 2, 1, 1), y - uniform(-2, 2, 1, 1)
    across = (right * np.cos(tilt) + down * np.sin(tilt)) / size
    below = (down * np.cos(tilt) - right * np.sin(tilt)) / size
    # The color of four farthest from the ground's, so that the shape is visible.
    offered = uniform(LIGHTER, 255, 4, 3, 1, 1)
    contrast = np.abs(offered - (first + second)[:, None] / 2).sum((2, 3, 4))
    color = offered[np.arange(count), contrast.argmax(1)]
    _paint(images, shape(across, below) * size, color)

    noise = rng.integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)
    noise = noise.transpose(0, 3, 1, 2).astype(np.float32, order="C") - 127.5
    images += noise * uniform(0, 0.15, 1, 1, 1)
    return np.clip(np.rint(images), 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)


def _paint(images: np.ndarray, distance: np.ndarray, color: np.ndarray) -> None:
    """Color pixels [n, 3, height, width] at negative distances, with smooth edges."""
    coverage = np.clip(0.5 - distance, 0, 1)[:, None]
    images += coverage * (color - images)
