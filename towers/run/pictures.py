"""Pictures of images with captions and of confusion matrices, drawn with Pillow."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Pixels of the side of an image, of a caption's line, and of a matrix.
_TILE, _LINE, _MATRIX = 96, 14, 480

# A matrix of more classes has no names and no counts.
_MOST_NAMED = 20


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
    tile = max(_TILE, height, width)
    scale = tile / max(height, width)
    # Small images in whole pixels.
    size = round(width * scale), round(height * scale)
    columns = math.ceil(math.sqrt(count))
    step = tile + 4, tile + 4 + _LINE * max(map(len, captions), default=0)
    canvas = Image.new(
        "RGB", (columns * step[0], math.ceil(count / columns) * step[1]), "white"
    )
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    for number, (image, lines) in enumerate(zip(images, captions, strict=True)):
        left, top = (number % columns) * step[0], (number // columns) * step[1]
        picture = Image.fromarray(image).resize(size, Image.Resampling.NEAREST)
        canvas.paste(picture, (left, top))
        for row, line in enumerate(lines):
            place = left, top + tile + row * _LINE
            draw.text(place, _fitting(line, font, tile), "black", font)
    return np.asarray(canvas)


def confusion_matrix(counts: np.ndarray, class_names: Sequence[str]) -> np.ndarray:
    """A matrix with a row per label and a column per prediction, shaded by the share of
    the label's images.

    Args:
        counts: whole numbers [classes, classes].

    Returns:
        uint8 [height, width, 3].
    """
    count = len(counts)
    side = max(1, _MATRIX // count)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    shades = np.stack([255 * (1 - shares * x) for x in (0.85, 0.55, 0.15)], 2)
    cells = Image.fromarray(shades.round().astype(np.uint8))
    cells = cells.resize((count * side, count * side), Image.Resampling.NEAREST)
    if count > _MOST_NAMED:
        return np.asarray(cells)
    font, margin = ImageFont.load_default(12), 110
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
        for other in range(count):
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
