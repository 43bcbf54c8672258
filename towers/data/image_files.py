"""The files of an image folder, by number."""

import os
import zlib

import numpy as np

from towers.data.decoding import AS_STORED, Decoding
from towers.data.files import read_image_file


class ImageFiles:
    """The image files of a list of classes; an `Encoded`.

    The names are in one buffer, with their ends in an array: as Python's strings those
    of ImageNet would take four times the memory.

    Args:
        folder: that the folders of the classes are in.
        names: per class, in the order of the labels, its folder and its files, the name
            of each file followed by a zero byte.
        decoding: limits the size of a file.
    """

    def __init__(
        self, folder: str, names: dict[str, bytes], decoding: Decoding = AS_STORED
    ):
        counts = [files.count(0) for files in names.values()]
        self.labels = np.repeat(np.arange(len(names), dtype=np.int32), counts)
        self._folder, self._decoding = folder, decoding
        self._classes = list(names)
        self._names = b"".join(names.values())
        self._ends = np.flatnonzero(np.frombuffer(self._names, np.uint8) == 0)

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, index: int) -> tuple[bytes, int]:
        content = read_image_file(self.place(index), self._decoding.max_pixels)
        return content, int(self.labels[index])

    def checksum(self) -> int:
        """Of the names, class by class."""
        classes = "\0".join(self._classes).encode(errors="surrogateescape")
        return zlib.crc32(self.labels.astype("<i4"), zlib.crc32(self._names + classes))

    def place(self, index: int) -> str:
        class_name = self._classes[self.labels[index]]
        begin = self._ends[index - 1] + 1 if index else 0
        name = os.fsdecode(self._names[begin : self._ends[index]])
        return os.path.join(self._folder, class_name, name)
