"""Paths of image files, and the formats that Pillow reads. Imports no TensorFlow."""

import contextlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from PIL import Image

from towers.data.files.reading import (
    RemoteEntry,
    is_url,
    matches,
    open_data_file,
    without_query,
)
from towers.errors import DataError, refuse_url
from towers.messages import one_line, printable, shown

with contextlib.suppress(ImportError):  # the extra `heif`
    import pillow_heif

    pillow_heif.register_heif_opener()

Image.init()
_COMMON = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF")
# Formats that are not read: EPS and WMF start other programs; headers of BLP, FITS and
# ICNS lack the size; CUR resembles TGA; the others are not photos or have no decoder.
_NOT_READ = "BLP BUFR CUR EPS FITS GRIB HDF5 ICNS MCIDAS MPEG WMF".split()
# Formats that are recognized by the first bytes of a file.
_RECOGNIZED = tuple(
    name
    for name in dict.fromkeys((*_COMMON, *Image.OPEN))
    if name in Image.OPEN and Image.OPEN[name][1] and name not in _NOT_READ
)
FORMATS_TEXT = f"{', '.join(x for x in _COMMON if x in _RECOGNIZED)} or other image"
_READ = (*_RECOGNIZED, "MPO", "TGA")
_ENDINGS = {x for x, name in Image.EXTENSION.items() if name in _READ}
_ENDINGS |= {".npy", ".npz", ".dcm", ".dicom"}
# Extensions of other image formats, which are reported and not silently skipped.
_OTHER_IMAGES = (
    ".arw .avif .blp .cr2 .cr3 .cur .dng .emf .eps .fit .fits .heic .heif .hif .icns "
    ".im .jxl .nef .orf .pam .pcd .ps .raf .rw2 .svg .wmf"
)
OTHER_IMAGES = {*_OTHER_IMAGES.split()} - _ENDINGS
_IMAGE_ENDINGS = _ENDINGS | OTHER_IMAGES
HEIF_HINT = "is a HEIC photo; install the extra heif (pillow-heif), or convert it"

# Regular expressions for files that are not read as a data set -> what to do.
_ADVICE = {
    r"\.(zip|7z|rar|tgz|tbz2?|txz)$|\.tar\.\w+$": (
        "is an archive; unpack it, and name its folder: --data_dir=FOLDER"
    ),
    r"\.(xlsx?|xlsm|ods)$": "is a spreadsheet; save it as CSV UTF-8, and name that",
    r"\.(npy|mat|h5|hdf5|pkl|pickle|pt|pth)$": (
        "holds arrays; read them in Python and call towers.train with data=((x, y), "
        "(x_test, y_test)), see docs/python.md"
    ),
    r"\.(arrow|feather)$": (
        "is of datasets' save_to_disk; convert it in Python: "
        "datasets.load_from_disk(FOLDER)['train'].to_parquet('train.parquet')"
    ),
}


Paths = str | os.PathLike | Sequence[str | os.PathLike]
Entry = os.DirEntry | RemoteEntry


def class_name(text: str) -> str:
    """Return the class name of a folder: stripped, printable, in Unicode form NFC."""
    text = unicodedata.normalize("NFC", text.strip() or text)
    return printable(text.replace("\\", "\\\\"))


def data_folder(data_dir: str) -> str:
    """Return the absolute path of --data_dir; DataError if it is a file."""
    refuse_url("data_dir", data_dir)
    root = os.path.abspath(os.path.expanduser(data_dir or "data"))
    if os.path.exists(root) and not os.path.isdir(root):
        text = advice(root) or "is not a folder; --data_dir names the folder it is in"
        raise DataError(f"{shown(root)}: {text}")
    return root


def advice(path: str) -> str:
    """Return how to convert a file that is not read as a data set, or ""."""
    return next((x for name, x in _ADVICE.items() if re.search(name, path.lower())), "")


def check_paths(paths: Paths) -> list[str]:
    """Return paths as texts; DataError if there are none or one is missing."""
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not several:
        raise DataError("no images: give files, or folders of files")
    names = [os.fspath(path) for path in several]
    for name in names:
        if not is_url(name) and not os.path.exists(name):
            raise DataError(f"{printable(name)}: no such file or folder")
    return names


def format_of(start: bytes) -> str | None:
    """Return the image format of a file from its first 132 bytes, or None."""
    if is_heif(start):
        return "HEIF" if "HEIF" in Image.OPEN else None
    is_npz = start.startswith(b"PK\3\4") and b".npy" in start[30:132]
    if is_npz or start.startswith(b"\x93NUMPY"):
        return "NumPy"
    if start[128:132] == b"DICM":
        return "DICOM"
    accepts: dict[str, Any] = {name: Image.OPEN[name][1] for name in _RECOGNIZED}
    start = start[:16].ljust(16, b"\0")
    return next((x for x, accept in accepts.items() if accept(start) is True), None)


def is_heif(start: bytes) -> bool:
    """Return whether the first bytes are those of a HEIC photo, not of AVIF."""
    brands = start[8 : int.from_bytes(start[:4])] if start[4:8] == b"ftyp" else b""
    return b"hei" in brands or b"hev" in brands


def ending(name: str) -> str:
    """Return the lower-case extension of a file name, such as ".jpg"."""
    return os.path.splitext(name)[1].lower()


def is_image_name(name: str) -> bool:
    """Return whether a name has the extension of any image format."""
    return ending(name) in _IMAGE_ENDINGS


def is_image(entry: Entry) -> bool:
    """Return whether a name or, without an extension, the content is of an image."""
    if is_image_name(entry.name):
        return True
    if ending(entry.name)[1:].isalpha() or not is_file(entry):
        return False
    try:
        with open_data_file(entry.path) as file:
            start = file.read(132)
    except OSError:
        return False
    return format_of(start) is not None or is_heif(start)


def walk(paths: Iterable[str], fail: Callable[[str, str], None]) -> Iterator[str]:
    """Yield the image files of paths; folders are read recursively, sorted by name.

    `fail` takes a folder that cannot be listed and the reason.
    """
    for path in paths:
        if os.path.isdir(path):
            yield from _walk_folder(path, fail)
        elif is_url(path) and not is_image_name(without_query(path)):
            try:
                yield from filter(is_image_name, matches(path))
            except DataError as error:
                fail(path, one_line(error))
        else:
            yield path


def _walk_folder(folder, fail, above=()):
    above = (*above, os.path.realpath(folder))
    try:
        if above[-1] in above[:-1]:
            raise ValueError("is a symbolic link to a parent folder")
        with os.scandir(folder) as children:
            entries = sorted(
                (entry.name, is_folder(entry))
                for entry in children
                if entry.name[0] != "." and (is_folder(entry) or is_image(entry))
            )
    except (OSError, ValueError) as error:
        return fail(folder, reason(error))
    for name, is_below in entries:
        path = os.path.join(folder, name)
        if is_below:
            yield from _walk_folder(path, fail, above)
        else:
            yield path


def is_folder(entry: Entry) -> bool:
    """Return whether an entry is a folder or a link to one."""
    if isinstance(entry, RemoteEntry):
        return entry.is_folder
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_file(entry: Entry) -> bool:
    """Return whether an entry is a regular file or a link to one."""
    if isinstance(entry, RemoteEntry):
        return not entry.is_folder
    try:
        return entry.is_file()
    except OSError:
        return False


def reason(error: Exception) -> str:
    """Return in one line why a file cannot be read."""
    if isinstance(error, MemoryError):
        return "there is not enough memory to read it"
    return getattr(error, "strerror", None) or one_line(error)
