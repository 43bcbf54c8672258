"""Files of records of one size: label bytes, then the planes of an image.

That is the binary layout in which CIFAR-10 and CIFAR-100 are published.
"""

import os
from collections.abc import Mapping

import numpy as np

from towers.errors import DataError

IMAGE_SHAPE = (32, 32, 3)

Examples = tuple[np.ndarray, np.ndarray]


def record_dtype(label_counts: Mapping[str, int]) -> np.dtype:
    """One byte per kind of label, then the red, green and blue planes, row by row."""
    height, width, channels = IMAGE_SHAPE
    labels = [(kind, np.uint8) for kind in label_counts]
    return np.dtype([*labels, ("planes", np.uint8, (channels, height, width))])


def read_records(
    path: str, num_records: int, label_counts: Mapping[str, int]
) -> Examples:
    """Reads one file.

    Args:
        path: of the file.
        num_records: how many it must hold.
        label_counts: kind of label -> number of its classes, in the order of the bytes;
            the last one is the label that is returned.

    Returns:
        uint8 images [num_records, 32, 32, 3] and int32 labels [num_records].

    Raises:
        DataError: the file is missing, has another size, or a label is too high.
    """
    dtype = record_dtype(label_counts)
    try:
        check_size(path, os.path.getsize(path), num_records, dtype.itemsize)
        records = np.fromfile(path, dtype, num_records)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return decode_records(path, records, num_records, label_counts)


def check_size(place: str, size: int, num_records: int, record_bytes: int) -> None:
    """Names the record in which a file of the wrong size breaks off.

    Raises:
        DataError: `size` is not that of `num_records` records.
    """
    expected = num_records * record_bytes
    if size == expected:
        return
    whole, rest = divmod(size, record_bytes)
    if size > expected:
        where = f"it goes on after record {num_records - 1}, the last"
    elif rest:
        where = f"it breaks off in record {whole}, after {rest} of its bytes"
    else:
        where = f"record {whole} and those after it are missing"
    raise DataError(
        f"{place}: expected {expected} bytes ({num_records} records of "
        f"{record_bytes}), found {size}: {where} (records are counted from 0)"
    )


def check_labels(
    place: str, labels: np.ndarray, num_classes: int, kind: str = "label"
) -> None:
    """Names the first record whose label is out of range.

    Raises:
        DataError: a label is not below `num_classes`.
    """
    wrong = np.flatnonzero(labels >= num_classes)
    if wrong.size:
        raise DataError(
            f"{place}: record {wrong[0]} (counted from 0) has the {kind} "
            f"{labels[wrong[0]]}, expected 0 to {num_classes - 1}"
            + (f"; {wrong.size - 1} more are wrong" if wrong.size > 1 else "")
        )


def decode_records(
    place: str, records: np.ndarray, num_records: int, label_counts: Mapping[str, int]
) -> Examples:
    """The images and labels of records in memory; errors name the place.

    Args:
        place: file, or archive and member.
        records: of `record_dtype(label_counts)`.
        num_records, label_counts: as in `read_records`.
    """
    # A file may have shrunk since its size was checked.
    check_size(place, records.nbytes, num_records, records.itemsize)
    for kind, num_classes in label_counts.items():
        check_labels(place, records[kind], num_classes, kind)
    images = np.empty((num_records, *IMAGE_SHAPE), np.uint8)
    for channel in range(images.shape[-1]):  # Three times as fast as one transposition.
        images[..., channel] = records["planes"][:, channel]
    return images, records[kind].astype(np.int32)
