"""Indexable sources of labeled images, and the data set that they make up."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towers.data.inventory import Inventory
from towers.data.pixel_format import PHOTO, PixelFormat
from towers.errors import DataError

# Share of the images held out for testing if a data set has no test images.
TEST_FRACTION = 0.1
DTYPES = "uint8", "uint16", "float32"
# Maximum number of bytes of images in memory that are copied at once.
COPIED_BYTES = 50_000_000


class Source(Protocol):
    """Labeled images that can be read in any order.

    `read` is made of TensorFlow operations, so that `tf.data` and compiled steps read
    the same source.

    Attributes:
        num_examples: number of images.
        image_shape: height, width, channels of what is read.
        read: (indices, int64 [n]) -> images [n, height, width, channels], and labels,
            int32 [n] or for label sets float32 [n, classes] of 0 and 1.

    A source may also have:
        dtype: "uint8" (default), "uint16" or "float32", see `PixelFormat`.
        labels: integers [num_examples], or for label sets [num_examples, classes] of 0
            and 1. None if the images would have to be read: `read` then refuses a
            label out of range, and `read_labels(indices)` gives integers [n].
        sample_weights: float32 [num_examples], factors on the losses; or None.
        reads_crops: True if `read` takes numbers of `crops.draw_numbers` as a second
            argument, and then reads random crops instead of center crops.
        decodes: True if `read` decodes images, and keeps them as far as they fit.
        location: index -> the location of an example, for messages.
        num_bytes, checksum, blocks: see the functions `num_bytes`, `checksum` and
            `blocks_of`; with blocks also `block_bytes`, their mean size.
    """

    num_examples: int
    image_shape: tuple[int, int, int]

    @property
    def read(self) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
        """See above; a method of the source."""


class ArraySource:
    """A source in host memory.

    Images are uint8, uint16 or float32 [num_examples, height, width, channels], labels
    integers [num_examples] or sets [num_examples, classes] of 0 and 1.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        sample_weights: np.ndarray | None = None,
    ):
        if images.dtype.name not in DTYPES or images.ndim != 4:
            kinds = f"{' or '.join(DTYPES)} [n, height, width, channels]"
            raise ValueError(f"images are {images.dtype} {images.shape}, not {kinds}")
        labels = np.asarray(labels)
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        if labels.ndim not in (1, 2):
            shape = list(labels.shape)
            raise ValueError(f"labels must be [n] or [n, classes], got {shape}")
        self.num_examples = len(images)
        self.image_shape = tuple(images.shape[1:])
        self.dtype = images.dtype.name
        self.sample_weights = sample_weights
        with tf.device("CPU:0"):
            self._images = tf.Variable(_copied(images), trainable=False)
            dtype = tf.int32 if labels.ndim == 1 else tf.uint8
            self._labels = tf.constant(labels, dtype)

    @property
    def num_bytes(self) -> int:
        """See the function `num_bytes`."""
        return self.num_examples * bytes_of_image(self)

    @property
    def labels(self) -> np.ndarray:
        """The labels, int32 [num_examples] or uint8 [num_examples, classes]."""
        return self._labels.numpy()

    @property
    def checksum(self) -> int:
        """CRC-32 of the labels and the sample weights."""
        labels, weights = self.labels, self.sample_weights
        crc = zlib.crc32(labels.astype(labels.dtype.newbyteorder("<")).tobytes())
        if weights is not None:
            crc = zlib.crc32(weights.astype("<f4").tobytes(), crc)
        return crc

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Source.read`."""
        labels = tf.gather(self._labels, indices)
        if labels.dtype == tf.uint8:
            labels = tf.cast(labels, tf.float32)
        return tf.gather(self._images, indices), labels


def _copied(images):
    """Return a tensor, filled in parts, as `tf.constant` takes twice its bytes."""
    length = max(1, COPIED_BYTES // max(1, images[:1].nbytes))
    tensor = tf.fill(images.shape, tf.zeros([], images.dtype))
    for first in range(0, len(images), length):
        part = images[first : first + length]
        rows = tf.range(first, first + len(part))
        tensor = tf.raw_ops.InplaceUpdate(x=tensor, i=rows, v=part)
    return tensor


class DeviceSource:
    """A copy of a source in the memory of a device, with int64 labels."""

    def __init__(self, source: Source, device: str):
        self.num_examples = source.num_examples
        self.image_shape, self.dtype = source.image_shape, dtype_of(source)
        self.sample_weights = getattr(source, "sample_weights", None)
        self.labels = known_labels(source)
        with tf.device("CPU:0"):
            images, labels = source.read(tf.range(source.num_examples, dtype=tf.int64))
            if labels.dtype.is_integer:  # a GPU has int32 in host memory
                labels = tf.cast(labels, tf.int64)
        self._device = device
        with tf.device(device):
            # On a GPU only the gather of variables takes uint8.
            self._images = tf.Variable(images, trainable=False, name="images")
            self._labels = tf.Variable(labels, trainable=False, name="labels")
        self.variables = [self._images, self._labels]

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Source.read`; labels are int64."""
        with tf.device(self._device):
            return tf.gather(self._images, indices), tf.gather(self._labels, indices)


class Subset:
    """Examples of another source, at its `indices`, int64 [num_examples].

    With a `table`, int32 [former labels], their labels are replaced.
    """

    def __init__(
        self, source: Source, indices: np.ndarray, table: np.ndarray | None = None
    ):
        self.num_examples = len(indices)
        self.image_shape, self.dtype = source.image_shape, dtype_of(source)
        self.reads_crops = getattr(source, "reads_crops", False)
        self.decodes = getattr(source, "decodes", False)
        self._source: Any = source
        self.indices, self._table = indices, table
        with tf.device("CPU:0"):
            self._index_tensor = tf.constant(indices, tf.int64)
        weights = getattr(source, "sample_weights", None)
        self.sample_weights = None if weights is None else weights[indices]

    @property
    def blocks(self) -> np.ndarray | None:
        """See the function `blocks_of`."""
        blocks = blocks_of(self._source)
        return None if blocks is None else blocks[self.indices]

    @property
    def block_bytes(self) -> int:
        """Mean size of a block."""
        return self._source.block_bytes

    @property
    def num_bytes(self) -> int | None:
        """See the function `num_bytes`."""
        if num_bytes(self._source) is None:
            return None
        return self.num_examples * bytes_of_image(self)

    @property
    def labels(self) -> np.ndarray | None:
        """The labels; None if the images would have to be read."""
        labels = self._source.labels
        return None if labels is None else self._replaced(labels[self.indices])

    def read_labels(self, indices: np.ndarray) -> np.ndarray:
        """Return integers [n], if `labels` is None."""
        return self._replaced(self._source.read_labels(self.indices[indices]))

    def _replaced(self, labels):
        return labels if self._table is None else self._table[labels]

    @property
    def checksum(self) -> int | None:
        """See the function `checksum`."""
        whole = checksum(self._source)
        if whole is None or self._table is not None:  # all examples
            return whole
        return zlib.crc32(self.indices.astype("<i8").tobytes(), whole)

    def read(
        self, indices: tf.Tensor, crop_numbers: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Source.read`."""
        numbers = [] if crop_numbers is None else [crop_numbers]
        indices = tf.gather(self._index_tensor, indices)
        images, labels = self._source.read(indices, *numbers)
        if self._table is not None:
            with tf.device("CPU:0"):
                labels = tf.gather(self._table, labels)
        return images, labels

    def location(self, index: int) -> str:
        """Return the location of an example, for messages."""
        return location_of(self._source, int(self.indices[index]))


def num_bytes(source: Source) -> int | None:
    """Return the bytes of the images of a source in memory; None for others."""
    return getattr(source, "num_bytes", None)


def dtype_of(source: Source) -> str:
    """Return the dtype of the images: "uint8", "uint16" or "float32"."""
    return getattr(source, "dtype", "uint8")


def bytes_of_image(source: Source) -> int:
    """Return the bytes of an image that is read."""
    return math.prod(source.image_shape) * np.dtype(dtype_of(source)).itemsize


def checksum(source: Source) -> int | None:
    """Return a CRC-32 of the labels or file names of a source; None if unknown."""
    return getattr(source, "checksum", None)


def blocks_of(source: Any) -> np.ndarray | None:
    """Return the numbers of the blocks that are read as a whole, ascending; or None."""
    return getattr(source, "blocks", None)


def known_labels(source: Source) -> np.ndarray | None:
    """Return all labels; None if the images would have to be read."""
    return getattr(source, "labels", None)


def label_shape(source: Source) -> tuple[int, ...]:
    """Return (), or (classes,) for label sets."""
    labels = known_labels(source)
    return () if labels is None else tuple(labels.shape[1:])


def strata(labels: np.ndarray) -> np.ndarray:
    """Return integers [n] to hold images out by: labels, or the rarest of a set."""
    if labels.ndim == 1:
        return labels
    counts = np.where(labels, labels.sum(0, dtype=np.int64), len(labels) + 1)
    return np.where(labels.any(1), counts.argmin(1), labels.shape[1])


def location_of(source: Source, index: int) -> str:
    """Return the location of an example in a file; empty for other sources."""
    return source.location(index) if hasattr(source, "location") else ""


class Trained(Protocol):
    """Class names, image shape, moments and checksum of a trained network."""

    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: PixelFormat
    checksum: int | None


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A training and a test source, with their classes."""

    name: str
    train: Source | None  # None if only test images were loaded, for a trained network
    test: Source
    class_names: tuple[str, ...]  # in the order of the labels
    mean: tuple[float, ...]  # of the training images, per channel, in units of 0..255
    std: tuple[float, ...]
    origin: str  # the location of the data
    validation: Source | None = None  # for the evaluations in training; None for `test`
    inventory: Inventory = dataclasses.field(default_factory=Inventory)
    # "validation" or "test" -> its images of no class, labeled 0, see `set_apart`.
    unknown: dict[str, Source] | None = None
    pixels: PixelFormat = PHOTO

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width, channels of the training images, else of the test images."""
        return (self.test if self.train is None else self.train).image_shape

    @property
    def multi_label(self) -> bool:
        """True if an image may have several labels, or none."""
        return bool(label_shape(self.test))

    @property
    def sources(self) -> dict[str, Source]:
        """Split -> source; no "validation" if the test images are used for it."""
        validation = None if self.validation is self.test else self.validation
        splits = {"training": self.train, "validation": validation, "test": self.test}
        return {split: x for split, x in splits.items() if x is not None}


def split_off_test(
    source: Source, labels: np.ndarray, location: str
) -> tuple[Subset, Subset]:
    """Split off TEST_FRACTION of each class for testing, always the same at random.

    At least one image of a class with two is held out. If labels are not known, equal
    ones are given. DataError if no class has two images.
    """
    rng, labels = np.random.Generator(np.random.Philox(0)), strata(labels)
    is_test = np.zeros(len(labels), bool)
    # One sort for all classes: a pass for each would take seconds for a million images.
    _, counts = np.unique(labels, return_counts=True)
    classes = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    for indices in map(rng.permutation, classes):
        count = max(round(TEST_FRACTION * len(indices)), int(len(indices) > 1))
        is_test[indices[:count]] = True
    if not is_test.any():
        raise DataError(f"{location}: no class has two images, to hold one out")
    rest, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    return Subset(source, rest), Subset(source, test)


def sort_in_place(images: np.ndarray, order: Sequence[int]) -> None:
    """Put images into an order, by parts of their pixels instead of in a copy."""
    pixels = images.reshape(len(images), -1)
    width = max(1, COPIED_BYTES // len(images))
    for first in range(0, pixels.shape[1], width):
        part = slice(first, first + width)
        pixels[:, part] = pixels[order, part]


def channel_moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, see `channel_counts`."""
    return moments(channel_counts(images))


def channel_counts(images: np.ndarray) -> np.ndarray:
    """Return histograms of channels, [c, 256] for uint8, [c, 65536] for 0..255."""
    num_levels = 256 if images.dtype == np.uint8 else 65536
    counts = np.zeros((images.shape[-1], num_levels))
    for channel in range(images.shape[-1]):
        # In pieces, as the counting makes wide copies that should fit into the cache.
        for first in range(0, len(images), 64):
            piece = images[first : first + 64, ..., channel]
            if images.dtype != np.uint8:
                piece = np.rint(piece * np.float32(257)).astype(np.int64)
            counts[channel] += np.bincount(piece.reshape(-1), minlength=num_levels)
    return counts


def moments(counts: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel from `channel_counts`."""
    values = np.arange(counts.shape[1]) * (255 / (counts.shape[1] - 1))
    means, stds = [], []
    for histogram in counts:
        mean = float(histogram @ values / histogram.sum())
        variance = histogram @ (values - mean) ** 2 / histogram.sum()
        means.append(mean)
        stds.append(float(np.sqrt(variance)))
    return tuple(means), tuple(stds)
