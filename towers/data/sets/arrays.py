"""Data sets of arrays in memory, as Keras' `fit` takes them."""

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.config import factories
from towers.data.files.image_files import ImageOptions
from towers.data.files.samples import settle_range
from towers.data.files.unlabeled import fit_images, reading
from towers.data.files.unlabeled import pixels as as_pixels
from towers.data.inventory import Inventory
from towers.data.pixel_format import PixelFormat
from towers.data.sources import (
    TEST_FRACTION,
    ArraySource,
    DataSet,
    channel_moments,
    sort_in_place,
    split_off_test,
)
from towers.errors import DataError
from towers.messages import one_line

ORIGIN = "given in Python"
# How labels become whole numbers from 0 on.
WHOLE = "np.unique(labels, return_inverse=True)[1]"
# Maximum number of classes without class names, besides ten for each image.
MAX_CLASSES = 1000


# (x, y), (x, y, weights) or a `tf.data.Dataset`; and one to three of these.
Split = Any
Data = Any


def give(data: Any, class_names: Sequence[str | int] = ()) -> str:
    """Register arrays, see `towers.train`, and return their value of `--dataset`.

    Without test images a tenth is held out. Classes are by default called by their
    numbers. DataError if they are not images and labels.
    """
    splits = _splits(data)
    names = ["training", "validation", "test"]
    if len(splits) == 2:
        names.remove("validation")
    parts = dict(zip(names, splits, strict=False))
    arrays = {name: _arrays(part, name) for name, part in parts.items()}
    dtypes = {name: images.dtype.name for name, (images, *_) in arrays.items()}
    if {*dtypes.values()} == {"uint8", "uint16"}:
        arrays = {name: _arrays(x, name, "uint16") for name, x in parts.items()}
    elif len({*dtypes.values()}) > 1:
        raise DataError(f"data: its images differ: {dtypes}; give all in one unit")
    if len(shapes := {images.shape[1:] for images, *_ in arrays.values()}) > 1:
        raise DataError(f"data: the images of its parts differ in shape: {shapes}")
    return _give(arrays, class_names or getattr(splits[0], "class_names", None))


def give_test_set(
    data: Any,
    class_names: Sequence[str],
    *,
    multi_label: bool = False,
    dtype: str = "",
    **fitted: Any,
) -> str:
    """Register (x, y) to evaluate a network on, `fitted` by `unlabeled.fit_images`."""
    images, labels, _ = _arrays(data, "test", dtype)
    if fitted:
        image = np.dtype((images.dtype, fitted["image_shape"]))
        images = np.fromiter(fit_images(images, **fitted), image, len(images))
    return _give({"test": (images, labels, None)}, class_names, multi_label)


def _give(arrays, class_names, multi_label=False):
    each = {name: labels for name, (_, labels, _) in arrays.items()}
    inventory = Inventory(dict.fromkeys(arrays, "arrays"))
    sets = [labels for labels in each.values() if labels.ndim == 2]
    if not multi_label and all((labels.sum(1) == 1).all() for labels in sets):
        if sets:
            inventory.infer("labels", "one class an image, from one-hot columns")
        each = {k: x.argmax(1) if x.ndim == 2 else x for k, x in each.items()}
    elif sets:
        inventory.infer("labels", f"a set an image, from {sets[0].shape[1]} columns")
    if len({labels.shape[1:] for labels in each.values()}) > 1:
        shapes = ", ".join(str(list(x.shape)) for x in each.values())
        raise DataError(f"data: the labels of its parts differ in shape: {shapes}")
    labels = np.concatenate(list(each.values()))
    class_names = _class_names(labels, tuple(map(str, class_names or ())))
    crc = zlib.crc32(repr((class_names, list(arrays))).encode())
    for name, (images, _, weights) in arrays.items():
        dtype = np.int32 if labels.ndim == 1 else np.uint8
        arrays[name] = images, each[name].astype(dtype), weights
        crc = zlib.crc32(arrays[name][1], zlib.crc32(images, crc))
        crc = crc if weights is None else zlib.crc32(weights, crc)
    name = factories.given_name(crc)
    # The sources are created later, as the devices may not be configured yet.
    create = functools.partial(data_set, arrays, class_names, inventory)
    factories.give("dataset", name, create)
    return name


def _class_names(labels, class_names):
    """Return the names of all classes, by default their numbers."""
    if labels.ndim == 2:
        num_classes = labels.shape[1]
        if class_names and len(class_names) != num_classes:
            why = f"{num_classes} columns of labels, and {len(class_names)} class_names"
            raise DataError(f"data: {why}; give one for each column")
        return class_names or tuple(map(str, range(num_classes)))
    low, high = int(labels.min()), int(labels.max())
    begin = f"data: the labels go from {low} to {high}"
    if low > 0 and (not class_names or (low == 1 and high == len(class_names))):
        way = f"subtract {low}, or give class_names of all classes, in their order"
        raise DataError(f"{begin}, and none is 0; {way}")
    most = len(class_names) or MAX_CLASSES + 10 * len(labels)
    if low < 0 or high >= most:
        way = f"they should be at least 0 and below {most}, as {WHOLE} gives them"
        raise DataError(f"{begin}, of {len(labels)} images; {way}")
    return class_names or tuple(map(str, range(high + 1)))


def data_set(
    arrays: Mapping[str, Any],
    class_names: tuple[str, ...],
    inventory: Inventory,
    *,
    image_options: ImageOptions,
) -> DataSet:
    """Return the data set of split -> (images, labels, sample weights or None)."""
    sources: dict[str, Any] = {k: ArraySource(*x) for k, x in arrays.items()}
    first, (images, *_) = next(iter(sources.values())), next(iter(arrays.values()))
    train: Any = sources.get("training")
    test: Any = sources.get("test")
    if test is None:
        train, test = split_off_test(train, train.labels, "data")
        held_out = f"{TEST_FRACTION:.0%} of each class of these, held out at random"
        inventory.splits["test"] = held_out
    options, is_known = image_options, image_options.pixels is not None
    if not is_known:
        bands = 3 if images.shape[-1] == 1 else images.shape[-1]
        inferred = PixelFormat(first.dtype, bands).with_range(options.value_range)
        options = dataclasses.replace(options, pixels=inferred)
    pixels = settle_range(first, options, is_known, inventory)
    mean, std = channel_moments(np.asarray(pixels.scale(images)))
    return DataSet(
        name="arrays",
        train=train,
        test=test,
        class_names=class_names,
        mean=mean,
        std=std,
        pixels=pixels,
        origin=ORIGIN,
        validation=sources.get("validation"),
        inventory=inventory,
    )


def _splits(data):
    """Return the parts of the data, each (x, y), (x, y, weights) or a data set."""
    if isinstance(data, tf.data.Dataset):
        return [data]
    if isinstance(data, Mapping) or not isinstance(data, Sequence):
        kind = type(data).__name__
    else:
        parts = list(map(_is_part, data))
        if (len(data) == 2 and not all(parts)) or (len(data) == 3 and not parts[0]):
            return [data]
        if 1 <= len(data) <= 3 and all(parts):
            return list(data)
        kind = f"{len(data)} parts"
    raise DataError(
        f"data: {kind}; give (x, y), ((x, y), (x_test, y_test)) or ((x, y), "
        "(x_validation, y_validation), (x_test, y_test)), each a pair of arrays or a "
        "tf.data.Dataset; training images may have weights, (x, y, sample_weight)"
    )


def _is_part(value):
    """Return whether it is a sequence of arrays or a data set, not one of images."""
    if isinstance(value, list) and len(value) in (2, 3) and hasattr(value[0], "dtype"):
        return value[0].ndim != getattr(value[1], "ndim", 1)
    return isinstance(value, (tuple, tf.data.Dataset))


def _arrays(split, name, dtype=""):
    """Return images, integer labels [n] or [n, classes], and weights or None."""
    is_data_set = isinstance(split, tf.data.Dataset)
    if is_data_set:
        split = _read(split, name)
    try:
        images, labels, *weights = split
        [weights] = weights or [None]
    except (TypeError, ValueError):
        parts = "(images, labels[, sample_weight]), or a tf.data.Dataset of them"
        raise DataError(f"data: the {name} part should be {parts}") from None
    images = as_pixels(images, f"data: the {name} images", dtype)
    labels = _labels(labels, name)
    if not len(images) or len(images) != len(labels):
        raise DataError(f"data: {len(images)} {name} images with {len(labels)} labels")
    weights = None if weights is None else _weights(weights, len(images), name)
    if is_data_set:  # it may shuffle: order by the contents
        digests = [
            hashlib.blake2b(image.tobytes() + str(_sorted_by(label)).encode()).digest()
            for image, label in zip(images, labels, strict=True)
        ]
        keys = digests if weights is None else list(zip(digests, weights, strict=True))
        order = sorted(range(len(images)), key=keys.__getitem__)
        sort_in_place(images, order)
        labels = labels[order]
        weights = None if weights is None else weights[order]
    return np.ascontiguousarray(images), labels, weights


def _sorted_by(label):
    """Return the number of a label, or all columns if it has several."""
    is_set = label.ndim and label.sum() != 1
    return label.tolist() if is_set else np.argmax(label) if label.ndim else label


def _read(dataset, name):
    """Return all elements of a data set, batched or not, read once."""
    length = dataset.cardinality().numpy()
    if length < 0:
        which = "has no end" if length == tf.data.INFINITE_CARDINALITY else "is unknown"
        way = "leave out repeat(), or apply tf.data.experimental.assert_cardinality(n)"
        raise DataError(f"data: the length of the {name} part {which}; {way}")
    spec = dataset.element_spec
    is_tuple = isinstance(spec, tuple) and len(spec) in (2, 3)
    if not is_tuple or not all(isinstance(x, tf.TensorSpec) for x in spec):
        elements = "(image, label) or (image, label, weight)"
        raise DataError(f"data: the elements of the {name} part should be {elements}")
    if not length:
        raise DataError(f"data: the {name} part is empty")
    image, label = (x.shape for x in spec[:2])
    are_columns = image.rank == 3 and label.rank == 1 and image[0] != label[0]
    if label.rank == 0 or are_columns:  # not batched
        dataset = dataset.batch(256)
    columns: list[np.ndarray] = []
    with reading(f"data: the {name} part"):
        for batch in dataset.as_numpy_iterator():
            columns = columns or [np.empty((0, *x.shape[1:]), x.dtype) for x in batch]
            for column, values in zip(columns, batch, strict=True):
                if values.shape[1:] != column.shape[1:]:
                    raise ValueError(f"{values.shape[1:]} and {column.shape[1:]}")
                # Grows without a copy, unlike np.concatenate.
                shape = len(column) + len(values), *column.shape[1:]
                column.resize(shape, refcheck=False)
                column[-len(values) :] = values
    return columns


def _labels(labels, name):
    labels = _column(labels, f"{name} labels")
    if labels.ndim == 2 and ((labels == 0) | (labels == 1)).all():
        return labels.astype(np.uint8)
    # Keras' `label_mode="binary"` has 0. and 1., comparisons have bool.
    if labels.ndim == 1 and labels.dtype.kind in "bf":
        with np.errstate(invalid="ignore"):
            integers = labels.astype(np.int64)
        labels = integers if (integers == labels).all() else labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"data: the {name} labels are {labels.dtype} {list(labels.shape)}; they "
            "should be [n, classes] of 0 and 1, one-hot or with a 1 for each label, or "
            f"whole numbers [n], as {WHOLE} gives them"
        )
    return labels


def _weights(weights, count, name):
    """Return float32 [n], finite, at least 0 and not all 0."""
    if name != "training":
        why = f"the {name} part has sample weights, and only training uses them"
        raise DataError(f"data: {why}; give (x, y)")
    weights = _column(weights, "sample weights")
    begin = f"{weights.dtype} {list(weights.shape)}"
    if weights.shape == (count,) and weights.dtype.kind in "biuf":
        with np.errstate(over="ignore"):
            weights = weights.astype(np.float32)
        if np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0:
            return weights
        begin += f" from {weights.min():g} to {weights.max():g}"
    expected = f"finite numbers [{count}] of at least 0, and not all 0"
    raise DataError(f"data: the sample weights are {begin}; give {expected}")


def _column(values, what):
    """Return an array, without the second axis of a column [n, 1]."""
    try:
        values = np.asarray(values)
        if values.dtype == object:  # of a column of pandas
            values = np.asarray(values.tolist())
    except ValueError as error:  # lists of different lengths
        raise DataError(f"data: the {what}: {one_line(error)}") from None
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
