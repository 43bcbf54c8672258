"""Records of TFRecord files, read in any order from where they are.

A record is its length in 8 bytes, a checksum of these in 4, the content, and its
checksum in 4. The lengths lead from one record to the next, so that all offsets are
known after reading 8 bytes for each.
"""

import os
import struct
from collections.abc import Sequence

import numpy as np

from towers.data import streams

LENGTH_BYTES, BEFORE, AFTER = 8, 12, 4


class Records:
    """The records of some files, one file after the other.

    The checksums of the contents are not compared: TensorFlow offers their kind
    (CRC-32C) to its own readers alone.

    Args:
        paths: of the files.

    Raises:
        OSError: one cannot be read.
        ValueError: one breaks off, or is no TFRecord file.
    """

    def __init__(self, paths: Sequence[str]):
        self._paths = list(paths)
        ends = [None] * len(self._paths)

        def read_ends(number):
            ends[number] = _record_ends(self._paths[number])

        streams.call_in_readers(read_ends, len(self._paths))
        self._ends = np.concatenate([np.zeros(0, np.int64), *ends])
        self._firsts = np.cumsum([0, *map(len, ends)])

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, index: int) -> bytes:
        """The content of a record; OSError or ValueError where it cannot be read."""
        file = np.searchsorted(self._firsts, index, side="right") - 1
        is_first = index == self._firsts[file]
        begin = BEFORE + (0 if is_first else int(self._ends[index - 1]))
        length = int(self._ends[index]) - AFTER - begin
        with open(self._paths[file], "rb", buffering=0) as opened:
            content = os.pread(opened.fileno(), length, begin)
        if len(content) < length:
            raise ValueError(f"{self._paths[file]} has become shorter")
        return content


def _record_ends(path):
    """int64: where each record of a file ends."""
    place, ends = 0, []
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while place < size:
            header = os.pread(file.fileno(), LENGTH_BYTES, place)
            if len(header) == LENGTH_BYTES:
                place += BEFORE + struct.unpack("<Q", header)[0] + AFTER
            if len(header) < LENGTH_BYTES or place > size:
                raise ValueError(
                    f"{path}: record {len(ends)} (counted from 0) breaks off, or it is "
                    "no TFRecord file"
                )
            ends.append(place)
    return np.array(ends, np.int64)
