"""Data sets of labeled images that tensorflow-datasets (TFDS) has prepared.

`tfds:NAME` takes any with one image and one label, of any size, prepared as
array_record or tfrecord; images are decoded when they are read. Published data sets are
read into memory. TFDS is imported inside the functions, since most runs do without it.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from towers.data import streams
from towers.data.files import splits
from towers.data.files.image import read_image
from towers.data.files.image_files import ImageOptions
from towers.data.files.paths import class_name, data_folder, reason
from towers.data.files.tf_records import open_records
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, sort_in_place
from towers.errors import DataError, TowersError
from towers.messages import one_line, shown

PREFIX = "tfds:"
TEST_SPLITS = ("test", "validation")

# uint8 images [n, height, width, channels] and integer labels [n].
Examples = tuple[np.ndarray, np.ndarray]


def default_dir() -> str:
    """Return the default folder of TFDS."""
    from tensorflow_datasets.core import constants

    return os.path.abspath(os.path.expanduser(constants.get_default_data_dir()))


def find_prepared(name: str, data_dir: str) -> str | None:
    """Return the newest prepared version `data_dir/name/1.2.3`, or None."""
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
    newest = ".".join(map(str, max(versions, default=())))
    return os.path.join(folder, newest) if newest else None


@contextlib.contextmanager
def reading(folder: str) -> Iterator[Any]:
    """Open a prepared folder as a builder; DataError if it cannot be read."""
    import tensorflow_datasets as tfds

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with _only_own_features(folder):
            builder = tfds.builder_from_directory(folder)
        yield builder
    except TowersError:
        raise
    except ImportError as error:  # array_record is not built for every system
        why = f"cannot be read here: {one_line(error)[:100]}"
        raise DataError(f"{shown(folder)}: {why}") from error
    except Exception as error:  # from TensorFlow, protobuf or json
        why = f"tensorflow-datasets cannot read it: {one_line(error)[:100]}"
        raise DataError(f"{shown(folder)}: {why}; prepare it anew") from error
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _only_own_features(folder: str) -> Iterator[None]:
    """Refuse features of other packages, whose modules TFDS would import.

    The file `features.json` is not searched, since TFDS reads several forms of it.
    """
    from tensorflow_datasets.core.features.feature import FeatureConnector

    original = vars(FeatureConnector)["cls_from_name"]
    find = FeatureConnector.cls_from_name

    def find_own(name):
        if not name.startswith("tensorflow_datasets."):
            what = f"features.json names the class {one_line(name, 100)}"
            why = f"{what}, which is not one of tensorflow-datasets, nor imported"
            raise DataError(f"{folder}: {why}; prepare it without that feature")
        return find(name)

    FeatureConnector.cls_from_name = find_own
    try:
        yield
    finally:
        FeatureConnector.cls_from_name = original


def load(
    name: str, data_dir: str = "", image_options: ImageOptions | None = None
) -> DataSet:
    """Open a prepared data set, without the network; uint8 [n, height, width, 1 or 3].

    It is NAME or NAME/CONFIG in `data_dir` or the default folder of
    tensorflow-datasets. Without a split `test` or `validation` that has labels, a tenth
    of the split `train` is held out for testing. DataError if it is missing, damaged,
    or has no image with a label.
    """
    options = (image_options or ImageOptions()).with_survey()
    folder = _find(name, data_dir)
    with reading(folder) as builder:
        keys = _image_and_label(folder, builder.info)
        image, label = (builder.info.features[key] for key in keys)
        names = tuple(map(class_name, label.names))
        files, titles = {"train": Split(folder, builder, "train", keys, names)}, {}
        for split in TEST_SPLITS:
            if split in builder.info.splits and "test" not in files:
                images = Split(folder, builder, split, keys, names)
                if images.is_labeled():
                    files["test"], titles["test"] = images, f"split {split}"
        used, inventory = {"split train", *titles.values()}, Inventory()
        others = (x for x in builder.info.splits if f"split {x}" not in used)
        inventory.leave_out("splits", *others)
        return splits.data_set(
            PREFIX + name,
            f"tensorflow-datasets {builder.info.full_name} in {folder}",
            {split: lambda *_, x=images: x for split, images in files.items()},
            options,
            names=titles,
            inventory=inventory,
            channels=1 if image.shape[-1] == 1 else 3,
        )


def _image_and_label(folder: str, info: Any) -> tuple[str, str]:
    """Return the keys of the supervised features, else of the only image and label."""
    import tensorflow_datasets as tfds

    features = info.features
    images, labels = (
        [key for key, feature in features.items() if isinstance(feature, kind)]
        for kind in (tfds.features.Image, tfds.features.ClassLabel)
    )
    supervised = info.supervised_keys
    if supervised and supervised[0] in images and supervised[1] in labels:
        images, labels = [supervised[0]], [supervised[1]]
    if len(images) != 1 or len(labels) != 1:
        text = ", ".join(f"{k} ({type(v).__name__})" for k, v in features.items())
        why = f"one image with one class label is needed, not {shown(text)}"
        raise DataError(f"{folder}: {why}")
    if (dtype := features[images[0]].np_dtype) not in (np.uint8, np.uint16):
        why = f"{images[0]} is {np.dtype(dtype)}, and 8 or 16 bits are read"
        raise DataError(f"{folder}: {why}")
    return images[0], labels[0]


def _find(name: str, data_dir: str) -> str:
    root, shared = data_folder(data_dir), default_dir()
    for folder in (root, shared):
        if prepared := find_prepared(name, folder):
            return prepared
    configs = [
        f"{name}/{entry}"
        for folder in (root, shared)
        for entry in _entries(os.path.join(folder, name))
        if find_prepared(f"{name}/{entry}", folder)
    ]
    if configs:
        what = f"{PREFIX}{name} is prepared as {', '.join(configs)}"
        raise DataError(f"{what}; choose one: --dataset={PREFIX}{configs[0]}")
    why = f"no {name}/VERSION in {root} (--data_dir) or {shared}"
    way = f"prepare it: tfds build {name} --file_format=array_record"
    raise DataError(f"{PREFIX}{name} was not found: {why}; {way}")


def _entries(folder):
    """Return the names in a folder, sorted; none if the folder is missing."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read: {error.strerror}") from error


class Split:
    """The images of one split, an `ImageFiles` that checks the labels.

    `keys` are features of each example: the encoded image, the label, and others.
    DataError if the split is missing, damaged, or has another number of examples.
    """

    def __init__(
        self,
        folder: str,
        builder: Any,
        split: str,
        keys: Sequence[str],
        class_names: tuple[str, ...] = (),
    ):
        self.class_names = class_names
        info, splits = builder.info, builder.info.splits
        if split not in splits:
            names = shown(", ".join(splits))
            raise DataError(f"{folder}: has no split '{split}', only {names}")
        self._location = f"{folder}: split '{split}'"
        self._num_classes = info.features[keys[1]].num_classes
        try:
            self._length, self._values = _open_split(folder, builder, split, keys)
        except (OSError, ValueError) as error:
            path = getattr(error, "filename", None)
            file = f"{path}: " if path else ""
            raise DataError(f"{self._location}: {file}{reason(error)}") from error
        expected = splits[split].num_examples
        if self._length != expected or not expected:
            raise DataError(f"{self._location}: {self._length} of {expected} examples")

    def __len__(self) -> int:
        return self._length

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the encoded image and the label of an example."""
        return self.values(index)[:2]

    def values(self, index: int) -> tuple:
        """Return values of all keys; for errors see `ImageFiles.read`."""
        _, label, *_ = values = self._values(index)
        if not 0 <= label < self._num_classes:
            most = self._num_classes - 1
            raise ValueError(f"has the label {label}, expected 0 to {most}")
        return values

    def is_labeled(self) -> bool:
        """Return whether the first image has a label; hidden labels are -1."""
        try:
            return self._values(0)[1] != -1
        except (OSError, ValueError):
            return True

    def location(self, index: int) -> str:
        """Return the location of an example, for messages."""
        return f"{self._location}, image {index} (counted from 0)"


def _open_split(folder, builder, split, keys):
    """Return the number of examples, and a function index -> values of the keys."""
    import tensorflow_datasets as tfds

    info = builder.info
    if info.file_format is tfds.core.FileFormat.ARRAY_RECORD:
        as_stored = {keys[0]: tfds.decode.SkipDecoding()}
        examples = builder.as_data_source(split, decoders=as_stored)

        def values(index):
            try:
                example = examples[index]
                return tuple(example[key] for key in keys)
            except Exception as error:  # any error of array_record
                raise ValueError(f"cannot be read: {one_line(error)}") from error

        return len(examples), values

    if info.file_format is not tfds.core.FileFormat.TFRECORD:
        why = f"is {info.file_format.value}, and array_record or tfrecord are read"
        raise DataError(f"{folder}: {why}: tfds build --file_format=array_record")
    records = open_records([os.fspath(x) for x in info.splits[split].filepaths])

    def values(index):
        content, _ = records.read(index)
        try:
            features = tf.train.Example.FromString(content).features.feature
            each = (features[key] for key in keys)
            lists = (x.bytes_list.value or x.int64_list.value for x in each)
            return tuple(value for [value] in lists)
        except Exception as error:  # any error of protobuf
            why = f"is not a record of an image: {one_line(error)}"
            raise ValueError(why) from error

    return len(records), values


def read_arrays(
    folder: str, image_shape: tuple[int, int, int]
) -> tuple[Examples, Examples, str, tuple[str, ...]]:
    """Read the splits `train` and `test` of a prepared folder into memory.

    Examples come in the order of their feature `id` if they have one, which in TFDS's
    CIFAR-10 is the order of the official files. Returns them with the origin and the
    names of the classes. DataError if they are not uint8 images of that shape.
    """
    with reading(folder) as builder:
        keys: tuple[str, ...] = _image_and_label(folder, builder.info)
        image, label = (builder.info.features[key] for key in keys)
        if image.np_dtype != np.uint8 or image.shape != image_shape:
            actual = f"{np.dtype(image.np_dtype)} {list(image.shape)}"
            raise DataError(f"{folder}: is {actual}, not uint8 {list(image_shape)}")
        if "id" in builder.info.features:
            keys = (*keys, "id")
        train, test = (
            _read_split(Split(folder, builder, split, keys), image_shape)
            for split in ("train", "test")
        )
        origin = f"tensorflow-datasets {builder.info.full_name} in {folder}"
        return train, test, origin, tuple(label.names)


def _read_split(split, image_shape):
    images = np.empty((len(split), *image_shape), np.uint8)
    labels, ids = np.empty(len(split), np.int32), [()] * len(split)

    def read(index):
        try:
            content, labels[index], *ids[index] = split.values(index)
            images[index] = read_image(content, image_shape, resize=False)
        except (OSError, ValueError, MemoryError) as error:
            raise DataError(f"{split.location(index)}: {reason(error)}") from error

    streams.call_in_readers(read, len(split))
    order = sorted(range(len(split)), key=ids.__getitem__)
    sort_in_place(images, order)
    return images, labels[order]
