"""Detects identical and similar images of a data set in nearly linear time."""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# Thumbnails of SIDE x SIDE pixels are standardized to a mean of 0 and a standard
# deviation of UNIT. Images are similar where the root mean square of the difference is
# at most MOST_DIFFERENT * UNIT: a copy that was shrunk, or saved again, differs less.
SIDE, UNIT, MOST_DIFFERENT = 8, 32, 0.1
LEAST_CONTRAST = 2.0  # standard deviation of 0..255; flatter images are never similar
# Hashes are sorted, rotated by each number of bytes; each is compared with the next.
ROTATIONS, NEIGHBORS = (0, 2, 4, 6), 3
MOST_NAMED = 3


class Prints(NamedTuple):
    """Fingerprints of n images: labels [n], -1 where one cannot be read; digests uint64
    [n] of their pixels; gray thumbnails int8 [n, SIDE**2], 0 of flat images."""

    labels: np.ndarray
    digests: np.ndarray
    thumbnails: np.ndarray


def prints_of(images: np.ndarray, labels: np.ndarray) -> Prints:
    """Fingerprints of uint8 [n, height, width, channels]."""
    digests = [hashlib.blake2b(x.tobytes(), digest_size=8).digest() for x in images]
    small = tf.image.resize(images, (SIDE, SIDE), "area").numpy()
    small = small.reshape(len(images), SIDE**2, -1)
    gray = small @ [0.299, 0.587, 0.114] if small.shape[2] == 3 else small.mean(2)
    gray -= gray.mean(1, keepdims=True)
    contrast = gray.std(1, keepdims=True)
    gray = np.where(contrast < LEAST_CONTRAST, 0, gray / np.maximum(contrast, 1))
    thumbnails = np.rint(np.clip(UNIT * gray, -127, 127)).astype(np.int8)
    return Prints(labels, np.frombuffer(b"".join(digests), np.uint64), thumbnails)


def lines(
    prints: dict[str, Prints], place: Callable[[str, int], str]
) -> Iterator[tuple[str, str]]:
    """(heading, text) on images that are in two splits, or in two classes of one, from
    the fingerprints of each split and a function (split, index) -> location."""
    names, sizes = list(prints), [len(x.labels) for x in prints.values()]
    begins = np.cumsum([0, *sizes])
    labels, digests, thumbnails = map(
        np.concatenate, zip(*prints.values(), strict=True)
    )
    # The first of identical images, and each of the others.
    _, firsts, groups = np.unique(digests, return_index=True, return_inverse=True)
    identical = np.stack([firsts[groups], np.arange(len(digests))], 1)
    identical = identical[identical[:, 0] < identical[:, 1]]
    similar = _similar(thumbnails)
    similar = similar[~np.isin(similar[:, 1], identical[:, 1])]
    for heading, pairs in (("identical", identical), ("similar", similar)):
        pairs = pairs[(labels[pairs] >= 0).all(1)]
        splits = np.searchsorted(begins, pairs, "right") - 1
        for a, b in itertools.combinations_with_replacement(range(len(names)), 2):
            is_counted = (a != b) | np.diff(labels[pairs]).any(1)
            chosen = pairs[(splits == (a, b)).all(1) & is_counted]
            chosen = chosen[np.unique(chosen[:, 1], return_index=True)[1]]
            if len(chosen):
                examples = ", ".join(
                    f"{place(names[b], j)} is {place(names[a], i)}"
                    for i, j in (chosen[:MOST_NAMED] - begins[[a, b]]).tolist()
                )
                where = names[a] if a != b else "another class"
                count = f"{len(chosen):,} {names[b]} image(s) also in {where}"
                yield heading, f"{count}, such as {examples}"


def _similar(thumbnails):
    """[m, 2]: pairs of similar images, the smaller index first."""
    similar, hashes = [np.zeros((0, 2), int)], np.packbits(thumbnails > 0, 1)
    for rotation, distance in itertools.product(ROTATIONS, range(1, NEIGHBORS + 1)):
        keys = np.roll(hashes, rotation, 1).copy().view(np.uint64)[:, 0]
        order = np.argsort(keys)
        for pairs in np.array_split(
            np.stack([order[:-distance], order[distance:]], 1), 1 + len(order) // 50_000
        ):
            one, other = np.moveaxis(thumbnails[pairs].astype(np.float32), 1, 0)
            differences = ((one - other) ** 2).mean(1) / UNIT**2
            is_similar = (differences <= MOST_DIFFERENT**2) & one.any(1) & other.any(1)
            similar.append(pairs[is_similar])
    return np.unique(np.sort(np.concatenate(similar), 1), axis=0)
