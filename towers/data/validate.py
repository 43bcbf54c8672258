"""Checks of the parts of a data set against each other."""

import collections
import numbers
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from towers.data.files.cached import read_in_batches
from towers.data.sources import DataSet, known_labels, label_shape, location_of
from towers.data.streams import plain
from towers.errors import DataError, TowersError, cause, data_errors_of_tensorflow
from towers.messages import shown

# Number of labels that are read if a source does not list them, in all and at once.
NUM_SAMPLED = 1000
NUM_READ = 50


def validate(data_set: DataSet, is_own: bool = False) -> None:
    """Raise a DataError for the first problem; code of the user (`is_own`) is tried."""
    for problems in (_problems, _problems_of_own)[: 1 + is_own]:
        for problem in problems(data_set):
            raise DataError(f"{data_set.name}: {problem}")


def _problems(data_set: DataSet) -> Iterator[str]:
    names, ranks = data_set.class_names, set()
    if not _are(str, names) or not names:
        yield f"class_names={names!r:.60} should be texts, in the order of the labels"
    repeated = [name for name, n in collections.Counter(names).items() if n > 1]
    if repeated and data_set.train is not None:
        yield f"two classes are called {shown(repeated[0], 60)}; rename one of them"
    if data_set.test is None:
        yield "it has no test images"
    for split, source in data_set.sources.items():
        count, shape = source.num_examples, source.image_shape
        if not isinstance(count, numbers.Integral) or count < 1:
            yield f"num_examples={count} of the {split} images should be 1 or more"
        if not _are(numbers.Integral, shape) or len(shape) != 3 or min(shape) < 1:
            yield f"image_shape={shape!r:.60} should be (height, width, channels)"
        if tuple(shape) != tuple(data_set.image_shape):
            yield (
                f"the {split} images are {list(shape)} and the training images "
                f"{list(data_set.image_shape)}; they should have one shape"
            )
        labels = known_labels(source)
        if labels is None:
            continue
        kind = getattr(getattr(labels, "dtype", None), "kind", "")
        shapes = (count,), (count, len(names))
        if kind not in ("i", "u") or labels.shape not in shapes:
            yield f"the {split} labels should be a NumPy array of {count} integers"
        ranks.add(labels.ndim)
    if len(ranks) > 1:
        yield "some images have one label and others label sets"
    *_, channels = data_set.image_shape
    for name in ("mean", "std"):
        moments = getattr(data_set, name)
        moments = moments.tolist() if isinstance(moments, np.ndarray) else moments
        is_right = _are(numbers.Real, moments) and len(moments) == channels
        if not is_right or not np.isfinite(moments).all():
            yield f"{name}={moments!r:.60} should be a finite number for each channel"


def _are(kind, values):
    return isinstance(values, tuple | list) and all(isinstance(x, kind) for x in values)


def _problems_of_own(data_set: DataSet) -> Iterator[str]:
    if all(0 < x < 1 for x in (*data_set.mean, *data_set.std)):
        yield "mean and std should be in units of 0..255: multiply both by 255"
    for split, source in data_set.sources.items():
        begin = f"`read` of the {split} images"
        indices = tf.data.Dataset.from_tensors(np.array([0, source.num_examples - 1]))
        try:
            with data_errors_of_tensorflow(), tf.device("CPU:0"):
                images, labels = indices.map(plain(source.read)).get_single_element()
        except TowersError:
            raise
        except Exception as error:
            yield f"{begin}, in operations of TensorFlow, fails: {cause(error)}"
        shape = [2, *source.image_shape]
        expected = [2, *label_shape(source)]
        dtype = data_set.pixels.dtype
        is_right = images.dtype == dtype
        is_right &= labels.dtype.is_integer or len(expected) == 2
        if not is_right or [*images.shape] != shape or [*labels.shape] != expected:
            yield (
                f"{begin} gives {images.dtype.name} {[*images.shape]} and "
                f"{labels.dtype.name} {[*labels.shape]} for 2 indices; expected are "
                f"{dtype} {shape} and integers {expected}"
            )


def validate_labels(data_set: DataSet, known_alone: bool = False) -> None:
    """Refuse labels outside of the classes, of NUM_SAMPLED images if unknown."""
    num_classes = len(data_set.class_names)
    for split, source in data_set.sources.items():
        indices, labels = np.arange(source.num_examples), known_labels(source)
        if labels is None:
            if known_alone or hasattr(source, "labels"):
                continue
            indices = indices[:: max(1, len(indices) // NUM_SAMPLED)]
            batches = read_in_batches(source, NUM_READ, indices)
            labels = np.concatenate([labels for _, labels in batches])
        if labels.ndim == 2:
            num_classes = 2
            lowest = labels.min(1, initial=0)
            labels = np.where(lowest < 0, lowest, labels.max(1, initial=0))
        wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
        if wrong.size:
            index, label = int(indices[wrong[0]]), labels[wrong[0]]
            place = f"{split} image {index} (counted from 0)"
            if location := location_of(source, index):
                place += f", {shown(location)},"
            expected = f"0 to {num_classes - 1}; {wrong.size:,} such images"
            why = f"{place} has the label {label}, expected {expected}"
            raise DataError(f"{data_set.name}: {why}")
