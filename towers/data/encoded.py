"""A source of images that are encoded (PNG, JPEG) and decoded when they are read.

What was decoded once stays in memory as far as it fits, so from the second epoch on
reading is a look-up. Nothing else is kept: the data set may be larger than memory.
"""

import atexit
import contextlib
import dataclasses
import math
import threading
import time

import numpy as np
import tensorflow as tf

from towers.data import streams
from towers.data.crops import random_boxes
from towers.data.decoding import (
    DEFAULT_IMAGE_SIZE,
    NUM_COMPARED,
    Decoding,
    Encoded,
    refuse,
)
from towers.data.pixels import read_crop, read_image, upright_size
from towers.data.sources import Source, channel_counts, moments, shown
from towers.errors import ConfigError, DataError, data_errors_of_tensorflow

# Mean and standard deviation are those of so many training images, drawn at random with
# a fixed seed. The error of a mean is about 1 of 255 (the means of images differ by
# 50).
SAMPLE = 5000

# Of the batches in which a whole source is read; several are in memory.
BATCH_BYTES = 50_000_000

# Files that are in memory at once, in each thread, to draw crops of them together.
CROPS_AT_ONCE = 16

MEGABYTE = 1_000_000


class _Reads:
    """Calls from `tf.data` into Python, which must be over before the interpreter ends.

    A thread of `tf.data` that calls into an interpreter that is shutting down never
    returns, and the owner of the iterator waits for it for ever. So at exit new calls
    are refused, and the exit waits until there was none for a while, since a stream
    reads only a few batches ahead.
    """

    QUIET_SECS = 0.5

    def __init__(self):
        self._lock = threading.Lock()
        self._begun = self._ended = 0
        self._is_closed = False

    def __enter__(self) -> None:
        with self._lock:
            self._begun += 1

    def __exit__(self, *_) -> None:
        with self._lock:
            self._ended += 1

    def check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the interpreter ends")

    def close(self) -> None:
        self._is_closed = True
        counted = 0
        while self._begun > min(counted, self._ended):
            counted = self._begun
            time.sleep(self.QUIET_SECS)


_reads = _Reads()
atexit.register(_reads.close)


class EncodedSource:
    """Images that are decoded in the threads that read them.

    Args:
        encoded: the images.
        image_shape: height, width, channels of what is read. Channels are 1 or 3; gray
            images are repeated or colors weighted accordingly, transparency is
            dropped, 16 bits are cut to their upper 8.
        decoding: size and cache.

    Attributes:
        cache_mb: megabytes of its cache when all of it is filled.
        reads_crops: whether images are resized, see `crops.CropSource`.
    """

    def __init__(
        self, encoded: Encoded, image_shape: tuple[int, int, int], decoding: Decoding
    ):
        self.num_examples = len(encoded)
        self.image_shape = image_shape
        self.reads_crops = bool(decoding.image_size)
        self._encoded = encoded
        self._decoding = decoding
        image_mb = math.prod(image_shape) / MEGABYTE
        num_kept = int(min(len(encoded), decoding.cache_mb / image_mb))
        self.cache_mb = num_kept * image_mb
        try:
            # Memory is taken as it is written to.
            self._images = np.zeros((num_kept, *image_shape), np.uint8)
        except MemoryError:
            raise ConfigError(
                f"image_cache_mb={decoding.cache_mb:g}: there is not so much memory; "
                "what does not fit is decoded in every epoch"
            ) from None
        self._labels = np.zeros(num_kept, np.int32)
        self._is_kept = np.zeros(num_kept, bool)

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads as every source does; not under XLA.

        An image that cannot be read raises an error of TensorFlow's in whose text
        `data_errors_of_tensorflow` finds the DataError.
        """
        return self._call(self._look_up, indices)

    def read_crops(
        self, indices: tf.Tensor, sizes: tf.Tensor, places: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """As `crops.CropSource`, with errors as `read`. No crop is kept."""
        return self._call(self._decode_crops, indices, sizes, places)

    @property
    def checksum(self) -> int | None:
        """As `sources.checksum`."""
        return self._encoded.checksum() if hasattr(self._encoded, "checksum") else None

    @property
    def labels(self) -> np.ndarray | None:
        """Integers [num_examples]; None where the images would have to be read."""
        return getattr(self._encoded, "labels", None)

    def place(self, index: int) -> str:
        """The location of an image, such as its path."""
        return self._encoded.place(index)

    def _call(self, function, indices, *numbers):
        """A function of arrays that gives images and labels, as an operation."""

        def call(*arrays):
            with _reads, tf.device("CPU:0"):
                return function(*arrays)

        with tf.device("CPU:0"):
            images, labels = tf.numpy_function(
                call, [indices, *numbers], [tf.uint8, tf.int32], name="decode"
            )
        return (
            tf.ensure_shape(images, [*indices.shape, *self.image_shape]),
            tf.ensure_shape(labels, indices.shape),
        )

    def _look_up(self, indices):
        num_kept = len(self._is_kept)
        if indices.size and indices.max() < num_kept and self._is_kept[indices].all():
            return self._images.take(indices, 0), self._labels.take(indices)
        images = np.empty((len(indices), *self.image_shape), np.uint8)
        labels = np.empty(len(indices), np.int32)
        for place, index in enumerate(indices.tolist()):
            _reads.check_open()
            if index < num_kept and self._is_kept[index]:
                images[place] = self._images[index]
                labels[place] = self._labels[index]
                continue
            images[place], labels[place] = self._decode(index)
            if index < num_kept:
                # Another thread may do the same: it writes the same.
                self._images[index] = images[place]
                self._labels[index] = labels[place]
                self._is_kept[index] = True
        return images, labels

    def _decode(self, index):
        with self._refusing(index):
            content, label = self._encoded.read(index)
            return read_image(content, self.image_shape, self._decoding), label
        return np.uint8(0), -1  # after a fault that the survey has recorded

    def _decode_crops(self, indices, sizes, places):
        images = np.empty((len(indices), *self.image_shape), np.uint8)
        labels = np.empty(len(indices), np.int32)
        for first in range(0, len(indices), CROPS_AT_ONCE):
            some = slice(first, first + CROPS_AT_ONCE)
            images[some], labels[some] = self._decode_some(
                indices[some].tolist(), sizes[some], places[some]
            )
        return images, labels

    def _decode_some(self, indices, sizes, places):
        files, full_sizes, images = [], [], []
        for index in indices:
            _reads.check_open()
            with self._refusing(index):
                files.append(self._encoded.read(index))
                full_sizes.append(upright_size(files[-1][0], self._decoding))
        boxes = random_boxes(sizes, places, *zip(*full_sizes, strict=True))
        boxes = np.stack(boxes, 1).astype(int).tolist()
        for index, (content, _), box in zip(indices, files, boxes, strict=True):
            _reads.check_open()
            with self._refusing(index):
                images.append(read_crop(content, box, self.image_shape, self._decoding))
        return images, [label for _, label in files]

    @contextlib.contextmanager
    def _refusing(self, index):
        """Raises what is wrong with an image, or records it where there is a survey."""
        try:
            yield
        except (OSError, ValueError, MemoryError) as error:
            refuse(self._encoded, index, error, self._decoding.survey)


def settle_size(
    encoded: Encoded, channels: int, decoding: Decoding
) -> tuple[Decoding, tuple[int, int, int], str]:
    """The shape to read images in.

    That is the square of `image_size`. Without one it is the size of the images, where
    NUM_COMPARED of them, taken at equal distances, are alike, else the square of
    DEFAULT_IMAGE_SIZE.

    Returns:
        The decoding with the `image_size` that is used, the shape, and a note for the
        user where nobody asked for it, or "".

    Raises:
        DataError: an image of those cannot be read, or with a survey none of them.
    """
    if decoding.image_size:
        return decoding, (decoding.image_size, decoding.image_size, channels), ""
    sizes, count = set(), min(len(encoded), NUM_COMPARED)
    for index in np.linspace(0, len(encoded) - 1, count).astype(int).tolist():
        try:
            sizes.add(upright_size(encoded.read(index)[0], decoding))
        except (OSError, ValueError, MemoryError) as error:
            if decoding.survey is None:  # else it is found again with all others
                refuse(encoded, index, error, None)
    if not sizes:
        raise DataError(
            f"{shown(encoded.place(0))} and all that follow: no image can be decoded"
        )
    if len(sizes) == 1:
        return decoding, (*sizes.pop(), channels), ""
    size = DEFAULT_IMAGE_SIZE
    note = f"sizes differ: resized to {size}x{size}, --image_size=N for another size"
    return dataclasses.replace(decoding, image_size=size), (size, size, channels), note


def images_at_once(source: Source, most: int) -> int:
    """Images that are read in a batch: `most`, fewer where they are large."""
    return max(1, min(most, BATCH_BYTES // int(np.prod(source.image_shape))))


def sampled_moments(source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, 0..255, of SAMPLE images or all.

    Raises:
        DataError: one of them cannot be read.
    """
    indices = np.arange(source.num_examples)
    if len(indices) > SAMPLE:
        rng = np.random.Generator(np.random.Philox(0))
        indices = np.sort(rng.choice(indices, SAMPLE, replace=False))
    batches = tf.data.Dataset.from_tensor_slices(indices)
    batches = batches.batch(images_at_once(source, 50))
    batches = batches.map(source.read, num_parallel_calls=streams.NUM_CALLS)
    counts = np.zeros((source.image_shape[-1], 256))
    with data_errors_of_tensorflow():
        for images, labels in streams.without_tuning(batches).as_numpy_iterator():
            counts += channel_counts(images[labels >= 0])
    if not counts.any():
        raise DataError(f"none of {len(indices)} training images can be read")
    return moments(counts)
