"""Data sets that are published as a few files, and the search for them.

The official files come first, then what tensorflow-datasets prepared, and a download
with it last; the network is used only when no folder has the data set.
"""

import dataclasses
import os
from collections.abc import Callable

import numpy as np

from towers.data import download, tfds
from towers.data.sources import (
    ArraySource,
    DataSet,
    channel_moments,
    data_folder,
    shown,
)
from towers.errors import DataError

Examples = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Official:
    """Description of a published data set.

    Attributes:
        name: here and in tensorflow-datasets.
        title: for messages.
        image_shape: height, width, channels.
        class_names: in the order of the labels.
        url: of one of its files, to test whether a download is possible.
        official_files: their names, for messages.
        download_from: addresses for machines without a network, for messages.
    """

    name: str
    title: str
    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    url: str
    official_files: str
    download_from: str

    @property
    def how_to_get_it(self) -> str:
        return (
            f"to get it, fetch {self.download_from} on a machine with a network and "
            "put it, packed or unpacked, into a folder that --data_dir names; "
            "--dataset=embedded needs no data"
        )


def load(
    official: Official,
    data_dir: str,
    read_files: Callable[[str], DataSet | None],
    refuse: Callable[[str], None] = lambda root: None,
) -> DataSet:
    """Finds and reads a published data set.

    Args:
        official: the data set.
        data_dir: folder that holds the official files or what tensorflow-datasets
            prepared; empty means `data`. The default folder of tensorflow-datasets
            comes next, and a download with it last.
        read_files: folder -> the data set from its official files, None without any.
        refuse: raises where a folder holds a layout that is not read.

    Raises:
        DataError: nothing was found and nothing can be downloaded (within 2 s where
            there is no network), or what was found is not what it should be.
    """
    root = data_folder(data_dir)
    data_set = read_files(root)
    if data_set is not None:
        return data_set
    prepared = tfds.find_prepared(official.name, root)
    if prepared:
        return _read_prepared(official, prepared)
    refuse(root)
    shared = tfds.default_dir()
    prepared = tfds.find_prepared(official.name, shared)
    if prepared:
        return _read_prepared(official, prepared)

    reason = download.unreachable(official.url)
    if reason:
        missing = "" if os.path.isdir(root) else " (no such folder)"
        raise DataError(
            f"{official.title} was not found: no {official.official_files} or "
            f"{official.name}/VERSION in {root}{missing}; "
            f"no {official.name}/VERSION in {shared} (tensorflow-datasets); "
            f"no download: {reason}; {official.how_to_get_it}"
        )
    try:
        folder = download.download(official.name, root if data_dir else shared)
    except DataError as error:
        raise DataError(f"{error}; {official.how_to_get_it}") from error
    return _read_prepared(official, folder)


def from_arrays(
    official: Official, train: Examples, test: Examples, origin: str
) -> DataSet:
    """The data set of uint8 images [n, *image_shape] and integer labels [n]."""
    mean, deviation = channel_moments(train[0])
    return DataSet(
        name=official.name,
        train=ArraySource(*train),
        test=ArraySource(*test),
        class_names=official.class_names,
        mean=mean,
        deviation=deviation,
        origin=origin,
    )


def compare_names(official: Official, place: str, names: tuple[str, ...]) -> None:
    """Raises a DataError where a place names other classes, or in another order."""
    if names != official.class_names:
        raise DataError(
            f"{place}: these are not the classes of {official.title}: expected "
            f"{shown(' '.join(official.class_names), 100)}, found "
            f"{shown(' '.join(names[:20]), 100) or 'none'}"
        )


def _read_prepared(official: Official, folder: str) -> DataSet:
    data_set = tfds.read_prepared(folder)
    if data_set.train.image_shape != official.image_shape:
        raise DataError(
            f"{folder}: {official.title} has images of {list(official.image_shape)}, "
            f"found {list(data_set.train.image_shape)}"
        )
    compare_names(official, folder, data_set.class_names)
    return data_set
