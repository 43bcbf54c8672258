"""Ten classes of small colour pictures that are drawn, so that no data need be found.

Each picture shows one shape of random place, size, tilt and colour before a shaded
ground with a few blots of other colours, under noise. The shapes stay near the middle,
so that a 24x24 crop keeps them, and none becomes another when it is mirrored. In units
of a shape's own size all cover the same area, so neither the colours nor the
brightness of a picture tells its class.
"""

import math
from collections.abc import Callable

import numpy as np

from towers.data import sources

SIZE = 32  # Height and width of a picture in pixels.
NUM_TRAIN = 10_000
NUM_TEST = 2_000
AREA = 1.9  # What each shape covers, in squares of its unit of length.

# Pictures that are drawn at once: what they need of memory fits into a core's cache.
_PICTURES_AT_ONCE = 50

# (x to the right, y down), in units of the shape's size, from its middle -> the distance
# to its outline, negative inside. Near the outline it must grow by 1 per unit.
Shape = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _disc(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.hypot(x, y) - 0.778


def _ring(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.abs(np.hypot(x, y) - 0.79) - 0.191


def _square(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x), np.abs(y)) - 0.689


def _triangle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Equilateral, a corner at the top."""
    return np.maximum(y, math.sqrt(0.75) * np.abs(x) - 0.5 * y) - 0.605


def _plus(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.minimum(x, y) - 0.275, np.maximum(x, y) - 1.0)


def _cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A plus turned by an eighth of a circle."""
    return _plus((x + y) * math.sqrt(0.5), (x - y) * math.sqrt(0.5))


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Five points, one at the top: ten mirrored copies of one straight edge."""
    tenth = math.pi / 5
    angle = np.abs(np.mod(np.arctan2(x, -y) + tenth, 2 * tenth) - tenth)
    radius = np.hypot(x, y)
    x, y = radius * np.sin(angle), radius * np.cos(angle)
    point, notch = 1.25, 0.517
    slope = math.atan2(point - notch * math.cos(tenth), notch * math.sin(tenth))
    return math.sin(slope) * x + math.cos(slope) * (y - point)


def _crescent(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A disc without a smaller one that overlaps its right side."""
    return np.maximum(np.hypot(x, y) - 1.02, 0.753 - np.hypot(x - 0.6, y))


def _heart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A square on its corner with half a disc on each of its upper sides."""
    half = 0.516
    x, y = np.abs(x), y - 0.1
    along, across = (y + x) * math.sqrt(0.5), (y - x) * math.sqrt(0.5)
    square = np.maximum(np.abs(along), np.abs(across)) - half
    lobe = np.hypot(along, across + half) - half
    return np.minimum(square, lobe)


def _bars(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Three, lying, one above the other."""
    y = np.abs(y)
    return np.maximum(np.minimum(y, np.abs(y - 0.72)) - 0.166, np.abs(x) - 0.954)


SHAPES: dict[str, Shape] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "plus": _plus,
    "cross": _cross,
    "star": _star,
    "crescent": _crescent,
    "heart": _heart,
    "bars": _bars,
}


def load(data_dir: str = "", *, seed: int = 0) -> sources.DataSet:
    """Draws the data set: 10,000 pictures to train and 2,000 to test.

    Args:
        data_dir: not used; every data set is loaded with one.
        seed: of the drawing, not of a run: all runs see the same pictures, bit by bit
            on one machine. With another NumPy or processor the rounding of a few
            values may differ by 1.

    Returns:
        uint8 pictures [n, 32, 32, 3] with n / 10 of each class.
    """
    del data_dir
    train_images, train_labels = _draw_all(NUM_TRAIN, (seed, 0))
    test_images, test_labels = _draw_all(NUM_TEST, (seed, 1))
    mean, deviation = sources.channel_moments(train_images)
    return sources.DataSet(
        name="embedded",
        train=sources.ArraySource(train_images, train_labels),
        test=sources.ArraySource(test_images, test_labels),
        class_names=tuple(SHAPES),
        mean=mean,
        deviation=deviation,
        found=f"drawn from seed {seed}",
    )


def _draw_all(count: int, stream: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pictures uint8 [count, 32, 32, 3] and labels int32 [count] of a random stream."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(stream)))
    labels = np.arange(count, dtype=np.int32) % len(SHAPES)
    images = np.empty((count, SIZE, SIZE, 3), np.uint8)
    for label, shape in enumerate(SHAPES.values()):
        places = np.flatnonzero(labels == label)
        for start in range(0, len(places), _PICTURES_AT_ONCE):
            chosen = places[start : start + _PICTURES_AT_ONCE]
            images[chosen] = _draw(shape, len(chosen), rng)
    return images, labels


def _draw(shape: Shape, count: int, rng: np.random.Generator) -> np.ndarray:
    """Pictures uint8 [count, 32, 32, 3] of a shape."""

    def uniform(low: float, high: float, *dims: int) -> np.ndarray:
        return rng.uniform(low, high, (count, *dims)).astype(np.float32)

    middle = np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2
    x, y = middle[None, None, :], middle[None, :, None]

    # The ground runs from one colour to another across the picture.
    colours = uniform(0, 247, 2, 1, 1, 3)
    direction = uniform(0, 2 * np.pi, 1, 1)
    along = (x * np.cos(direction) + y * np.sin(direction)) * (0.4 / SIZE) + 0.5
    ground = colours[:, 0] + (colours[:, 1] - colours[:, 0]) * along[..., None]

    for _ in range(2):
        radius = uniform(1.0, 2.5, 1, 1)
        blot = np.hypot(x - uniform(-16, 16, 1, 1), y - uniform(-16, 16, 1, 1)) - radius
        _paint(ground, uniform(0, 255, 1, 1, 3), blot)

    size, tilt = uniform(7.0, 9.5, 1, 1), uniform(-0.25, 0.25, 1, 1)
    right, down = x - uniform(-2, 2, 1, 1), y - uniform(-2, 2, 1, 1)
    right, down = (
        (right * np.cos(tilt) + down * np.sin(tilt)) / size,
        (down * np.cos(tilt) - right * np.sin(tilt)) / size,
    )
    _paint(
        ground,
        _contrasting(colours, uniform(8, 255, 4, 1, 1, 3)),
        shape(right, down) * size,
    )

    noise = rng.integers(0, 256, ground.shape, np.uint8).astype(np.float32) - 127.5
    noise *= uniform(0.0, 0.15, 1, 1, 1)
    return np.clip(np.rint(ground + noise), 0, 255).astype(np.uint8)


def _paint(ground: np.ndarray, colour: np.ndarray, distance: np.ndarray) -> None:
    """Colours the ground where the distance in pixels is negative, its edge smooth."""
    coverage = np.clip(0.5 - distance, 0, 1).astype(np.float32)[..., None]
    ground += coverage * (colour - ground)


def _contrasting(ground: np.ndarray, offered: np.ndarray) -> np.ndarray:
    """Of the colours [n, k, 1, 1, 3] that one farthest from the ground's mean."""
    distance = np.abs(offered - ground.mean(1, keepdims=True)).sum((2, 3, 4))
    return offered[np.arange(len(offered)), distance.argmax(1)]
