"""Test images that are also training images."""

import hashlib
import os
import time

from towers.data.files.cached import read_in_batches
from towers.data.sources import DataSet, Source, location_of, num_bytes
from towers.messages import shown

MAX_SECS = 2.0  # maximum time of a search; `python -m towers.check` reads every image
_CHUNK = 256  # images in memory that are read at once


def record_identical(
    data_set: DataSet, train: Source, held_out: dict[str, Source]
) -> None:
    """Record in the inventory which images of `held_out` splits are training images."""
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
    """Return (index in `other`, index in `train`) of images with the same content.

    The content is the pixels of arrays in memory, or the bytes of local files. Empty
    for other sources, and if it takes longer.
    """
    end, sources = time.monotonic() + max_secs, (train, other)
    try:
        if None in map(num_bytes, sources):
            sizes = [_sizes(source, end) for source in sources]
            common = set.intersection(*(set(x.values()) for x in sizes)) - {0}
            chosen = [[i for i in x if x[i] in common] for x in sizes]
            contents = map(_files, sources, chosen)
        else:
            contents = map(_pixels, sources)
        keys, other_keys = (
            {i: hashlib.blake2b(x, digest_size=16).digest() for i, x in _until(end, y)}
            for y in contents
        )
    except (OSError, ValueError):  # a TimeoutError is an OSError
        return []
    first = {key: index for index, key in reversed(keys.items())}
    return [(i, first[key]) for i, key in other_keys.items() if key in first]


def _until(end, values):
    """Yield values; TimeoutError once the clock is past `end`."""
    for value in values:
        yield value
        if time.monotonic() > end:
            raise TimeoutError


def _sizes(source, end):
    indices = _until(end, range(source.num_examples))
    return {i: os.path.getsize(location_of(source, i)) for i in indices}


def _files(source, indices):
    for index in indices:
        with open(location_of(source, index), "rb") as file:
            yield index, file.read()


def _pixels(source):
    batches = read_in_batches(source, _CHUNK)
    return enumerate(bytes(image) for images, _ in batches for image in images)
