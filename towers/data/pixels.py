"""Decoding of image files to pixels of one size, upright.

TensorFlow decodes PNG, JPEG and GIF. Of BMP it reads no palettes, and of WebP no
transparency: these are left to Pillow.
"""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from PIL import BmpImagePlugin, Image, WebPImagePlugin

from towers.data.decoding import AS_STORED, Decoding
from towers.data.headers import Header, read_header
from towers.data.orientation import SIDEWAYS, orientation, stored_box, upright
from towers.data.resizing import (
    Window,
    crop_resized,
    cut,
    fit,
    is_worthwhile,
    middle,
    window_around,
    window_of,
)
from towers.errors import one_line

# A JPEG file is decoded at the smallest scale, of those that libjpeg has, at which its
# shorter side is at least so many times the wanted one. The filter does the rest, so
# little is lost; Pillow's `thumbnail` has the same number as `reducing_gap`.
OVERSAMPLING = 2
RATIOS = (8, 4, 2, 1)

# The classes, not Image.open, which has a limit of pixels of its own.
BY_PILLOW = {
    "BMP": BmpImagePlugin.BmpImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
}


def decode(content: bytes, channels: int, decoding: Decoding = AS_STORED) -> np.ndarray:
    """uint8 [height, width, channels] of an image file, upright.

    The content decides, not the name. TensorFlow would decode other formats as well; a
    file whose header `read_header` does not know is not given to it.

    Raises:
        ValueError: it is none, is damaged or too large. A JPEG file has no checksums:
            where bits have changed it may still be decoded to something else.
    """
    header = check_header(content, decoding)
    image = np.asarray(_decode(content, header, channels))
    return upright(image, orientation(content, header))


def read_image(
    content: bytes, image_shape: tuple[int, int, int], decoding: Decoding
) -> np.ndarray:
    """An image file in the shape that a source has.

    With an `image_size` that is the middle square, see `fit`; of a JPEG file it may be
    decoded at a reduced scale.

    Returns:
        uint8 of `image_shape`.

    Raises:
        ValueError: as `decode`; or it has another size and must not be resized.
    """
    header, survey = check_header(content, decoding), decoding.survey
    turned, channels = orientation(content, header), image_shape[-1]
    window = None
    if header.format == "JPEG" and decoding.image_size and survey is None:
        window = _reduced(header, decoding.image_size)
    if window is not None:
        image = _decode(content, header, channels, window)
        image = middle(image, header[1:3], image_shape[:2], window)
        return upright(image, turned)
    image = upright(np.asarray(_decode(content, header, channels)), turned)
    if survey is not None:
        survey.add_size(*image.shape[:2])
    return fit(image, image_shape[:2], decoding.image_size)


def resize_image(
    content: bytes, image_shape: tuple[int, int, int], decoding: Decoding
) -> np.ndarray:
    """An image file of any size in the shape that a network was trained on.

    Of a square shape that is `read_image` with that `image_size`. Otherwise the largest
    part in the middle that has the shape's proportions is resized.

    Returns:
        uint8 of `image_shape`.

    Raises:
        ValueError: as `decode`.
    """
    height, width, channels = image_shape
    if height == width:
        decoding = dataclasses.replace(decoding, image_size=height)
        return read_image(content, image_shape, decoding)
    return fit(decode(content, channels, decoding), (height, width), max(height, width))


def read_crop(
    content: bytes,
    box: Sequence[int],
    image_shape: tuple[int, int, int],
    decoding: Decoding,
) -> np.ndarray:
    """A part of an image file, resized; of a JPEG file decoded alone where that takes
    less time, and at a reduced scale where it is large.

    Args:
        content: of the file.
        box: top, left, height, width in the upright image, see `upright_size`.
        image_shape: height, width, channels of the result; a square.
        decoding: limits the pixels.

    Returns:
        uint8 of `image_shape`.

    Raises:
        ValueError: as `decode`.
    """
    header = check_header(content, decoding)
    turned, channels = orientation(content, header), image_shape[-1]
    if header.format == "JPEG":
        box = _stored(box, header[1:3], turned)
        window = window_around(box, _ratio(min(box[2:]), image_shape[0]))
        if is_worthwhile(window, header[1:3]):
            part = _decode(content, header, channels, window)
        else:
            image = _decode(content, header, channels, Window(window.ratio))
            part = cut(image, window)
    else:
        image = _decode(content, header, channels)
        box = _stored(box, image.shape[:2], turned)
        window = window_around(box, ratio=1)
        part = cut(image, window)
    return upright(crop_resized(part, box, image_shape[:2], window), turned)


def _stored(box, stored_size, turned):
    size = stored_size[::-1] if turned in SIDEWAYS else stored_size
    return stored_box(box, size, turned)


def upright_size(content: bytes, decoding: Decoding) -> tuple[int, int]:
    """Height and width of `decode`'s result, of most formats without decoding.

    Raises:
        ValueError: as `decode`, though damage behind the header is not found.
    """
    header = check_header(content, decoding)
    if header.format == "GIF":  # whose frames may be smaller than the screen
        return decode(content, 3, decoding).shape[:2]
    sideways = orientation(content, header) in SIDEWAYS
    return (header.width, header.height) if sideways else (header.height, header.width)


def check_header(content: bytes, decoding: Decoding) -> Header:
    """The header of an image file that may be decoded.

    Raises:
        ValueError: it is no image, or has too many pixels.
    """
    if not content:
        raise ValueError("the file is empty")
    header = read_header(content)
    if header is None or not header.num_pixels:
        raise ValueError(
            "cannot be decoded: it is no PNG, JPEG, GIF, BMP or still WebP file, or "
            "its header is damaged"
        )
    if header.num_pixels > decoding.max_pixels:
        raise ValueError(
            f"has {header.num_pixels:,} pixels, and at most max_image_pixels="
            f"{decoding.max_pixels} are decoded; shrink it, or raise "
            "--max_image_pixels"
        )
    return header


@contextlib.contextmanager
def _errors_of_tensorflow():
    """Those of decoding as a ValueError of one line."""
    try:
        yield
    except tf.errors.OpError as error:
        words = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", one_line(error))
        raise ValueError(f"cannot be decoded: {words}") from None


def _decode(content, header, channels, window=None):
    """uint8 [height, width, channels], a tensor or array, whatever the orientation; of
    the window, where one is given."""
    if channels == 1 and (header.format == "GIF" or header.is_cmyk):
        # TensorFlow decodes them to colors only.
        image = Image.fromarray(np.asarray(_decode(content, header, 3, window)))
        return np.asarray(image.convert("L"))[..., np.newaxis]
    if window is not None:
        return _decode_window(content, window, channels)
    if header.format in BY_PILLOW:
        return _decode_by_pillow(content, header, channels)
    with _errors_of_tensorflow():
        return tf.raw_ops.DecodeImage(
            contents=tf.constant(content),  # the operation itself takes twice as long
            channels=channels,
            dtype=tf.uint8,
            expand_animations=False,
        )


def _decode_by_pillow(content, header, channels):
    try:
        with BY_PILLOW[header.format](io.BytesIO(content)) as image:
            if image.size != (header.width, header.height):
                raise ValueError(f"its header is damaged: it says {image.size}")
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow names no class for damaged files
        raise ValueError(f"cannot be decoded: {one_line(error)}") from None
    return pixels.reshape(header.height, header.width, channels)


def _reduced(header: Header, image_size: int) -> Window | None:
    """What to decode of a JPEG file for its middle square; None for all at full scale.

    The window holds all pixels that the filter of `fit` weighs.
    """
    stored_size = header.height, header.width
    ratio = _ratio(min(stored_size), image_size)
    if ratio == 1:
        return None
    return window_of(stored_size, (image_size, image_size), ratio)


def _ratio(shorter, image_size):
    """Of the scale at which a square of `image_size` is decoded, from the shorter side
    of what it shows."""
    return next(
        (r for r in RATIOS if shorter >= r * OVERSAMPLING * image_size), RATIOS[-1]
    )


def _decode_window(content, window, channels):
    with _errors_of_tensorflow():
        contents = tf.constant(content)
        if window.is_whole:
            return tf.raw_ops.DecodeJpeg(
                contents=contents, channels=channels, ratio=window.ratio
            )
        return tf.raw_ops.DecodeAndCropJpeg(
            contents=contents,
            crop_window=window[1:5],
            channels=channels,
            ratio=window.ratio,
        )
