"""Data sets of arrays in memory, as Keras' `fit` takes them."""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.config import factories
from towers.data.sources import ArraySource, DataSet, channel_moments, split_off_test
from towers.data.unlabeled import fit_images, pixels, reading
from towers.errors import DataError, one_line

ORIGIN = "given in Python"

# Classes without names: at most so many, and ten for each image.
MOST_CLASSES = 1000


def give(data: Any, class_names: Sequence[str | int] = ()) -> str:
    """Makes arrays a data set of `--dataset`; where no images are for testing, a tenth
    is held out.

    Args:
        data: as of `towers.train`.
        class_names: in the order of the labels; by default their numbers.

    Returns:
        The value of the option.

    Raises:
        DataError: they are no images and labels.
    """
    splits = _splits(data)
    names = ("training", "validation", "test")
    if len(splits) == 2:
        names = "training", "test"
    arrays = {name: _arrays(x, name) for x, name in zip(splits, names, strict=False)}
    shapes = {images.shape[1:] for images, _ in arrays.values()}
    if len(shapes) > 1:
        raise DataError(f"data: the images of its parts differ in shape: {shapes}")
    return _give(arrays, class_names or getattr(splits[0], "class_names", None))


def give_test_set(data: Any, class_names: Sequence[str], **fitted: Any) -> str:
    """As `give`, of images and labels (x, y) on which a network is evaluated; `fitted`
    are arguments of `unlabeled.fit_images`."""
    images, labels = _arrays(data, "test")
    if fitted:
        images = np.stack(list(fit_images(images, **fitted)))
    return _give({"test": (images, labels)}, class_names)


def _give(arrays, class_names):
    """Without TensorFlow, whose devices are chosen later."""
    labels = np.concatenate([labels for _, labels in arrays.values()])
    class_names = _class_names(labels, tuple(map(str, class_names or ())))
    crc = zlib.crc32(repr((class_names, list(arrays))).encode())
    for name, (images, labels) in arrays.items():
        arrays[name] = images, labels.astype(np.int32)
        crc = zlib.crc32(arrays[name][1], zlib.crc32(images, crc))
    name = factories.given_name(crc)
    factories.give("dataset", name, lambda: _data_set(arrays, class_names))
    return name


def _class_names(labels, class_names):
    """The names, by default the numbers, of the classes of all labels."""
    low, high = int(labels.min()), int(labels.max())
    begin = f"data: the labels go from {low} to {high}"
    if low > 0 and (not class_names or low == 1 and high == len(class_names)):
        raise DataError(
            f"{begin}, and none is 0; subtract {low}, or give class_names of all "
            "classes, in the order of the labels"
        )
    most = len(class_names) or MOST_CLASSES + 10 * len(labels)
    if low < 0 or high >= most:
        raise DataError(
            f"{begin}, of {len(labels)} images; they should be at least 0 and below "
            f"{most}, as np.unique(labels, return_inverse=True)[1] gives them"
        )
    return class_names or tuple(map(str, range(high + 1)))


def _data_set(arrays, class_names):
    sources = {name: ArraySource(*pair) for name, pair in arrays.items()}
    train, test = sources.get("training"), sources.get("test")
    if test is None:
        train, test = split_off_test(train, train.labels, "data")
    mean, deviation = channel_moments(next(iter(arrays.values()))[0])
    return DataSet(
        name="arrays",
        train=train,
        test=test,
        class_names=class_names,
        mean=mean,
        deviation=deviation,
        origin=ORIGIN,
        validation=sources.get("validation"),
    )


def _splits(data):
    """(x, y), or a data set of them, as a part of its own; else the parts."""
    if isinstance(data, tf.data.Dataset):
        return [data]
    if isinstance(data, Mapping) or not isinstance(data, Sequence):
        kind = type(data).__name__
    else:
        if len(data) == 2 and not all(map(_is_part, data)):
            return [data]
        if 1 <= len(data) <= 3 and all(map(_is_part, data)):
            return list(data)
        kind = f"{len(data)} parts"
    raise DataError(
        f"data: {kind}; give (x, y), ((x, y), (x_test, y_test)) or ((x, y), "
        "(x_validation, y_validation), (x_test, y_test)), each a pair of arrays or a "
        "tf.data.Dataset"
    )


def _is_part(value):
    """Whether it is a pair of arrays or a data set, and no array or list of images."""
    is_list = isinstance(value, list) and len(value) == 2 and hasattr(value[0], "dtype")
    return is_list or isinstance(value, (tuple, tf.data.Dataset))


def _arrays(split, name):
    """uint8 images [n, height, width, channels] and integer labels [n]."""
    is_data_set = isinstance(split, tf.data.Dataset)
    if is_data_set:
        split = _read(split, name)
    try:
        images, labels = split
    except (TypeError, ValueError):
        raise DataError(
            f"data: the {name} part should be a pair, (images, labels), or a "
            "tf.data.Dataset of them"
        ) from None
    images = pixels(images, f"data: the {name} images")
    labels = _labels(labels, name)
    if not len(images) or len(images) != len(labels):
        raise DataError(f"data: {len(images)} {name} images with {len(labels)} labels")
    if is_data_set:  # it may shuffle: an order that the examples alone decide
        digests = [
            hashlib.blake2b(image.tobytes() + str(label).encode()).digest()
            for image, label in zip(images, labels, strict=True)
        ]
        order = sorted(range(len(images)), key=digests.__getitem__)
        images, labels = images[order], labels[order]
    return np.ascontiguousarray(images), labels


def _read(dataset, name):
    """All elements of a data set, batched or not, once."""
    length = dataset.cardinality().numpy()
    if length < 0:
        which = "has no end" if length == tf.data.INFINITE_CARDINALITY else "is unknown"
        raise DataError(
            f"data: the length of the {name} part {which}; leave out repeat(), or add "
            "apply(tf.data.experimental.assert_cardinality(n))"
        )
    spec = dataset.element_spec
    is_pair = isinstance(spec, tuple) and len(spec) == 2
    if not is_pair or not all(isinstance(x, tf.TensorSpec) for x in spec):
        raise DataError(f"data: the {name} part should have elements (image, label)")
    if not length:
        raise DataError(f"data: the {name} part is empty")
    image, label = (x.shape for x in spec)
    is_one_hot = image.rank == 3 and label.rank == 1 and image[0] != label[0]
    if label.rank == 0 or is_one_hot:  # not batched
        dataset = dataset.batch(256)
    with reading(f"data: the {name} part"):
        images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
        return np.concatenate(images), np.concatenate(labels)


def _labels(labels, name):
    try:
        labels = np.asarray(labels)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"data: the {name} labels: {one_line(error)}") from None
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and ((labels == 0) | (labels == 1)).all():
        if (labels.sum(1) == 1).all():
            labels = labels.argmax(1)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"data: the {name} labels are {labels.dtype} {list(labels.shape)}; they "
            "should be integers [n], or one-hot [n, classes]"
        )
    return labels
