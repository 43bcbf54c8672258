"""Data sets, augmentation, and batches that are functions of (seed, step).

Importing the package does not import TensorFlow; loading a data set does.
"""

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towers.data.decoding import Survey
    from towers.data.sources import DataSet


def _load(module: str, function: str, *args: Any) -> "DataSet":
    return getattr(importlib.import_module(f"towers.data.{module}"), function)(*args)


DATASETS = {
    "cifar10": functools.partial(_load, "cifar10", "load"),
    "cifar100": functools.partial(_load, "cifar100", "load"),
    "mnist": functools.partial(_load, "mnist", "load"),
    "fashion_mnist": functools.partial(_load, "mnist", "load_fashion"),
    "image_folder": functools.partial(_load, "image_folder", "load"),
    "embedded": functools.partial(_load, "embedded", "load"),
    "synthetic": functools.partial(_load, "synthetic", "load"),
}

# Any data set that tensorflow-datasets has prepared: tfds:NAME.
TFDS = "tfds:"


def is_decoded(name: str) -> bool:
    """Whether the images of a data set are decoded when they are read, so that they may
    have any size."""
    return name == "image_folder" or name.startswith(TFDS)


def load(
    name: str,
    data_dir: str = "",
    *,
    image_size: int = 0,
    image_cache_mb: float = 2000.0,
    survey: "Survey | None" = None,
) -> "DataSet":
    """Loads a data set by its name.

    Args:
        name: a key of DATASETS, or tfds:NAME.
        data_dir: where the user keeps it; empty for the usual places.
        image_size, image_cache_mb, survey: of images that are decoded when they are
            read; see `decoding.Decoding`.

    Raises:
        DataError: it is not there, or not what it should be.
    """
    if not is_decoded(name):
        return DATASETS[name](data_dir)
    from towers.data.decoding import Decoding

    decoding = Decoding(image_size, image_cache_mb, survey)
    if name.startswith(TFDS):
        return _load("tfds_source", "load", name.removeprefix(TFDS), data_dir, decoding)
    return DATASETS[name](data_dir, decoding)
