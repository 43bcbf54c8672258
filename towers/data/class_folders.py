"""The layout of a folder of images, one folder a class. Imports no TensorFlow."""

import os
from collections.abc import Iterator

from towers.data.paths import is_folder, shown
from towers.errors import DataError

TRAIN, VALIDATION, TEST = ("train",), ("val", "valid", "validation"), ("test",)
LAYOUT = (
    "an image folder has train/CLASS/*.jpg|png|... and, where there are such images, "
    "val/ and test/ alike, or CLASS/* alone; --data_dir names the folder that train/ "
    "or the classes are in"
)


def find_folders(root: str) -> dict[str, str]:
    """Those for training, validation and testing in a folder, named in any case."""
    if not os.path.isdir(root):
        raise DataError(f"{root}: there is no such folder; {LAYOUT}")
    folders = {}
    for entry in sorted(entries(root), key=lambda entry: entry.name):
        for names in (TRAIN, VALIDATION, TEST):
            if entry.name.lower() in names and is_folder(entry):
                other = folders.setdefault(names[-1], entry.path)
                if other != entry.path:
                    raise DataError(
                        f"{other} and {entry.name}/: two folders for the same; move "
                        "one of them away"
                    )
    return folders


def training_folder(root: str, folders: dict[str, str]) -> str:
    """`train/`, or the root where it has the classes; DataError where neither is."""
    if "train" in folders or not folders:
        return folders.get("train", root)
    raise DataError(f"{root} has no folder train/; {LAYOUT}")


def entries(folder: str) -> Iterator[os.DirEntry]:
    """What is in a folder, but for names that begin with a dot; DataError where it
    cannot be read."""
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if not entry.name.startswith("."):
                    yield entry
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read: {error.strerror}") from error
