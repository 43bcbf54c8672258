"""Test images that are also training images."""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from towers.data.files.paths import shown
from towers.data.sources import DataSet, Source, location_of, num_bytes

# A search that takes longer is given up: `python -m towers.data` reads every image.
MAX_SECS = 2.0

_CHUNK = 256  # images in memory that are read at once


def record_identical(
    data_set: DataSet, train: Source, held_out: dict[str, Source]
) -> None:
    """Record in the inventory how many images of the splits `held_out` are identical to
    an image of `train`, where that is found within MAX_SECS."""
    for split, source in held_out.items():
        if pairs := identical_images(train, source):
            index, other = pairs[0]
            names = (
                shown(location_of(x, i)) or f"number {i}"
                for x, i in ((source, index), (train, other))
            )
            data_set.inventory.infer(
                "warning",
                f"{len(pairs):,} of {source.num_examples:,} {split} images are "
                f"identical to training images, so that the {split} accuracy is too "
                "high: {} is {}".format(*names),
            )


def identical_images(
    train: Source, other: Source, max_secs: float = MAX_SECS
) -> list[tuple[int, int]]:
    """Return (index in `other`, index in `train`) of images with the same content:
    pixels of arrays in memory, bytes of local files of the same size. Empty for other
    sources, and where it takes longer."""
    end = time.monotonic() + max_secs
    are_arrays = None not in (num_bytes(train), num_bytes(other))
    try:
        keys = (_pixel_keys if are_arrays else _file_keys)((train, other), end)
    except (OSError, ValueError):  # TimeoutError is an OSError
        return []
    first = {key: index for index, key in reversed(keys[0].items())}
    return [(i, first[key]) for i, key in keys[1].items() if key in first]


def _pixel_keys(sources: Sequence[Source], end: float) -> list[dict[int, bytes]]:
    """Return index -> digest of the pixels, for each source."""
    all_keys = []
    for source in sources:
        all_keys.append(keys := {})
        for start in _in_time(range(0, source.num_examples, _CHUNK), end):
            indices = np.arange(start, min(start + _CHUNK, source.num_examples))
            with tf.device("CPU:0"):
                images = source.read(tf.constant(indices, tf.int64))[0].numpy()
            for index, image in zip(indices.tolist(), images, strict=True):
                keys[index] = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
    return all_keys


def _file_keys(sources: Sequence[Source], end: float) -> list[dict[int, bytes]]:
    """Return index -> digest of the file, of files whose size both sources have."""
    sizes = [
        {
            index: os.path.getsize(location_of(source, index))
            for index in _in_time(range(source.num_examples), end)
        }
        for source in sources
    ]
    common = set(sizes[0].values()) & set(sizes[1].values()) - {0}
    all_keys = []
    for source, sizes_of_source in zip(sources, sizes, strict=True):
        all_keys.append(keys := {})
        for index, size in _in_time(sizes_of_source.items(), end):
            if size in common:
                with open(location_of(source, index), "rb") as file:
                    keys[index] = hashlib.file_digest(file, "blake2b").digest()
    return all_keys


def _in_time(items: Iterable, end: float) -> Iterator:
    """Yield the items; TimeoutError once the clock is past `end`."""
    for item in items:
        if time.monotonic() > end:
            raise TimeoutError
        yield item
