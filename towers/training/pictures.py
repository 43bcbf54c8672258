"""Pictures of images with captions, drawn by Pillow."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MAX_IMAGES = 16  # of a picture

# In pixels: the width to which TensorBoard scales every picture, the gap between two
# images, and the height of a line of a caption.
_WIDTH, _GAP, _LINE = 350, 4, 14


def batch_picture(
    images: np.ndarray, labels: np.ndarray, class_names: Sequence[str]
) -> np.ndarray:
    """Return the first images of a batch with their classes or shares of them."""
    images, labels = images[:MAX_IMAGES], labels[:MAX_IMAGES]
    captions = []
    for label in labels:
        if np.ndim(label):
            best = [c for c in np.argsort(-label, kind="stable")[:2] if label[c] > 0.01]
            captions.append([f"{label[c]:.0%} {class_names[c]}" for c in best])
        else:
            captions.append([class_names[label]])
    return captioned_images(images, captions)


def captioned_images(
    images: np.ndarray, captions: Sequence[Sequence[str]]
) -> np.ndarray:
    """Return images over their captions, uint8 [height, width, 3]."""
    images = images[..., :3] if images.shape[3] >= 3 else images[..., [0, 0, 0]]
    if images.dtype != np.uint8:
        images = _stretched(images)
    count, height, width = images.shape[:3]
    columns = math.ceil(math.sqrt(count))
    room = _WIDTH // columns - _GAP
    scale = max(1, room // max(height, width))  # whole pixels
    width, height = width * scale, height * scale
    room = max(room, width)
    right = room + _GAP
    down = height + _GAP + _LINE * max(map(len, captions), default=0)
    size = max(_WIDTH, columns * right), math.ceil(count / columns) * down
    canvas = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    for number, (pixels, lines) in enumerate(zip(images, captions, strict=True)):
        left, top = (number % columns) * right, (number // columns) * down
        picture = Image.fromarray(pixels)
        picture = picture.resize((width, height), Image.Resampling.NEAREST)
        canvas.paste(picture, (left, top))
        for row, line in enumerate(lines):
            place = left, top + height + row * _LINE
            draw.text(place, _shortened(line, font, room), "black", font)
    return np.asarray(canvas)


def _shortened(text, font, width):
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}..") > width:
        text = text[:-1]
    return f"{text}.."


def _stretched(images):
    images = images.astype(np.float32)
    low = images.min(axis=(1, 2, 3), keepdims=True)
    high = images.max(axis=(1, 2, 3), keepdims=True)
    shares = (images - low) / np.maximum(high - low, 1e-6)
    return np.round(255 * shares).astype(np.uint8)
