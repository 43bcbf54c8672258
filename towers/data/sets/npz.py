"""Data sets of arrays in a file of NumPy, as MedMNIST and Keras store them."""

import dataclasses
import os
import zipfile

import numpy as np

from towers.config import factories
from towers.data.files.image_files import ImageOptions
from towers.data.files.reading import local_copy, matches, open_file
from towers.data.sets import arrays
from towers.data.sources import DataSet
from towers.errors import DataError
from towers.messages import one_line, shown

SPLITS = "train", "val", "test"


def load(data_dir: str = "", image_options: ImageOptions | None = None) -> DataSet:
    """Read an `.npz` file; DataError if it lacks images or labels of a split.

    Its arrays are called `train_images` and `train_labels` as in MedMNIST, or `x_train`
    and `y_train` as in Keras; likewise with `val` and `test`, which may be missing.
    """
    path = os.path.expanduser(data_dir or "data")
    if os.path.isdir(path):
        files = matches(path, "*.npz")
        if len(files) != 1:
            raise DataError(f"{shown(path)}: has {len(files)} .npz files; name one")
        [path] = files
    path = local_copy(path)
    try:
        with open_file(path) as content, np.load(content) as file:  # no pickles
            values = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{shown(path)}: {one_line(error, 200)}") from None
    parts = []
    for split in SPLITS:
        pairs = (f"{split}_images", f"x_{split}"), (f"{split}_labels", f"y_{split}")
        given = [values.pop(name) for pair in pairs for name in pair if name in values]
        if len(given) == 2:
            parts.append(tuple(given))
        elif given or split == "train":
            both = f"{split}_images and {split}_labels, or x_{split} and y_{split}"
            why = f"{both}, are not both in it; left are {[*values]}"
            raise DataError(f"{shown(data_dir)}: {why}")
    name = arrays.give(tuple(parts))
    options = image_options or ImageOptions()
    data_set = factories.create("dataset", name, image_options=options)
    data_set.inventory.leave_out("arrays", *values)
    return dataclasses.replace(data_set, name="npz", origin=data_dir)
