"""Paths of image files, and the formats that Pillow reads. Imports no TensorFlow."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from PIL import Image

from towers.errors import DataError, one_line, printable

Image.init()
_BUILT = set(Image.EXTENSION.values())
# Formats that are read, and the endings of their names.
FORMATS = tuple(
    name
    for name in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF")
    if name in _BUILT
)
FORMATS_TEXT = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
ENDINGS = tuple(x for x, name in Image.EXTENSION.items() if name in FORMATS)
# Images of other formats, which are named and not silently skipped.
OTHER_IMAGES = (".avif", ".heic", ".heif", ".ico", ".jp2", ".jxl", ".ppm")

# Characters of a path in a message, so that the rest of it is read.
MOST_SHOWN = 200

# One path, or several.
Paths = str | os.PathLike | Sequence[str | os.PathLike]


def shown(text: str, most: int = MOST_SHOWN) -> str:
    """A path, or names that come with data, as part of a line: what a terminal does not
    show is escaped, and of a long text the end is kept."""
    text = printable(text)
    return text if len(text) <= most else "..." + text[3 - most :]


def data_folder(data_dir: str) -> str:
    """The absolute path of the folder that --data_dir means, which may be missing.

    Raises:
        DataError: it is a file.
    """
    root = os.path.abspath(os.path.expanduser(data_dir or "data"))
    if os.path.exists(root) and not os.path.isdir(root):
        raise DataError(f"{root} is not a folder; --data_dir names the folder it is in")
    return root


def check_paths(paths: Paths) -> list[str]:
    """The paths as texts.

    Raises:
        DataError: there are none, or there is nothing at one.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not paths:
        raise DataError("no images: give files, or folders of files")
    paths = list(map(os.fspath, paths))
    for path in paths:
        if not os.path.exists(path):
            raise DataError(f"{printable(path)}: there is no such file or folder")
    return paths


def is_image_name(name: str) -> bool:
    """Whether a name ends like that of an image file, of a format that is read or
    not."""
    return name.lower().endswith((*ENDINGS, *OTHER_IMAGES))


def walk(paths: Iterable[str], fail: Callable[[str, str], None]) -> Iterator[str]:
    """The image files of paths, in their order.

    Of a folder these are the files in it and below whose names end like those of
    images, in the order of the names; names that begin with a dot are skipped. Links
    are followed. A path of a file is taken whatever its name. The names of one folder
    and those above it are in memory.

    Args:
        paths: files and folders.
        fail: takes the path of a folder that cannot be listed, and the reason.
    """
    for path in paths:
        if os.path.isdir(path):
            yield from _walk_folder(path, fail)
        else:
            yield path


def _walk_folder(folder, fail):
    # Per folder on the way down its identity, and what is left to visit in it.
    levels = [(None, iter([(folder, True)]))]
    while levels:
        path, is_folder = next(levels[-1][1], ("", False))
        if is_folder:
            try:
                status = os.stat(path)
                identity = status.st_dev, status.st_ino
                if any(identity == other for other, _ in levels):
                    raise ValueError("is a link to a folder that it is in")
                levels.append((identity, _entries(path)))
            except (OSError, ValueError) as error:
                fail(path, reason(error))
        elif path:
            yield path
        else:
            levels.pop()


def _entries(folder):
    """(path, whether it is a folder) of the folders and images in a folder, sorted."""
    names, folders = [], set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if is_folder(entry):
                folders.add(entry.name)
            elif not is_image_name(entry.name):
                continue
            names.append(entry.name)
    names.sort()
    return ((os.path.join(folder, name), name in folders) for name in names)


def is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder, or a link to one; False where a link cannot be
    followed, such as one to itself."""
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
