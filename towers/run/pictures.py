"""Pictures of images with captions and of confusion matrices, drawn with Pillow."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Pixels: the width to which TensorBoard scales every picture (one of this width has
# sharp texts), a gap, and a line of a caption.
_WIDTH, _GAP, _LINE = 350, 4, 14

# Most classes of a matrix; pixels of their names, and of the side of a cell.
MOST_CLASSES, _MARGIN, _CELL = 20, 110, 24


def captioned_images(
    images: np.ndarray, captions: Sequence[Sequence[str]]
) -> np.ndarray:
    """Images next to each other, each over its caption.

    Args:
        images: [n, height, width, 1 or 3]; uint8, or floats, each image of which is
            stretched to the whole range.
        captions: lines of each image, equally many.

    Returns:
        uint8 [height, width, 3].
    """
    if images.dtype != np.uint8:
        images = _stretched(images)
    if images.shape[3] == 1:
        images = np.repeat(images, 3, axis=3)
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


def confusion_matrix(
    counts: np.ndarray, images: np.ndarray, class_names: Sequence[str]
) -> np.ndarray:
    """A matrix with a row per label and a column per prediction, shaded by the share of
    the label's images.

    Args:
        counts: whole numbers [classes, classes], of at most MOST_CLASSES.
        images: whole numbers [classes], of the labels.

    Returns:
        uint8 [height, width, 3].
    """
    count = len(counts)
    side = max(_CELL, (_WIDTH - _MARGIN) // count)
    shares = counts / np.maximum(images[:, np.newaxis], 1)
    shades = np.stack([255 * (1 - shares * x) for x in (0.85, 0.55, 0.15)], 2)
    cells = Image.fromarray(shades.round().astype(np.uint8))
    cells = cells.resize((count * side, count * side), Image.Resampling.NEAREST)
    font, margin = ImageFont.load_default(12), max(_MARGIN, _WIDTH - cells.width)
    canvas = Image.new("RGB", (margin + cells.width, margin + cells.height), "white")
    canvas.paste(cells, (margin, margin))
    draw = ImageDraw.Draw(canvas)
    columns = Image.new("RGB", (margin, cells.width), "white")  # to be rotated
    draw_column = ImageDraw.Draw(columns).text
    for label, name in enumerate(class_names):
        middle = label * side + side // 2
        name = _fitting(name, font, margin - 8)
        draw.text((margin - 6, margin + middle), name, "black", font, anchor="rm")
        draw_column((6, middle), name, "black", font, anchor="lm")
        for other in np.flatnonzero(counts[label]):
            place = margin + other * side + side // 2, margin + middle
            color = "white" if shares[label, other] > 0.5 else "black"
            draw.text(place, f"{counts[label, other]}", color, font, anchor="mm")
    canvas.paste(columns.transpose(Image.Transpose.ROTATE_90), (margin, 0))
    draw.text((4, 4), "rows: labels", "black", font)
    draw.text((4, 20), "columns:", "black", font)
    draw.text((4, 36), "predictions", "black", font)
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
