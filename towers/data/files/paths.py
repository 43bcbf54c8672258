"""Paths of image files, and the formats that Pillow reads. Imports no TensorFlow."""

import contextlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

from PIL import Image

from towers.data.files.reading import is_url, matches, open_data_file, without_query
from towers.errors import DataError, refuse_url
from towers.messages import one_line, printable, shown

with contextlib.suppress(ImportError):  # the extra `heif`
    import pillow_heif

    pillow_heif.register_heif_opener()

Image.init()
_COMMON = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF")
# Formats of Pillow that are not read: other programs draw EPS and WMF; the headers of
# BLP, FITS and ICNS do not give the size; CUR begins as some TGA files do; the others
# are no photos, or Pillow has no decoder.
_NOT_READ = "BLP BUFR CUR EPS FITS GRIB HDF5 ICNS MCIDAS MPEG WMF".split()
# Formats that are recognized by the first bytes of a file, the common ones first.
_RECOGNIZED = tuple(
    name
    for name in dict.fromkeys((*_COMMON, *Image.OPEN))
    if name in Image.OPEN and Image.OPEN[name][1] and name not in _NOT_READ
)
FORMATS_TEXT = f"{', '.join(x for x in _COMMON if x in _RECOGNIZED)} or other image"
_READ = (*_RECOGNIZED, "MPO", "TGA")
_ENDINGS = {x for x, name in Image.EXTENSION.items() if name in _READ}
# Images of other formats, which are named and not silently skipped.
_OTHER_IMAGES = (
    ".arw .avif .blp .cr2 .cr3 .cur .dng .emf .eps .fit .fits .heic .heif .hif .icns "
    ".im .jxl .nef .orf .pam .pcd .ps .raf .rw2 .svg .wmf"
)
OTHER_IMAGES = {*_OTHER_IMAGES.split()} - _ENDINGS
_IMAGE_ENDINGS = _ENDINGS | OTHER_IMAGES
HEIF_HINT = (
    "is a HEIC photo; install what reads it, the extra heif (python -m pip install "
    "pillow-heif), or convert it"
)

# Regular expressions for names of files that are not read as a data set.
_ADVICE = {
    r"\.(zip|7z|rar|tgz|tbz2?|txz)$|\.tar\.\w+$": (
        "is an archive; unpack it, and name its folder: --data_dir=FOLDER"
    ),
    r"\.(xlsx?|xlsm|ods)$": "is a spreadsheet; save it as CSV UTF-8, and name that",
    r"\.(npz|npy|mat|h5|hdf5|pkl|pickle|pt|pth)$": (
        "holds arrays; read them in Python and call towers.train with data=((x, y), "
        "(x_test, y_test)), see docs/python.md"
    ),
    r"\.(arrow|feather)$": (
        "is of datasets' save_to_disk; convert it in Python: "
        "datasets.load_from_disk(FOLDER)['train'].to_parquet('train.parquet')"
    ),
}

# One path, or several.
Paths = str | os.PathLike | Sequence[str | os.PathLike]


def class_name(text: str) -> str:
    """The name of the class of a folder, in one line, without spaces around it. It is
    the same for composed and decomposed letters (Unicode's NFC and NFD), as file
    systems store one or the other; other folders have different names.
    """
    text = unicodedata.normalize("NFC", text.strip() or text)
    return printable(text.replace("\\", "\\\\"))


def data_folder(data_dir: str) -> str:
    """The absolute path of the folder that --data_dir means, which may be missing;
    ConfigError of a URL, DataError of a file.
    """
    refuse_url("data_dir", data_dir)
    root = os.path.abspath(os.path.expanduser(data_dir or "data"))
    if os.path.exists(root) and not os.path.isdir(root):
        text = advice(root) or "is not a folder; --data_dir names the folder it is in"
        raise DataError(f"{shown(root)}: {text}")
    return root


def advice(path: str) -> str:
    """Return what to do with a file that is not read as a data set, or ""."""
    found = (text for name, text in _ADVICE.items() if re.search(name, path.lower()))
    return next(found, "")


def check_paths(paths: Paths) -> list[str]:
    """The paths as texts; DataError where there are none, or one does not exist."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not paths:
        raise DataError("no images: give files, or folders of files")
    paths = list(map(os.fspath, paths))
    for path in paths:
        if not is_url(path) and not os.path.exists(path):
            raise DataError(f"{printable(path)}: there is no such file or folder")
    return paths


def format_of(start: bytes) -> str | None:
    """The format of a file that begins with these bytes, 64 or more; None where it is
    not read, or is TGA, whose files have no first bytes in common.
    """
    if is_heif(start):
        return "HEIF" if "HEIF" in Image.OPEN else None
    start = start[:16].ljust(16, b"\0")
    return next((x for x in _RECOGNIZED if Image.OPEN[x][1](start) is True), None)


def is_heif(start: bytes) -> bool:
    """True if a file that begins with these bytes is a HEIC photo. Of AVIF, too, the
    first brand may be mif1.
    """
    brands = start[8 : int.from_bytes(start[:4])] if start[4:8] == b"ftyp" else b""
    return b"hei" in brands or b"hev" in brands


def ending(name: str) -> str:
    """The ending of a file name in lower case, such as ".jpg"."""
    return os.path.splitext(name)[1].lower()


def is_image_name(name: str) -> bool:
    """True if a name has the ending of an image format, which may be one that is not
    read.
    """
    return ending(name) in _IMAGE_ENDINGS


def is_image(entry: os.DirEntry) -> bool:
    """True if an entry of a folder is named like an image or, where its name has no
    ending of letters (IMG_0001, photo.1), is a file that begins like one.
    """
    if is_image_name(entry.name):
        return True
    if ending(entry.name)[1:].isalpha() or not is_file(entry):
        return False
    try:
        with open_data_file(entry.path) as file:
            start = file.read(64)
    except OSError:
        return False
    return format_of(start) is not None or is_heif(start)


def walk(paths: Iterable[str], fail: Callable[[str, str], None]) -> Iterator[str]:
    """The image files of paths, in their order.

    Folders are read recursively, in the order of the names, and their images are
    selected by `is_image`; names that begin with a dot are skipped. Links are followed.
    A path of a file is taken whatever its name. `fail` takes the path of a folder that
    cannot be listed, and the reason.
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
            raise ValueError("is a link to a folder that it is in")
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


def is_folder(entry: os.DirEntry) -> bool:
    """True if an entry is a folder, or a link to one; False where a link cannot be
    followed, such as one to itself.
    """
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_file(entry: os.DirEntry) -> bool:
    """As `is_folder`, of a regular file."""
    try:
        return entry.is_file()
    except OSError:
        return False


def reason(error: Exception) -> str:
    """Why a file or folder cannot be read, in a line."""
    if isinstance(error, MemoryError):
        return "there is not enough memory to read it"
    return getattr(error, "strerror", None) or one_line(error)
