"""The order in which unlabeled images are worth a label, and their picture."""

import os
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from towers import store

RANKS = ("none", "uncertain", "diverse")

# Images that k-center chooses one by one; the others follow by their distance.
MAX_CENTERS = 1000

# The picture: maximum number of images, images of a row, and pixels of a side.
MAX_PICTURED, COLUMNS, SIDE = 100, 10, 128
# Pixels of the text below an image.
LINE = 14


def ranked(
    rank: str,
    probabilities: np.ndarray,
    features: np.ndarray,
    thresholds: np.ndarray | None = None,
) -> np.ndarray:
    """Return the order of images, int64 [n], the ones to label next first.

    "uncertain" begins with the smallest margin between the two largest probabilities,
    of label sets between a probability and its threshold; NaN is before all. "diverse"
    is `farthest_first` of the features [n, f], from the smallest margin on.
    """
    if thresholds is not None:
        margins = np.abs(probabilities - thresholds).min(1)
    else:
        margins = np.diff(np.sort(probabilities, 1)[:, -2:])[:, 0]
    order = np.argsort(np.nan_to_num(margins, nan=-1.0), kind="stable")
    return order if rank == "uncertain" else farthest_first(features, int(order[0]))


def farthest_first(features: np.ndarray, first: int) -> np.ndarray:
    """Return the greedy k-center order of features, int64 [n], from an image on.

    Next is always the image farthest from all images before it (Gonzalez 1985; as
    core-set in active learning, Sener and Savarese 2018, arXiv:1708.00489), of equally
    far ones the first. After MAX_CENTERS images the others come by this distance.
    """
    features = np.nan_to_num(features.astype(np.float64))
    features -= features.mean(0)  # against cancellation
    norms, order = np.square(features).sum(1), [first]
    distances, count = np.full(len(features), np.inf), min(len(features), MAX_CENTERS)
    while True:
        last = order[-1]
        squares = norms + norms[last] - 2 * (features @ features[last])
        distances = np.minimum(distances, squares)
        distances[order] = -np.inf
        if len(order) == count:
            break
        order.append(int(distances.argmax()))
    rest = np.argsort(-distances, kind="stable")[: len(features) - count]
    return np.concatenate([order, rest]).astype(np.int64)


def write_sheet(
    path: str, images: Sequence[np.ndarray], answers: Sequence[str]
) -> None:
    """Write thumbnails, uint8 [height, width, channels], with numbers to a PNG file."""
    rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * SIDE, rows * (SIDE + LINE)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (image, answer) in enumerate(zip(images, answers, strict=True)):
        x, y = number % COLUMNS * SIDE, number // COLUMNS * (SIDE + LINE)
        thumbnail = Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])
        sheet.paste(ImageOps.contain(thumbnail, (SIDE - 4, SIDE - 4)), (x, y))
        draw.text((x, y + SIDE - 2), f"{number + 1}  {answer[:18]}", "black")
    with store.aside(os.path.realpath(path)) as temporary:
        sheet.save(temporary, "PNG")
