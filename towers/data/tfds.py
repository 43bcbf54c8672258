"""Data sets of labeled images that tensorflow-datasets (TFDS) has prepared.

TFDS is imported inside the functions, since most runs do without it. Finding and
reading a prepared folder needs no network.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from towers.data.sources import (
    ArraySource,
    DataSet,
    channel_moments,
    shown,
)
from towers.errors import DataError, TowersError, one_line


def default_dir() -> str:
    """The default folder of TFDS."""
    from tensorflow_datasets.core import constants

    return os.path.abspath(os.path.expanduser(constants.get_default_data_dir()))


def find_prepared(name: str, data_dir: str) -> str | None:
    """The newest prepared version `data_dir/name/1.2.3`, or None."""
    folder = os.path.join(data_dir, name)
    try:
        entries = os.listdir(folder)
    except OSError:
        return None
    versions = [
        tuple(map(int, entry.split(".")))
        for entry in entries
        if re.fullmatch(r"\d+\.\d+\.\d+", entry)
        # TFDS writes it last, so an unfinished folder has none.
        and os.path.exists(os.path.join(folder, entry, "dataset_info.json"))
    ]
    if not versions:
        return None
    return os.path.join(folder, ".".join(map(str, max(versions))))


@contextlib.contextmanager
def reading(folder: str) -> Iterator[Any]:
    """The builder of a prepared folder, with the log of TFDS reduced to errors.

    Raises:
        DataError: the folder is damaged, or cannot be read for another reason.
    """
    import tensorflow_datasets as tfds

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with _only_own_features(folder):
            builder = tfds.builder_from_directory(folder)
        yield builder
    except TowersError:
        raise
    except ImportError as error:  # array_record is not there for every system.
        words = one_line(error)[:100]
        raise DataError(f"{shown(folder)}: cannot be read here: {words}") from error
    except Exception as error:  # TFDS lets those of TensorFlow, protobuf, json through.
        raise DataError(
            f"{shown(folder)}: tensorflow-datasets cannot read it: "
            f"{one_line(error)[:100]}; "
            f"delete the folder to have it prepared anew"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _only_own_features(folder: str) -> Iterator[None]:
    """Refuses features of other packages: TFDS imports the module of every class that
    `features.json` names, which executes it.

    The file is not searched instead, since TFDS reads several forms of it, nested in
    each other and in strings.
    """
    from tensorflow_datasets.core.features.feature import FeatureConnector

    original = vars(FeatureConnector)["cls_from_name"]
    find = FeatureConnector.cls_from_name

    def find_own(name):
        if not name.startswith("tensorflow_datasets."):
            raise DataError(
                f"{folder}: features.json names the class {one_line(name, 100)}, which "
                "is not one of tensorflow-datasets; it is not imported. Prepare the "
                "data set without that feature"
            )
        return find(name)

    FeatureConnector.cls_from_name = find_own
    try:
        yield
    finally:
        FeatureConnector.cls_from_name = original


def read_prepared(folder: str) -> DataSet:
    """Reads the splits `train` and `test` of a prepared folder into memory.

    The examples come in the order of their feature `id` where they have one, which in
    TFDS's CIFAR-10 is the order of the official files, else in that of the folder's
    files.

    Args:
        folder: as `find_prepared` gives it.

    Raises:
        DataError: the folder is damaged, or it does not hold uint8 images of one shape
            under `image` and classes under `label` in both splits.
    """
    with reading(folder) as builder:
        shape, class_names = _image_and_classes(folder, builder.info)
        train = _read_split(folder, builder, "train", shape, len(class_names))
        test = _read_split(folder, builder, "test", shape, len(class_names))
    mean, deviation = channel_moments(train[0])
    return DataSet(
        name=builder.name,
        train=ArraySource(*train),
        test=ArraySource(*test),
        class_names=class_names,
        mean=mean,
        deviation=deviation,
        origin=f"tensorflow-datasets {builder.info.full_name} in {folder}",
    )


def _image_and_classes(folder: str, info: Any) -> tuple[tuple, tuple[str, ...]]:
    """Shape of the images and names of the classes, or DataError."""
    import tensorflow_datasets as tfds

    features = info.features
    image, label = (
        features[key] if key in features else None for key in ("image", "label")
    )
    if not isinstance(image, tfds.features.Image):
        raise DataError(f"{folder}: has no images under 'image'")
    if not isinstance(label, tfds.features.ClassLabel):
        raise DataError(f"{folder}: has no classes under 'label'")
    if image.np_dtype != np.uint8 or None in image.shape:
        raise DataError(
            f"{folder}: only uint8 images of one shape can be read, "
            f"found {np.dtype(image.np_dtype)} {list(image.shape)}"
        )
    for split in ("train", "test"):
        if split not in info.splits:
            raise DataError(
                f"{folder}: has no split '{split}', only "
                f"{shown(', '.join(info.splits))}"
            )
    return tuple(image.shape), tuple(label.names)


def _read_split(
    folder: str, builder: Any, split: str, shape: tuple, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [n, *shape] and int32 labels [n] of one split."""
    import tensorflow_datasets as tfds

    keys = [key for key in ("image", "label", "id") if key in builder.info.features]
    with tf.device("CPU:0"):
        examples = builder.as_dataset(
            split=split,
            shuffle_files=False,
            decoders=tfds.decode.PartialDecoding(dict.fromkeys(keys, True)),
            read_config=tfds.ReadConfig(try_autocache=False),
        )
        num_examples = builder.info.splits[split].num_examples
        images = np.empty((num_examples, *shape), np.uint8)
        labels = np.empty(num_examples, np.int32)
        ids = np.zeros(num_examples, object)
        done = 0
        for batch in examples.batch(1000).prefetch(2).as_numpy_iterator():
            end = done + len(batch["label"])
            images[done:end] = batch["image"]
            labels[done:end] = batch["label"]
            ids[done:end] = batch.get("id", 0)
            done = end
    # TFDS counts too; should it fail to, the rest of the arrays would be uninitialized.
    if done != num_examples:
        raise DataError(
            f"{folder}: split '{split}' should have {num_examples} examples, "
            f"found {done}"
        )
    if num_examples and not 0 <= labels.min() <= labels.max() < num_classes:
        raise DataError(
            f"{folder}: split '{split}' has labels {labels.min()} to {labels.max()}, "
            f"expected 0 to {num_classes - 1}"
        )
    order = np.argsort(ids, kind="stable")
    return images[order], labels[order]
