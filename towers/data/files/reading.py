"""Files of data, which may be anything that stands at a path.

A link is followed. Only a regular file is read, not a FIFO or a device.
"""

import errno
import os
import re
import stat
from typing import BinaryIO

# Of an image file: what four channels of 16 bits take, for each pixel, and what all
# that is no pixels may take, such as a profile of colors.
PIXEL_BYTES = 8
OTHER_BYTES = 64_000_000


def is_url(path: str | os.PathLike) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", os.fsdecode(path)) is not None


def open_data_file(path: str, most_bytes: int | None = None) -> BinaryIO:
    """A regular file that is open for reading.

    Args:
        path: of the file, or of a link to it.
        most_bytes: size of the largest file that is opened.

    Raises:
        OSError: it cannot be opened, is larger, or is no regular file.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no file", path)
    if most_bytes is not None and status.st_size > most_bytes:
        message = f"has {status.st_size:,} bytes, and at most {most_bytes:,} are read"
        raise OSError(errno.EFBIG, message, path)
    return open(path, "rb")


def read_data_file(path: str, most_bytes: int) -> bytes:
    """The content of a regular file; OSErrors as of `open_data_file`."""
    with open_data_file(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_image_file(path: str, max_pixels: int) -> bytes:
    """The content of an image file that may have as many pixels as are decoded.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is larger than such a file.
    """
    most_bytes = PIXEL_BYTES * max_pixels + OTHER_BYTES
    with open_data_file(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > most_bytes:
            raise ValueError(
                f"has {num_bytes:,} bytes, and at most {most_bytes:,} are read with "
                f"max_image_pixels={max_pixels}; shrink it, or raise "
                "--max_image_pixels"
            )
        return file.read(num_bytes)


def open_lock_file(path: str) -> BinaryIO:
    """A regular file to lock, made where it is missing, and never written to.

    Raises:
        OSError: it cannot be opened, or is a link or another thing than a file.
    """
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is no file", path)
    return open(path, "ab")
