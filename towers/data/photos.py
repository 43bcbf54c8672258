"""Options for a folder of photos, from its number of images and their size."""

import statistics
from typing import Any

from PIL import Image

from towers.data.class_folders import entries, find_folders, training_folder
from towers.data.paths import data_folder, is_file, is_folder, is_image
from towers.errors import DataError

SAMPLE = 100  # images whose size is read
# Images to train on, all epochs together, and the bounds of the epochs.
IMAGES_SEEN = 10_000
EPOCHS = (15, 100)


def photo_options(data_dir: str) -> dict[str, Any] | None:
    """Size of the images, and number of epochs; None where there are not two folders
    with images, the classes, in the folder or in its `train/`."""
    try:
        root = data_folder(data_dir)
        train = training_folder(root, find_folders(root))
        folders = [_images(x.path) for x in entries(train) if is_folder(x)]
    except DataError:  # loading the data set says it again
        return None
    classes = list(filter(None, folders))
    if len(classes) < 2:
        return None
    paths = sorted(sum(classes, []))
    sizes = map(_size, paths[:: len(paths) // SAMPLE + 1])
    sides = [min(size) for size in sizes if size]
    least, most = EPOCHS
    return {
        "image_size": _image_size(statistics.median(sides or [64]), len(paths)),
        "num_epochs": float(min(max(IMAGES_SEEN // len(paths), least), most)),
    }


def _image_size(side: float, num_images: int) -> int:
    """By the median of the shorter sides."""
    if side < 48:
        return 32
    return 128 if side >= 128 and num_images >= 10_000 else 64


def _images(folder):
    return [x.path for x in entries(folder) if is_file(x) and is_image(x)]


def _size(path):
    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, ValueError, Image.DecompressionBombError):
        return None  # loading the data set names the file
