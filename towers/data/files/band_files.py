"""Readers of image files with other pixels than 8-bit gray and colors."""

import io
import math
import re
import struct
import threading
import zipfile
from collections.abc import Callable

import numpy as np
from PIL import ExifTags, Image

from towers.data.files.bands import Bands, Refused
from towers.data.files.dicom import dicom
from towers.data.files.tiff import tiff

# Threads of Python 3.11 that parse headers of NumPy occasionally raise SystemError:
# AST constructor recursion depth mismatch (CPython #106905).
_parsing = threading.Lock()


def read_bands(content: bytes, name: str | None, windows: bool) -> Bands | None:
    """Return an image of a format, not decoded yet; None if Pillow is to read it.

    Pillow reads 8-bit gray and colors. `windows` applies those of DICOM files. Refused
    if an image is not read; damaged files raise any error.
    """
    if name == "DICOM":
        return dicom(content, windows)
    return READERS[name](content) if name in READERS else None


def png(content: bytes) -> Bands | None:
    """Read a PNG file of 16 bits, without alpha."""
    depth, kind = content[24:26]
    if depth != 16:
        return None
    width, height = struct.unpack(">II", content[16:24])
    bands = 3 if kind & 2 else 1

    def decode():
        import imagecodecs

        return imagecodecs.png_decode(content).reshape(height, width, -1)[..., :bands]

    orientation = 1
    if b"eXIf" in content or b"Orientation" in content:
        image = Image.OPEN["PNG"][0](io.BytesIO(content), "")
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    shape = height, width, bands
    return Bands(np.dtype(np.uint16), shape, decode, orientation=orientation)


def pnm(content: bytes) -> Bands | None:
    """Read a PGM or PPM file of more than 8 bits."""
    number = rb"(?:\s+(?:#[^\n]*\n\s*)*)(\d+)"
    header = re.match(rb"P([2356])" + 3 * number + rb"\s", content)
    if not header or int(header[4]) < 256:
        return None
    kind, width, height, greatest = map(int, header.groups())
    shape = height, width, 3 if kind in (3, 6) else 1

    def decode():
        if kind < 4:  # in decimals
            words = re.sub(rb"#[^\n]*", b"", content[header.end() :]).split()
            return np.array(words).astype(np.uint16)
        count = height * width * shape[2]
        return np.frombuffer(content, ">u2", count, header.end())

    return Bands(np.dtype(np.uint16), shape, decode, greatest.bit_length())


def jpeg2000(content: bytes) -> Bands | None:
    """Read a JPEG 2000 file of more than 8 bits or 4 components, or with signs."""
    start = content.find(b"\xff\x4f\xff\x51")  # codestream and its size
    right, bottom, left, top = struct.unpack_from(">4I", content, start + 8)
    count, depth = struct.unpack_from(">HB", content, start + 40)
    bits, is_signed = (depth & 127) + 1, bool(depth & 128)
    if start < 0 or not (bits > 8 or is_signed or count > 4):
        return None
    has_alpha = b"cdef" in content[:start] and count in (2, 4)
    shape = bottom - top, right - left, count - has_alpha

    def decode():
        import imagecodecs

        pixels = imagecodecs.jpeg2k_decode(content)
        return pixels.reshape(*shape[:2], count)[..., : shape[2]]

    size = 1 if bits <= 8 else 2 if bits <= 16 else 4
    return Bands(np.dtype(f"{'i' if is_signed else 'u'}{size}"), shape, decode, bits)


def numpy_file(content: bytes) -> Bands:
    """Read an array [height, width] or [height, width, bands] of NumPy."""

    def opened():
        if not content.startswith(b"PK"):
            return io.BytesIO(content)
        archive = zipfile.ZipFile(io.BytesIO(content))
        if len(archive.namelist()) != 1:
            names = ", ".join(archive.namelist())[:100]
            raise Refused(f"has several arrays, {names}; save one of them")
        return archive.open(archive.namelist()[0])

    with opened() as file, _parsing:
        np.lib.format.read_magic(file)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        begin = file.tell()

    def decode():
        count = math.prod(shape)
        with opened() as file:
            stored = file.read(begin + count * dtype.itemsize)
        pixels = np.frombuffer(stored, dtype, count, begin)
        return pixels.reshape(shape, order="F" if is_fortran else "C")

    if len(shape) == 2:
        shape = (*shape, 1)
    elif len(shape) == 3 and 2 * shape[0] < min(shape[1:]):
        why = f"is an array {list(shape)}, whose first axis seems to be the bands"
        raise Refused(f"{why}; np.moveaxis(image, 0, -1) moves them to the end")
    return Bands(dtype, shape, decode)


READERS: dict[str | None, Callable[[bytes], Bands | None]] = {
    "PNG": png,
    "PPM": pnm,
    "JPEG2000": jpeg2000,
    "TIFF": tiff,
    "NumPy": numpy_file,
}
