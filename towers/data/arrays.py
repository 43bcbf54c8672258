"""Data sets of arrays in memory, as Keras' `fit` takes them."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.config import factories
from towers.data.sources import ArraySource, DataSet, channel_moments, split_off_test
from towers.errors import DataError

ORIGIN = "given in Python"


def give(data: Any, class_names: Sequence[str] = ()) -> str:
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
    return _give(_data_set_of(data, class_names))


def give_test_set(data: Any, class_names: Sequence[str]) -> str:
    """As `give`, of images and labels (x, y) on which a network is evaluated."""
    images, labels = _arrays(data, "test")
    mean, deviation = channel_moments(images)
    source = ArraySource(images, labels)
    names = tuple(class_names)
    return _give(DataSet("arrays", None, source, names, mean, deviation, ORIGIN))


def _give(data_set):
    crc = zlib.crc32(repr(data_set.class_names).encode())
    for source in (data_set.train, data_set.validation, data_set.test):
        if source is not None:
            images, labels = source.read(tf.range(source.num_examples))
            crc = zlib.crc32(labels.numpy(), zlib.crc32(images.numpy(), crc))
    name = factories.given_name(crc)
    factories.give("dataset", name, lambda: data_set)
    return name


def _data_set_of(data, class_names):
    splits = [data] if _is_split(data) else list(data)
    if not 1 <= len(splits) <= 3:
        raise DataError(
            f"data: {len(splits)} parts; give (x, y), ((x, y), (x_test, y_test)) or "
            "((x, y), (x_validation, y_validation), (x_test, y_test))"
        )
    names = ("training", "validation", "test")
    if len(splits) == 2:
        names = "training", "test"
    arrays = [_arrays(x, name) for x, name in zip(splits, names, strict=False)]
    sources = [ArraySource(*pair) for pair in arrays]
    if not class_names:
        class_names = getattr(splits[0], "class_names", None) or range(
            1 + max(int(labels.max()) for _, labels in arrays)
        )
    train, *validation, test = sources if len(sources) > 1 else (*sources, None)
    if test is None:
        train, test = split_off_test(train, train.labels, "data")
    mean, deviation = channel_moments(arrays[0][0])
    return DataSet(
        name="arrays",
        train=train,
        test=test,
        class_names=tuple(map(str, class_names)),
        mean=mean,
        deviation=deviation,
        origin=ORIGIN,
        validation=validation[0] if validation else None,
    )


def _is_split(data):
    """Whether it is (x, y), or a data set of them, and not several of these."""
    return isinstance(data, tf.data.Dataset) or hasattr(data[0], "dtype")


def _arrays(split, name):
    """uint8 images [n, height, width, channels] and int32 labels [n]."""
    if isinstance(split, tf.data.Dataset):
        split = _read(split, name)
    try:
        images, labels = split
    except (TypeError, ValueError):
        raise DataError(
            f"data: the {name} part should be a pair, (images, labels), or a "
            "tf.data.Dataset of them"
        ) from None
    images, labels = _images(np.asarray(images), name), _labels(labels, name)
    if not len(images) or len(images) != len(labels):
        raise DataError(f"data: {len(images)} {name} images with {len(labels)} labels")
    return images, labels


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
    if not isinstance(spec, tuple) or len(spec) != 2:
        raise DataError(f"data: the {name} part should have elements (image, label)")
    if spec[0].shape.rank == 3:
        dataset = dataset.batch(256)
    try:
        images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
        return np.concatenate(images), np.concatenate(labels)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        raise DataError(f"data: the {name} images differ in shape: {error}") from None


def _images(images, name):
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4:
        raise DataError(
            f"data: the {name} images are {list(images.shape)}; they should be "
            "[n, height, width, channels]"
        )
    if images.dtype == np.uint8 or not images.size:
        return images.astype(np.uint8, copy=False)
    low, high = images.min(), images.max()
    if not (low >= 0 and high <= 255) or (images.dtype.kind == "f" and high <= 1):
        raise DataError(
            f"data: the {name} images are {images.dtype} from {low:g} to {high:g}; "
            "they should be from 0 to 255. Leave out the division: they are "
            "standardized in training and in evaluations"
        )
    return np.round(images).astype(np.uint8)


def _labels(labels, name):
    labels = np.asarray(labels)
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
    if labels.size and not 0 <= labels.min() <= labels.max() < 2**31:
        raise DataError(f"data: the {name} labels go from {labels.min()}, not from 0")
    return labels.astype(np.int32)
