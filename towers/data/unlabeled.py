"""Image files of any size for a trained network, as many as there may be.

Of a million files the pixels of a few dozen are in memory, and besides those of the
batch that is computed.
"""

import collections
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unicodedata import normalize

import numpy as np

from towers.data import streams
from towers.data.class_folders import is_split
from towers.data.files import read_image_file
from towers.data.image import read_image
from towers.data.paths import class_name, reason
from towers.errors import ConfigError

# Images that are read ahead, for each reader.
AHEAD = 4


class ImageFile(NamedTuple):
    """An image that was read, or could not be.

    Attributes:
        path: of its file.
        image: uint8 [height, width, channels]; None where it cannot be used.
        fault: why.
    """

    path: str
    image: np.ndarray | None
    fault: str = ""


def read_files(
    paths: Iterable[str],
    image_shape: tuple[int, int, int],
    max_pixels: int,
    center_crop: float = 1.0,
) -> Iterator[ImageFile]:
    """Reads image files in threads, ahead of their use, and gives them in their order.

    Args:
        paths: of the files.
        image_shape: height, width, channels of the images that a network was trained
            on; see `image.read_image`.
        max_pixels: limits pixels and bytes.
        center_crop: see `image.read_image`.

    Raises:
        ConfigError: the network takes images of other than 1 or 3 channels.
    """
    if image_shape[-1] not in (1, 3):
        raise ConfigError(
            f"the network takes images of {image_shape[-1]} channels, and image files "
            "are read with 1 or 3; give arrays in Python: towers.load_run(DIR).model"
        )
    options = {"max_pixels": max_pixels, "center_crop": center_crop}

    def read(path):
        try:
            content = read_image_file(path, max_pixels)
            image = read_image(content, image_shape, **options)
        except (OSError, ValueError, MemoryError) as error:
            return ImageFile(path, None, reason(error))
        return ImageFile(path, image)

    pool, pending = ThreadPoolExecutor(streams.NUM_READERS), collections.deque()
    try:
        for path in paths:
            pending.append(pool.submit(read, path))
            if len(pending) > AHEAD * streams.NUM_READERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Labels:
    """The label of a file in a folder that has the name of a class.

    That is the first such folder below the one that was given, where folders inside the
    folder of a class may have the name of another; else the given one, or that above.

    Args:
        class_names: in the order of the labels.
        paths: that were given, of folders and files.
    """

    def __init__(self, class_names: Sequence[str], paths: Sequence[str] = ()):
        self._labels = {normalize("NFC", x): i for i, x in enumerate(class_names)}
        self._given = [os.path.join(path, "") for path in paths]

    def __call__(self, path: str) -> int:
        """-1 where no such folder has the name of a class."""
        folder = os.path.join(os.path.dirname(path), "")
        given = next((x for x in self._given if folder.startswith(x)), folder)
        below = folder.removeprefix(given).split(os.sep)
        above = os.path.abspath(given).split(os.sep)[:-3:-1]
        names = [x for x in map(class_name, (*below, *above)) if x in self._labels]
        if names[1:] and names[:2] == below[:2] and is_split(below[0]):
            names = names[1:]  # of classes one of which is called train
        return self._labels[names[0]] if names else -1
