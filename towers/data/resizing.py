"""The middle of an image, resized; and the part of the image that this needs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from PIL import Image

# Decoding a window costs more for each pixel than decoding all (measured: a quarter
# less pixels took as long), so it must have at most this share of them.
MOST_OF_WINDOW = 0.5


class Window(NamedTuple):
    """The part of an image that is decoded, in pixels of the reduced scale.

    Attributes:
        ratio: pixels of the image along the side of a reduced one.
        top, left, height, width: of the part.
        is_whole: whether it is all of the image.
    """

    ratio: int = 1
    top: int = 0
    left: int = 0
    height: int = 0
    width: int = 0
    is_whole: bool = True


def window_of(stored_size: Sequence[int], size: Sequence[int], ratio: int) -> Window:
    """The part of an image that the filter of `fit` weighs, or all of the image where
    the part would not be much smaller.

    Args:
        stored_size: (height, width) of the image at full scale.
        size: (height, width) of the result.
        ratio: of the scale at which it is decoded.
    """
    step = min(old / new for old, new in zip(stored_size, size, strict=True))
    reach = max(step / ratio, 1) + 1
    ranges = []
    for length, new in zip(stored_size, size, strict=True):
        whole, part = math.ceil(length / ratio), step * new
        first = math.floor((length - part) / 2 / ratio - reach)
        end = math.ceil((length + part) / 2 / ratio + reach)
        ranges.append((max(first, 0), min(end, whole) - max(first, 0)))
    (top, height), (left, width) = ranges
    window = Window(ratio, top, left, height, width, is_whole=False)
    return window if is_worthwhile(window, stored_size) else Window(ratio)


def window_around(box: Sequence[int], ratio: int) -> Window:
    """The pixels of a reduced scale that show a part of an image.

    Args:
        box: top, left, height, width at full scale.
        ratio: of the scale at which it is decoded.
    """
    firsts = [first // ratio for first in box[:2]]
    ends = [math.ceil((box[i] + box[i + 2]) / ratio) for i in range(2)]
    lengths = [end - first for end, first in zip(ends, firsts, strict=True)]
    return Window(ratio, *firsts, *lengths, is_whole=False)


def is_worthwhile(window: Window, stored_size: Sequence[int]) -> bool:
    """Whether decoding a window takes less time than decoding all of the image.

    Args:
        window: the part.
        stored_size: (height, width) of the image at full scale.
    """
    whole = math.prod(math.ceil(length / window.ratio) for length in stored_size)
    return window.height * window.width <= MOST_OF_WINDOW * whole


def fit(
    image: tf.Tensor | np.ndarray, size: Sequence[int], image_size: int
) -> np.ndarray:
    """The middle of an image, for a square the largest one, resized with a triangular
    filter that widens as the image shrinks, so that every pixel of it counts.

    Args:
        image: uint8 [height, width, channels].
        size: (height, width) of the result.
        image_size: 0 where the image must not be resized.

    Returns:
        uint8 [*size, channels].

    Raises:
        ValueError: the image has another size and must not be resized.
    """
    height, width, _ = image.shape
    if (height, width) == tuple(size):
        return np.asarray(image)
    if not image_size:
        raise ValueError(
            f"is {height}x{width} (height x width) where {size[0]}x{size[1]} is "
            "expected; --image_size=N resizes and crops all images"
        )
    window = window_of((height, width), size, ratio=1)
    if not window.is_whole:  # Pillow copies what it is given
        image = cut(image, window)
    return middle(image, (height, width), size, window)


def cut(image: tf.Tensor | np.ndarray, window: Window) -> tf.Tensor | np.ndarray:
    """A window of an image that was decoded whole.

    Args:
        image: [height, width, channels], at the window's scale.
        window: the part.
    """
    rows = slice(window.top, window.top + window.height)
    return image[rows, window.left : window.left + window.width]


def middle(
    image: tf.Tensor | np.ndarray,
    stored_size: Sequence[int],
    size: Sequence[int],
    window: Window,
) -> np.ndarray:
    """As `fit`, of an image of which a window was decoded.

    Args:
        image: uint8 [window height, window width, channels].
        stored_size: (height, width) of the whole image at full scale.
        size: (height, width) of the result.
        window: the decoded part.
    """
    scale = max(new / old for new, old in zip(size, stored_size, strict=True))
    parts = [new / scale for new in size]
    firsts = [(old - x) / 2 for old, x in zip(stored_size, parts, strict=True)]
    return crop_resized(image, (*firsts, *parts), size, window)


def crop_resized(
    image: tf.Tensor | np.ndarray,
    box: Sequence[float],
    size: Sequence[int],
    window: Window,
) -> np.ndarray:
    """A part of an image, resized with the filter of `fit`, which also weighs pixels
    around the part where they were decoded.

    Args:
        image: uint8 [window height, window width, 1 or 3].
        box: top, left, height, width of the part, at full scale.
        size: (height, width) of the result.
        window: the decoded part.

    Returns:
        uint8 [*size, 1 or 3].
    """
    image = np.asarray(image)
    ranges = []
    for first, part, begin, most in zip(
        box[:2], box[2:], (window.top, window.left), image.shape, strict=False
    ):
        low, high = ((x / window.ratio - begin) for x in (first, first + part))
        ranges.append((max(low, 0.0), min(high, float(most))))  # rounding may exceed it
    (top, bottom), (left, right) = ranges
    # Pillow takes a third of the time of TensorFlow's ScaleAndTranslate. In one call
    # the order of rows and columns would depend on its version.
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    kernel, (height, width) = Image.Resampling.BILINEAR, size
    rows = picture.resize((width, len(image)), kernel, (left, 0, right, len(image)))
    resized = rows.resize((width, height), kernel, (0, top, width, bottom))
    return np.asarray(resized).reshape(height, width, -1)
