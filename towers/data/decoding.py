"""Decoding of image files to pixels of one size."""

import collections
import dataclasses
import re
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.headers import num_pixels
from towers.data.sources import shown
from towers.errors import DataError, one_line


class Encoded(Protocol):
    """Encoded images with their labels, by index."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes, int]:
        """The file of one image, and its label.

        Raises:
            OSError, ValueError: it cannot be read; the words say why.
        """
        ...

    def place(self, index: int) -> str:
        """Its location, for messages."""
        ...


@dataclasses.dataclass
class Survey:
    """Faults and sizes of all images of a data set; see `Decoding`.

    Attributes:
        faults: place -> what is wrong with the image there.
        sizes: (height, width) of a stored image -> how often it was decoded.
        lock: held by the thread that records something.
    """

    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    sizes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Options for decoding images to arrays.

    Attributes:
        image_size: height and width to which images are resized and cropped; 0 takes
            them as they are, which must then be alike.
        cache_mb: megabytes of decoded images that are kept in memory.
        max_pixels: of an image file, all frames of an animation together; a larger one
            is not decoded.
        survey: records faults and sizes; an image with a fault is then black and its
            label -1. Without one the first fault is raised.
    """

    image_size: int = 0
    cache_mb: float = 2000.0
    max_pixels: int = MAX_IMAGE_PIXELS
    survey: Survey | None = None


AS_STORED = Decoding()


def refuse(
    encoded: Encoded, index: int, error: Exception, survey: Survey | None
) -> None:
    """Records a fault where there is a survey, else raises it as a DataError."""
    place = shown(encoded.place(index))
    words = getattr(error, "strerror", None) or one_line(error)
    if survey is None:
        raise DataError(f"{place}: {words}; `python -m towers.data` finds all such")
    with survey.lock:
        survey.faults[place] = words


def decode(content: bytes, channels: int, decoding: Decoding = AS_STORED) -> tf.Tensor:
    """uint8 [height, width, channels] of an image file.

    TensorFlow goes by the content, not by the name, and would decode other formats as
    well; a file whose pixels `num_pixels` does not count is not given to it.

    Raises:
        ValueError: it is none, is damaged or too large. A JPEG file has no checksums:
            where bits have changed it may still be decoded to something else.
    """
    if not content:
        raise ValueError("the file is empty")
    count = num_pixels(content)
    if count is None:
        raise ValueError(
            "cannot be decoded: it is no PNG, JPEG, GIF, BMP or still WebP file, or "
            "its header is damaged"
        )
    if count > decoding.max_pixels:
        raise ValueError(
            f"has {count:,} pixels, and at most max_image_pixels="
            f"{decoding.max_pixels} are decoded; shrink it, or raise "
            "--max_image_pixels"
        )
    try:
        image = tf.raw_ops.DecodeImage(
            contents=tf.constant(content),  # the operation itself takes twice as long
            channels=channels,
            dtype=tf.uint8,
            expand_animations=False,
        )
    except tf.errors.OpError as error:
        words = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", one_line(error))
        raise ValueError(f"cannot be decoded: {words}") from None
    survey = decoding.survey
    if survey is not None:
        with survey.lock:
            survey.sizes[tuple(image.shape[:2])] += 1
    return image


def fit(image: tf.Tensor, size: Sequence[int], image_size: int) -> np.ndarray:
    """The middle square of an image, resized with a triangular filter that widens as
    the image shrinks, so that every pixel of the square counts.

    Args:
        image: uint8 [height, width, channels].
        size: (height, width) of the result.
        image_size: height and width where the image may be resized, else 0.

    Returns:
        uint8 [*size, channels].

    Raises:
        ValueError: the image has another size and must not be resized.
    """
    height, width, _ = image.shape
    if (height, width) == tuple(size):
        return image.numpy()
    if not image_size:
        raise ValueError(
            f"is {height}x{width} (height x width) where {size[0]}x{size[1]} is "
            "expected; --image_size=N resizes and crops all images"
        )
    scale = image_size / min(height, width)
    cut_off = [(image_size - scale * length) / 2 for length in (height, width)]
    resized = tf.raw_ops.ScaleAndTranslate(
        images=tf.expand_dims(image, 0),
        size=size,
        scale=[scale, scale],
        translation=cut_off,
        kernel_type="triangle",
        antialias=True,
    )
    return np.clip(np.rint(resized[0].numpy()), 0, 255).astype(np.uint8)


def find_image_shape(
    encoded: Encoded, channels: int, decoding: Decoding
) -> tuple[int, int, int]:
    """The shape to read images in: `image_size`, or that of the first image.

    Raises:
        DataError: the first one, or with a survey every one, cannot be decoded.
    """
    if decoding.image_size:
        return (decoding.image_size, decoding.image_size, channels)
    for index in range(len(encoded)):
        try:
            content, _ = encoded.read(index)
            return tuple(decode(content, channels, decoding).shape)
        except (OSError, ValueError) as error:
            refuse(encoded, index, error, decoding.survey)
    raise DataError(
        f"{shown(encoded.place(0))} and all that follow: no image can be decoded"
    )
