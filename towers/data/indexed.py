"""Encoded images in one file, one after the other, and their offsets in a second.

For images that are stored in a format without an index: they are copied once. The
second file is written last, so where it exists the first one is complete.
"""

import contextlib
import fcntl
import os
import shutil
import weakref
import zipfile
from collections.abc import Callable, Iterable

import numpy as np

from towers.data.files import create_data_file, open_data_file, open_lock_file
from towers.errors import DataError, one_line
from towers.output import say

# Left free on the disk, so that the copy is not what fills it.
SPARE_BYTES = 100_000_000

# Of the file of the offsets, that of 300 million images.
MOST_INDEX_BYTES = 2**32


class IndexedFile:
    """The images of `path + ".bin"`, an `Encoded`; `path + ".npz"` has the offsets.

    Args:
        path: without ending.

    Raises:
        DataError: the two do not belong together, or one cannot be read.
    """

    def __init__(self, path: str):
        self._path = path + ".bin"
        try:
            self._offsets, self.labels, self.origin = _read_index(path + ".npz")
            self._file = open_data_file(self._path)
            weakref.finalize(self, self._file.close)
            size = os.fstat(self._file.fileno()).st_size
        except Exception as error:  # Any error of NumPy and zipfile.
            raise DataError(
                f"{path}: the copy cannot be read: {one_line(error, 150)}; delete "
                f"{path}.*"
            ) from error
        if size != self._offsets[-1]:
            raise DataError(
                f"{self._path}: expected {self._offsets[-1]} bytes of "
                f"{len(self.labels)} images, found {size}; delete {path}.*"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        first, end = map(int, self._offsets[index : index + 2])
        content = os.pread(self._file.fileno(), end - first, first)
        return content, int(self.labels[index])

    def place(self, index: int) -> str:
        return f"{self._path}: image {index} (counted from 0)"


def _read_index(path):
    """Offsets, int64 [n + 1]; labels, int32 [n]; and the origin.

    Raises:
        Exception: of any class; it cannot be read, or is no index.
    """
    with open_data_file(path, MOST_INDEX_BYTES) as file, np.load(file) as index:
        # A compressed one could be of any size.
        if any(x.compress_type != zipfile.ZIP_STORED for x in index.zip.infolist()):
            raise ValueError("it is compressed")
        offsets, labels = index["offsets"], index["labels"]
        origin = str(index["origin"])
    if (offsets.dtype, labels.dtype) != (np.int64, np.int32):
        raise ValueError(f"offsets are {offsets.dtype}, labels {labels.dtype}")
    if offsets.ndim != 1 or labels.shape != (offsets.size - 1,):
        raise ValueError(f"offsets are {offsets.shape}, labels {labels.shape}")
    if offsets[0] or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError("its offsets do not ascend from 0")
    return offsets, labels, origin


def open_or_copy(
    path: str,
    origin: str,
    num_examples: int,
    num_bytes: int,
    examples: Callable[[], Iterable[tuple[bytes, int]]],
) -> IndexedFile:
    """The copy at `path`, made where it is missing or one of something else.

    Args:
        path: of the copy, without ending.
        origin: names the data that are copied, versions included.
        num_examples: how many images there must be.
        num_bytes: approximate size of the copy; printed before it is made.
        examples: gives the encoded images and their labels.

    Raises:
        DataError: there is no room or no permission to write, or examples are missing.
    """
    folder = os.path.dirname(path)
    try:
        copy = _find(path, origin)
        if copy:
            return copy
        with open_lock_file(path + ".lock") as lock:
            # Another process may be copying the same; then its copy will do.
            fcntl.flock(lock, fcntl.LOCK_EX)
            copy = _find(path, origin)
            if not copy:
                _check_room(folder, num_bytes)
                size = f"{num_bytes / 1e6:,.1f} MB"
                say(f"copying {size} to {path}.bin, once ...")
                _copy(path, origin, num_examples, examples())
            return copy or IndexedFile(path)
    except PermissionError as error:
        raise DataError(
            f"{folder}: a copy that can be indexed, of {num_bytes} bytes, would be "
            f"written there: {error.strerror}"
        ) from error
    except OSError as error:
        place = error.filename or path
        raise DataError(f"{place}: cannot be written: {error.strerror}") from error


def _find(path, origin):
    if not os.path.exists(path + ".npz"):
        return None
    copy = IndexedFile(path)
    return copy if copy.origin == origin else None


def _check_room(folder, num_bytes):
    needed, free = num_bytes + SPARE_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{folder}: a copy that can be indexed needs {needed} bytes, and {free} "
            "are free"
        )


def _copy(path, origin, num_examples, examples):
    offsets, labels = [0], []
    try:
        with create_data_file(path + ".bin.partial") as file:
            for content, label in examples:
                file.write(content)
                offsets.append(offsets[-1] + len(content))
                labels.append(label)
            _flush(file)
        if len(labels) != num_examples:
            raise DataError(
                f"{path}: {num_examples} images were to be copied, found {len(labels)}"
            )
        with create_data_file(path + ".npz.partial") as file:
            np.savez(
                file,
                offsets=np.array(offsets, np.int64),
                labels=np.array(labels, np.int32),
                origin=origin,
            )
            _flush(file)
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + ".npz")
        os.replace(path + ".bin.partial", path + ".bin")
        os.replace(path + ".npz.partial", path + ".npz")
    except BaseException:
        for ending in (".bin.partial", ".npz.partial"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path + ending)
        raise


def _flush(file):
    file.flush()
    os.fsync(file.fileno())
