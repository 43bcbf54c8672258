"""IDX files, in which MNIST is published: a header, then bytes in row-major order.

The header is two zero bytes, the type of the values (0x08 for unsigned bytes), the
number of dimensions, and each dimension as four bytes, the highest first
(yann.lecun.com/exdb/mnist, "File formats").
"""

import contextlib
import gzip
import math
import zlib

import numpy as np

from towers.data.files import open_data_file
from towers.data.paths import reason
from towers.errors import DataError

UNSIGNED_BYTE = 0x08

# Of a packed file besides twice its content.
PACKING_BYTES = 2**20


def read_idx(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Reads one file, packed where its name ends with `.gz`.

    Args:
        path: of the file.
        shape: that it must have; the first dimension counts the records.

    Returns:
        uint8 [*shape].

    Raises:
        DataError: it is missing, not such a file, of another shape, or cut short.
    """
    header = bytes([0, 0, UNSIGNED_BYTE, len(shape)])
    header += b"".join(size.to_bytes(4, "big") for size in shape)
    num_bytes = math.prod(shape)
    is_packed = path.endswith(".gz")
    # Behind its content a packed file may go on with zeros, which would all be read.
    most_bytes = 2 * num_bytes + PACKING_BYTES if is_packed else None
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_data_file(path, most_bytes))
            if is_packed:
                file = stack.enter_context(gzip.open(file))
            actual = file.read(len(header))
            _check_header(path, actual, header)
            # One byte more than expected reveals a file that is too long.
            content = file.read(num_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error
    if len(content) != num_bytes:
        record_bytes = num_bytes // shape[0]
        where = (
            f"it goes on after record {shape[0] - 1}, the last"
            if len(content) > num_bytes
            else f"it breaks off in record {len(content) // record_bytes}"
        )
        raise DataError(
            f"{path}: expected {num_bytes} bytes after the header ({shape[0]} records "
            f"of {record_bytes}): {where} (records are counted from 0)"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _check_header(path: str, actual: bytes, expected: bytes) -> None:
    if actual == expected:
        return
    if actual[:4] != expected[:4]:
        raise DataError(
            f"{path}: is not an IDX file of bytes with {expected[3]} dimension(s): its "
            f"magic number is 0x{actual[:4].hex()}, expected 0x{expected[:4].hex()}"
        )
    if len(actual) < len(expected):
        raise DataError(f"{path}: breaks off in its header, after {len(actual)} bytes")
    raise DataError(
        f"{path}: holds {_sizes(actual)} (records, then height and width), expected "
        f"{_sizes(expected)}"
    )


def _sizes(header: bytes) -> str:
    sizes = np.frombuffer(header, ">u4")[1:]
    return "x".join(map(str, sizes))
