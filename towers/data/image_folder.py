"""A folder of image files, one folder a class: `train/CLASS/*.png|jpg|jpeg`.

Names are read at the start, contents when they are needed.
"""

import dataclasses
import os
from collections.abc import Iterator

import numpy as np

from towers.data.decoding import AS_STORED, Decoding, find_image_shape
from towers.data.encoded import EncodedSource, sampled_moments
from towers.data.sources import (
    TEST_FRACTION,
    DataSet,
    data_folder,
    shown,
    split_off_test,
)
from towers.errors import DataError

ENDINGS = (".png", ".jpg", ".jpeg")
# Images of other formats, which are refused and not silently skipped.
OTHER_IMAGES = tuple(
    ".avif .bmp .gif .heic .heif .ico .jfif .jp2 .jxl .ppm .tif .tiff .webp".split()
)
TEST_FOLDERS = ("test", "val", "validation")
CHANNELS = 3

LAYOUT = (
    "an image folder has train/CLASS/*.png|jpg|jpeg and, if it has images for testing, "
    "test/, val/ or validation/ alike; --data_dir names the folder that train/ is in"
)


class ImageFiles:
    """The image files of a list of classes; an `Encoded`.

    Args:
        folder: that the folders of the classes are in.
        names: per class, in the order of the labels, its folder and its files.
    """

    def __init__(self, folder: str, names: dict[str, list[str]]):
        self.labels = np.repeat(
            np.arange(len(names), dtype=np.int32), [len(x) for x in names.values()]
        )
        self._folder = folder
        self._classes = list(names)
        self._names = [name for files in names.values() for name in files]

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> tuple[bytes, int]:
        with open(self.place(index), "rb") as file:
            return file.read(), int(self.labels[index])

    def place(self, index: int) -> str:
        class_name = self._classes[self.labels[index]]
        return os.path.join(self._folder, class_name, self._names[index])


def load(data_dir: str = "", decoding: Decoding = AS_STORED) -> DataSet:
    """Lists an image folder; its files are decoded when they are read.

    The classes are the folders in `train/`, their order is that of the names, and so is
    the order of the files. Names that begin with a dot are skipped, as are files
    that are no images; `origin` counts those. Without a folder for testing a tenth of
    each class is held out, drawn at random, the same in every run.

    Args:
        data_dir: the folder; empty means `data`.
        decoding: size of the images, and their cache.

    Returns:
        Sources of uint8 [n, height, width, 3]. Mean and standard deviation
        are those of a sample; see `encoded.SAMPLE`.

    Raises:
        DataError: the folder is not laid out like that; it has fewer than two classes,
            one without images, or for testing one that is not trained; there are image
            files of other kinds, or an image of the sample cannot be read.
    """
    root = data_folder(data_dir)
    folder = os.path.join(root, "train")
    if not os.path.isdir(folder):
        raise DataError(f"{root} has no folder train/; {LAYOUT}")
    skipped = []
    names = _list_classes(folder, skipped)
    if len(names) < 2:
        raise DataError(
            f"{folder}: {len(names)} folder(s), and at least two classes are needed; "
            f"{LAYOUT}"
        )
    for class_name, files in names.items():
        if not files:
            raise DataError(
                f"{shown(os.path.join(folder, class_name))}: holds no .png, .jpg or "
                ".jpeg file; remove the folder, or put the images of the class there"
            )
    files = ImageFiles(folder, names)
    image_shape = find_image_shape(files, CHANNELS, decoding)
    train = EncodedSource(files, image_shape, decoding)
    test_folders = [x for x in TEST_FOLDERS if os.path.isdir(os.path.join(root, x))]
    if test_folders:
        test = _load_test(
            os.path.join(root, test_folders[0]),
            list(names),
            train,
            decoding,
            skipped,
        )
        split = f"{test_folders[0]}/ for testing"
        if test_folders[1:]:
            split += f", {test_folders[1]}/ unused"
    else:
        train, test = split_off_test(train, files.labels, folder)
        split = f"{TEST_FRACTION:.0%} of each class held out for testing"
    mean, deviation = sampled_moments(train)
    if skipped:
        split += f"; {len(skipped)} other file(s), as {shown(skipped[0])}, skipped"
    return DataSet(
        name="image_folder",
        train=train,
        test=test,
        class_names=tuple(map(shown, names)),
        mean=mean,
        deviation=deviation,
        origin=f"{root} ({split})",
    )


def _load_test(folder, class_names, train, decoding, skipped):
    """The images for testing, of the classes and with the shape of those for training;
    they are kept where there is room left."""
    names = _list_classes(folder, skipped)
    unknown = sorted(set(names) - set(class_names))
    if unknown:
        raise DataError(
            f"{shown(os.path.join(folder, unknown[0]))}: there is no such class in "
            f"train/; that has {shown(', '.join(class_names[:20]), 100)}"
        )
    files = ImageFiles(folder, {name: names.get(name, []) for name in class_names})
    if not len(files):
        raise DataError(f"{folder}: holds no images; {LAYOUT}")
    return EncodedSource(
        files,
        train.image_shape,
        dataclasses.replace(decoding, cache_mb=decoding.cache_mb - train.cache_mb),
    )


def _list_classes(folder: str, skipped: list[str]) -> dict[str, list[str]]:
    """Class -> its image files, both in the order of the names."""
    names = {}
    for entry in _entries(folder):
        if entry.is_dir():
            names[entry.name] = sorted(_list_images(entry.path, skipped))
        elif entry.name.lower().endswith((*ENDINGS, *OTHER_IMAGES)):
            raise DataError(f"{shown(entry.path)}: is an image of no class; {LAYOUT}")
        else:
            skipped.append(entry.path)
    return dict(sorted(names.items()))


def _list_images(folder: str, skipped: list[str]) -> Iterator[str]:
    for entry in _entries(folder):
        # The listing has the kind of each entry; no file is inspected.
        if entry.name.lower().endswith(ENDINGS) and entry.is_file():
            yield entry.name
        elif entry.is_dir():
            raise DataError(
                f"{shown(entry.path)}: is a folder in the folder of a class, which "
                "holds images only; move them up, or the folder away"
            )
        elif entry.name.lower().endswith(OTHER_IMAGES):
            raise DataError(
                f"{shown(entry.path)}: only .png, .jpg and .jpeg files are read; "
                "convert it, or move it away"
            )
        elif entry.is_symlink() and not os.path.exists(entry.path):
            raise DataError(f"{shown(entry.path)}: is a link that leads nowhere")
        else:
            skipped.append(entry.path)


def _entries(folder: str) -> Iterator[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    yield entry
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read: {error.strerror}") from error
