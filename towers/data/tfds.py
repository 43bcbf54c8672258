"""Data sets of labeled images that tensorflow-datasets (TFDS) has prepared.

`tfds:NAME` takes any with one image and one label, of any size, prepared as
array_record or tfrecord; it is read in place, and images are decoded when they are
read. Published data sets are read into memory.

TFDS is imported inside the functions, since most runs do without it. Finding and
reading a prepared folder needs no network.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from towers.data.cached import (
    CachedSource,
    ImageCache,
    leave_out_bad_images,
    sampled_moments,
    settle_size,
)
from towers.data.image_files import ImageOptions
from towers.data.paths import data_folder, reason, shown
from towers.data.sources import TEST_FRACTION, DataSet, split_off_test
from towers.data.tfrecord import Records
from towers.errors import DataError, TowersError, one_line

PREFIX = "tfds:"
TEST_SPLITS = ("test", "validation")

Examples = tuple[np.ndarray, np.ndarray]


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


def load(
    name: str, data_dir: str = "", image_options: ImageOptions | None = None
) -> DataSet:
    """Opens a prepared data set, without the network.

    Without a split `test` or `validation` that has labels, a tenth of the split `train`
    is held out for testing, drawn at random, the same in every run.

    Args:
        name: NAME or NAME/CONFIG, as tensorflow-datasets has it.
        data_dir: folder in which `NAME/VERSION/` lies; empty means `data`. The default
            folder of tensorflow-datasets comes next.
        image_options: size of the images, and their cache.

    Returns:
        Sources of uint8 [n, height, width, 1 or 3]. Mean and standard
        deviation are those of a sample; see `cached.SAMPLE`.

    Raises:
        DataError: it is not there, is damaged, or has no image with a label.
    """
    options = (image_options or ImageOptions()).with_survey()
    folder = _find(name, data_dir)
    with reading(folder) as builder:
        image_key, label_key = _image_and_label(folder, builder.info)
        image, label = (builder.info.features[key] for key in (image_key, label_key))

        def open_split(split):
            keys, num_classes = (image_key, label_key), label.num_classes
            return _open_split(folder, builder, split, keys, num_classes)

        _require_split(folder, builder.info, "train")
        train_images = open_split("train")
        channels = 1 if image.shape[-1] == 1 else 3
        options, image_shape, note = settle_size(train_images, channels, options)
        cache = ImageCache(options.cache_mb)
        train = CachedSource(train_images, image_shape, options, cache)
        for split in TEST_SPLITS:
            images = split in builder.info.splits and open_split(split)
            if images and images.is_labeled():
                test = CachedSource(images, image_shape, options, cache)
                origin = f"split {split} for testing"
                break
        else:
            # The labels are not known before all images are read.
            train, test = split_off_test(train, np.zeros(len(train_images)), folder)
            origin = f"{TEST_FRACTION:.0%} held out for testing"
        (train, test), bad_images = leave_out_bad_images([train, test], options)
        origin += f"{'; ' if note else ''}{note}{bad_images}"
    mean, deviation = sampled_moments(train)
    return DataSet(
        name=PREFIX + name,
        train=train,
        test=test,
        class_names=tuple(map(shown, label.names)),
        mean=mean,
        deviation=deviation,
        origin=f"tensorflow-datasets {builder.info.full_name} in {folder} ({origin})",
    )


def _image_and_label(folder: str, info: Any) -> tuple[str, str]:
    """The keys of the features to learn from: the supervised ones, else the only image
    and the only label."""
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
        raise DataError(
            f"{folder}: one image with one class label is needed, but its features are "
            + shown(", ".join(f"{k} ({type(v).__name__})" for k, v in features.items()))
        )
    image = features[images[0]]
    if image.np_dtype not in (np.uint8, np.uint16):
        raise DataError(
            f"{folder}: {images[0]} is of type {np.dtype(image.np_dtype)}; only images "
            "of 8 or 16 bits are read"
        )
    return images[0], labels[0]


def _find(name: str, data_dir: str) -> str:
    """The prepared folder, in `data_dir` or in the default one."""
    root, shared = data_folder(data_dir), default_dir()
    for place in (root, shared):
        prepared = find_prepared(name, place)
        if prepared:
            return prepared
    configs = [
        f"{name}/{entry}"
        for place in (root, shared)
        for entry in _entries(os.path.join(place, name))
        if find_prepared(f"{name}/{entry}", place)
    ]
    if configs:
        raise DataError(
            f"{PREFIX}{name} is prepared as {', '.join(configs)}; choose one of them: "
            f"--dataset={PREFIX}{configs[0]}"
        )
    raise DataError(
        f"{PREFIX}{name} was not found: no {name}/VERSION in {root} (--data_dir) or "
        f"{shared}; to prepare it, on a machine with a network: tfds build {name} "
        "--file_format=array_record"
    )


def _entries(folder):
    """The names in a folder, sorted; none where there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read: {error.strerror}") from error


class Prepared:
    """The images of one split, an `ImageFiles` that checks the labels.

    Args:
        read: index -> encoded image, label.
        num_examples: of the split.
        place: of the split, for messages.
        num_classes: labels are below it.
    """

    def __init__(
        self,
        read: Callable[[int], tuple[bytes, int]],
        num_examples: int,
        place: str,
        num_classes: int,
    ):
        self._read = read
        self._num_examples = num_examples
        self._place = place
        self._num_classes = num_classes

    def __len__(self) -> int:
        return self._num_examples

    def read(self, index: int) -> tuple[bytes, int]:
        content, label = self._read(index)
        if not 0 <= label < self._num_classes:
            raise ValueError(
                f"has the label {label}, expected 0 to {self._num_classes - 1}"
            )
        return content, label

    def is_labeled(self) -> bool:
        """True where the first image has a label; hidden labels are -1."""
        try:
            return self._read(0)[1] != -1
        except (OSError, ValueError):
            return True

    def place(self, index: int) -> str:
        return f"{self._place}, image {index} (counted from 0)"


def _open_split(folder, builder, split, keys, num_classes):
    """The encoded images of a split, in the order of its files."""
    import tensorflow_datasets as tfds

    info = builder.info
    place = f"{folder}: split '{split}'"
    if info.file_format is tfds.core.FileFormat.ARRAY_RECORD:
        as_stored = {keys[0]: tfds.decode.SkipDecoding()}
        examples = builder.as_data_source(split, decoders=as_stored)

        def read(index):
            try:
                example = examples[index]
            except Exception as error:  # Any error of array_record.
                raise ValueError(f"cannot be read: {one_line(error)}") from error
            return example[keys[0]], int(example[keys[1]])

        return Prepared(read, len(examples), place, num_classes)

    if info.file_format is not tfds.core.FileFormat.TFRECORD:
        raise DataError(
            f"{folder}: is prepared as {info.file_format.value}, and only array_record "
            "and tfrecord are read: tfds build --file_format=array_record"
        )
    try:
        records = Records([os.fspath(x) for x in info.splits[split].filepaths])
    except (OSError, ValueError) as error:
        raise DataError(f"{place}: {reason(error)}") from error
    if len(records) != info.splits[split].num_examples:
        raise DataError(
            f"{place} should have {info.splits[split].num_examples} examples, found "
            f"{len(records)}"
        )

    def read(index):
        content = records.read(index)
        try:
            features = tf.train.Example.FromString(content).features.feature
            [image] = features[keys[0]].bytes_list.value
            [label] = features[keys[1]].int64_list.value
        except Exception as error:  # Any error of protobuf.
            raise ValueError(f"is no record of an image: {one_line(error)}") from error
        return image, int(label)

    return Prepared(read, len(records), place, num_classes)


def read_arrays(
    folder: str, image_shape: tuple[int, int, int]
) -> tuple[Examples, Examples, str, tuple[str, ...]]:
    """Reads the splits `train` and `test` of a prepared folder into memory.

    The examples come in the order of their feature `id` where they have one, which in
    TFDS's CIFAR-10 is the order of the official files, else in that of the folder's
    files.

    Args:
        folder: as `find_prepared` gives it.
        image_shape: that the images must have.

    Returns:
        uint8 images [n, *image_shape] and int32 labels [n] of either split, the origin,
        and the names of the classes.

    Raises:
        DataError: the folder is damaged, or does not hold uint8 images of that shape
            with one label.
    """
    with reading(folder) as builder:
        keys = _image_and_label(folder, builder.info)
        image, label = (builder.info.features[key] for key in keys)
        if image.np_dtype != np.uint8 or image.shape != image_shape:
            raise DataError(
                f"{folder}: expected uint8 images of {list(image_shape)}, found "
                f"{np.dtype(image.np_dtype)} {list(image.shape)}"
            )
        train, test = (
            _read_split(folder, builder, split, keys) for split in ("train", "test")
        )
        origin = f"tensorflow-datasets {builder.info.full_name} in {folder}"
        return train, test, origin, tuple(label.names)


def _read_split(folder, builder, split, keys):
    _require_split(folder, builder.info, split)
    num_examples = builder.info.splits[split].num_examples
    if "id" in builder.info.features:
        keys = (*keys, "id")
    columns = [[] for _ in keys]
    with tf.device("CPU:0"):
        batches = _stream(builder, split, keys).batch(1000).prefetch(2)
        for batch in batches.as_numpy_iterator():
            for column, key in zip(columns, keys, strict=True):
                column.append(batch[key])
    # TFDS counts too, but not what the metadata say beyond what there is.
    found = sum(map(len, columns[0]))
    if found != num_examples or not found:
        raise DataError(
            f"{folder}: split '{split}' should have {num_examples} examples, found "
            f"{found}"
        )
    images, labels, *ids = map(np.concatenate, columns)
    if ids:
        order = np.argsort(ids[0], kind="stable")
        images, labels = images[order], labels[order]
    return images, labels.astype(np.int32)


def _require_split(folder, info, split):
    if split not in info.splits:
        raise DataError(
            f"{folder}: has no split '{split}', only {shown(', '.join(info.splits))}"
        )


def _stream(builder: Any, split: str, keys: Sequence[str]) -> tf.data.Dataset:
    """These features of a split, in the order of its files."""
    import tensorflow_datasets as tfds

    return builder.as_dataset(
        split=split,
        shuffle_files=False,
        decoders=tfds.decode.PartialDecoding(dict.fromkeys(keys, True)),
        read_config=tfds.ReadConfig(try_autocache=False),
    )
