"""A source of image files that are decoded when they are read."""

import atexit
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from towers import console, tf_internals
from towers.data import streams
from towers.data.augment.crops import random_box
from towers.data.files.image import read_image
from towers.data.files.image_files import ImageFiles, ImageOptions, refuse
from towers.data.files.plain import MAX_BYTES, decode, is_plain
from towers.data.inventory import Inventory
from towers.data.pixel_format import PHOTO
from towers.data.sources import Source, Subset, blocks_of, bytes_of_image
from towers.errors import ConfigError, data_errors_of_tensorflow

# Batch size in bytes for a whole source; several batches are in memory.
BATCH_BYTES = 50_000_000
MEGABYTE = 1_000_000
PROGRESS_SECS = 30


class _Reads:
    """Counter of the calls from `tf.data` into Python.

    The exit waits for them, since a call into an interpreter that shuts down hangs.
    """

    QUIET_SECS = 0.5

    def __init__(self):
        self._lock = threading.Lock()
        self._begun = self._ended = 0

    def __enter__(self) -> None:
        with self._lock:
            self._begun += 1

    def __exit__(self, *_) -> None:
        with self._lock:
            self._ended += 1

    def close(self) -> None:
        counted = 0
        while self._begun > min(counted, self._ended):
            counted = self._begun
            time.sleep(self.QUIET_SECS)


_reads = _Reads()
atexit.register(_reads.close)


class ImageCache:
    """Memory for decoded images that several sources share; first come, first kept."""

    def __init__(self, megabytes: float):
        self.bytes_left = megabytes * MEGABYTE
        self.lock = threading.Lock()


class CachedSource:
    """Images that are decoded when they are read, and cached, except for random crops.

    If images are resized, random crops are taken from stored pixels (`reads_crops`).
    """

    decodes = True

    def __init__(
        self,
        files: ImageFiles,
        image_shape: tuple[int, int, int],
        options: ImageOptions,
        cache: ImageCache | None = None,
    ):
        self.num_examples = len(files)
        self.image_shape = image_shape
        self.reads_crops = bool(options.image_size)
        # int32 [n] or uint8 [n, classes]; None if unknown before reading.
        self.labels: np.ndarray | None = getattr(files, "labels", None)
        self.sample_weights: np.ndarray | None = getattr(files, "sample_weights", None)
        self.blocks = blocks_of(files)
        self.block_bytes = getattr(files, "block_bytes", 0)
        self._files, self._options = files, options
        self._cache = cache or ImageCache(options.image_cache_mb)
        self._pixels = options.pixels or PHOTO
        self.dtype = self._pixels.dtype
        self._image_bytes = bytes_of_image(self)
        self._has_read_crops, self._label_sets = False, None
        if self.labels is not None and self.labels.ndim == 2:
            with tf.device("CPU:0"):
                self._label_sets = tf.constant(self.labels)
        self._keep_none()

    def read(
        self, indices: tf.Tensor, crop_numbers: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Read images as `Source.read`; not under XLA."""
        numbers = [] if crop_numbers is None else [crop_numbers]
        with tf.device("CPU:0"):
            images, labels = tf.numpy_function(
                self._read, [indices, *numbers], [self.dtype, tf.int32], name="decode"
            )
            images = tf.ensure_shape(images, [*indices.shape, *self.image_shape])
            labels = tf.ensure_shape(labels, indices.shape)
            if self._label_sets is not None:
                sets = tf.cast(tf.gather(self._label_sets, indices), tf.float32)
                labels = tf.where(labels[:, tf.newaxis] < 0, -1.0, sets)
        return images, labels

    def read_labels(self, indices: np.ndarray) -> np.ndarray:
        """Read labels, int32 [n], without decoding images."""
        labels = np.empty(len(indices), np.int32)

        def read(position):
            try:
                labels[position] = self._files.read(int(indices[position]))[1]
            except (OSError, ValueError, MemoryError) as error:
                refuse(self._files, int(indices[position]), error, None)

        streams.call_in_readers(read, len(indices))
        return labels

    @property
    def checksum(self) -> int | None:
        """Checksum, see `sources.checksum`."""
        return self._files.checksum() if hasattr(self._files, "checksum") else None

    def location(self, index: int) -> str:
        """Return where an image is stored, such as its path."""
        return self._files.location(index)

    def _read(self, indices, crop_numbers=None):
        if crop_numbers is not None:
            self._drop_first_images()
        slots, kept_images, kept_labels = self._kept
        slots = slots[indices]
        if crop_numbers is not None:
            slots[:] = -1
        with _reads:
            if len(slots) and slots.min() >= 0:
                return kept_images.take(slots, 0), kept_labels.take(slots)
            once, copies = np.unique(indices, return_inverse=True)
            if crop_numbers is None and len(once) < len(indices):
                # An evaluation fills up its last batch with one image.
                images, labels = self._read(once)
                return images[copies], labels[copies]
            images = np.empty((len(indices), *self.image_shape), self.dtype)
            labels = np.empty(len(indices), np.int32)
            is_kept, missing = slots >= 0, np.flatnonzero(slots < 0)
            images[is_kept] = kept_images[slots[is_kept]]
            labels[is_kept] = kept_labels[slots[is_kept]]
            self._read_files(indices, crop_numbers, missing.tolist(), images, labels)
            if crop_numbers is None:
                self._keep(indices, missing, images, labels)
        return images, labels

    def _read_files(self, indices, crops, positions, images, labels, may_be_plain=True):
        """Read the images at some positions of a batch."""
        survey = self._options.survey  # counts sizes, which Pillow reads
        is_open = survey is not None and not survey.is_closed
        is_whole = crops is None and self._options.center_crop in (0, 1)
        may_be_plain &= is_whole and self.dtype == "uint8" and not is_open
        numbers = indices.tolist()
        plain: dict[int, bytes] = {}

        def read(place):
            position, crop = positions[place], None
            index = numbers[position]
            if crops is not None:
                crop = functools.partial(random_box, crops[position])
            try:
                content, labels[position] = self._files.read(index)
                if may_be_plain and is_plain(content, self.image_shape):
                    plain[position] = content
                else:
                    images[position] = self._decode(content, crop)
            except (OSError, ValueError, MemoryError) as error:
                refuse(self._files, index, error, survey)
                images[position], labels[position] = 0, -1  # a fault was recorded

        streams.call_in_readers(read, len(positions))
        places = list(plain)
        size = 1 + MAX_BYTES // self._image_bytes
        for first in range(0, len(places), size):
            some = places[first : first + size]
            try:
                images[some] = decode([plain[x] for x in some], self.image_shape[-1])
            except tf.errors.OpError:  # Pillow says why, if it cannot read it either
                self._read_files(indices, None, some, images, labels, False)

    def _keep_none(self):
        most = int(min(self.num_examples, self._cache.bytes_left / self._image_bytes))
        try:
            images = np.empty((most, *self.image_shape), self.dtype)
        except MemoryError:
            option = f"image_cache_mb={self._options.image_cache_mb:g}"
            raise ConfigError(f"{option}: out of memory; lower it") from None
        self._num_kept = 0
        self._kept = np.full(self.num_examples, -1), images, np.empty(most, np.int32)

    def _keep(self, indices, positions, images, labels):
        with self._cache.lock:
            slots, kept_images, kept_labels = self._kept
            begin, left = self._num_kept, self._cache.bytes_left / self._image_bytes
            room = int(min(len(kept_images) - begin, max(left, 0)))
            is_new = (slots[indices[positions]] < 0) & (labels[positions] >= 0)
            new = positions[is_new][:room]
            end = begin + len(new)
            kept_images[begin:end], kept_labels[begin:end] = images[new], labels[new]
            slots[indices[new]] = np.arange(begin, end)  # readers use them from now on
            self._num_kept = end
            self._cache.bytes_left -= len(new) * self._image_bytes

    def _drop_first_images(self):
        with self._cache.lock:
            if not self._has_read_crops:
                self._has_read_crops = True
                self._cache.bytes_left += self._num_kept * self._image_bytes
                self._keep_none()

    def _decode(self, content, crop):
        options = self._options
        return read_image(
            content,
            self.image_shape,
            crop,
            resize=bool(options.image_size),
            center_crop=options.center_crop,
            interpolation=options.interpolation,
            fit=options.fit,
            max_pixels=options.max_image_pixels,
            pixels=self._pixels,
            note_size=options.survey and options.survey.add_size,
        )


def read_in_batches(
    source: Source, most: int, indices: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield images and labels in batches of at most `most` images."""
    image_bytes = bytes_of_image(source)
    size = max(1, min(most, BATCH_BYTES // image_bytes))
    calls = streams.num_reads(size, size * image_bytes)
    numbers = tf.data.Dataset.range(source.num_examples)
    if indices is not None:
        numbers = tf.data.Dataset.from_tensor_slices(indices)
    batches = numbers.batch(size).map(source.read, num_parallel_calls=calls)
    with data_errors_of_tensorflow():
        stream = streams.without_tuning(batches).as_numpy_iterator()
        yield from tf_internals.delete_in_thread(stream)


def leave_out_bad_images(
    sources: Sequence[Source | None], options: ImageOptions, inventory: Inventory
) -> list[Source | None]:
    """Return the sources without unreadable images if bad_images=skip."""
    survey = options.survey
    if options.bad_images == "stop" or survey is None:
        return list(sources)
    different = [source for source in dict.fromkeys(sources) if source is not None]
    count_read = progress(sum(x.num_examples for x in different), console.line)
    good: dict[Source | None, Source | None] = {None: None}
    for source in different:
        all_labels = []
        for _, labels in read_in_batches(source, 100):
            all_labels.append(labels)
            count_read(len(labels))
        positions = np.flatnonzero(are_read(np.concatenate(all_labels)))
        is_all = len(positions) == source.num_examples
        good[source] = source if is_all else Subset(source, positions)
    survey.is_closed = True
    for location, fault in survey.bad_images.items():
        what = fault.partition("; ")[0]  # without the hint, as the line is short
        inventory.leave_out("bad images", f"{location} ({what})")
    return [good[source] for source in sources]


def are_read(labels: np.ndarray) -> np.ndarray:
    """Return which images of a batch are not unreadable, bool [n]."""
    return labels.reshape(len(labels), -1).min(1, initial=0) >= 0


def progress(
    total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
    """Return a function that adds numbers of images and reports every PROGRESS_SECS."""
    done, said_at = 0, clock()

    def count_read(num_images: int) -> None:
        nonlocal done, said_at
        done += num_images
        if clock() - said_at >= PROGRESS_SECS:
            said_at = clock()
            say(f"{'read':11} {done:,} of {total:,} images")

    return count_read
