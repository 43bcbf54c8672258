"""Pictures of images with captions, drawn with Pillow."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Pixels: the width to which TensorBoard scales every picture (one of this width has
# sharp texts), a gap, and a line of a caption.
_WIDTH, _GAP, _LINE = 350, 4, 14


def captioned_images(
    images: np.ndarray, captions: Sequence[Sequence[str]]
) -> np.ndarray:
    """Images next to each other, each over its caption.

    Args:
        images: [n, height, width, channels]; uint8, or floats; each image of floats is
            stretched to the whole range. Of more than three channels the first three
            are shown as colors, of two the first one is gray.
        captions: lines of each image, equally many.

    Returns:
        uint8 [height, width, 3].
    """
    images = images[..., :3] if images.shape[3] >= 3 else images[..., [0, 0, 0]]
    if images.dtype != np.uint8:
        images = _stretched(images)
    count, height, width = images.shape[:3]
    columns = math.ceil(math.sqrt(count))
    room = _WIDTH // columns - _GAP
    # Small images are enlarged in whole pixels.
    scale = max(1, room // max(height, width))
    width, height = width * scale, height * scale
    room = max(room, width)
    right = room + _GAP
    down = height + _GAP + _LINE * max(map(len, captions), default=0)
    size = max(_WIDTH, columns * right), math.ceil(count / columns) * down
    canvas = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    for number, (image, lines) in enumerate(zip(images, captions, strict=True)):
        left, top = (number % columns) * right, (number // columns) * down
        picture = Image.fromarray(image).resize(
            (width, height), Image.Resampling.NEAREST
        )
        canvas.paste(picture, (left, top))
        for row, line in enumerate(lines):
            place = left, top + height + row * _LINE
            draw.text(place, _fitting(line, font, room), "black", font)
    return np.asarray(canvas)


def _fitting(text, font, width):
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}..") > width:
        text = text[:-1]
    return f"{text}.."


def _stretched(images):
    images = images.astype(np.float32)
    low = images.min(axis=(1, 2, 3), keepdims=True)
    high = images.max(axis=(1, 2, 3), keepdims=True)
    return np.round(255 * (images - low) / np.maximum(high - low, 1e-6)).astype(
        np.uint8
    )
