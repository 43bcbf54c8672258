"""The files of a run's folder.

Whatever stands in such a folder, opening it neither follows a symbolic link, nor writes
to anything but a file of its own, nor waits for a FIFO. All errors are OSErrors.
"""

import contextlib
import errno
import hashlib
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

# Bytes of a small file, such as config.json; a larger one is not read.
MOST_BYTES = 64 * 2**20

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


def kind(path: pathlib.Path) -> str | None:
    """What stands at a path, not followed: "a file", "a folder", "a symbolic link" and
    so on; None where there is nothing."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def open_file(path: pathlib.Path, flags: int) -> int:
    """The descriptor of a regular file.

    Args:
        path: of the file; only folders above it may be symbolic links.
        flags: as of `os.open`. A file that is written must have no other hard link.

    Raises:
        OSError: it cannot be opened, or something else stands there.
    """
    found = kind(path)
    if found not in (None, "a file"):
        raise OSError(errno.EINVAL, f"is {found}, where a file should be", str(path))
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags | safe, 0o666)
    status = os.fstat(descriptor)
    is_read = flags & os.O_ACCMODE == os.O_RDONLY
    if not stat.S_ISREG(status.st_mode) or (status.st_nlink > 1 and not is_read):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is also known by another name", str(path))
    return descriptor


def read_bytes(path: pathlib.Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))
    return content


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a small file so that a reader, also after a power cut, sees the old or the
    new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a killed process with the same id
    try:
        descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def digest(path: pathlib.Path, size: int) -> str:
    """The SHA-256 of a regular file of so many bytes, hexadecimal.

    Raises:
        OSError: it cannot be read.
        ValueError: it has another size; it is then not read.
    """
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        actual = os.fstat(file.fileno()).st_size
        if actual != size:
            raise ValueError(f"{path.name}: size is {actual}, should be {size}")
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: pathlib.Path) -> None:
    """Flushes a file, or the names in a folder, to the disk.

    The folder of a run may itself be a link, which is followed: nothing is changed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(path: pathlib.Path) -> None:
    """Flushes a file, or a folder with all that is in it, to the disk."""
    for part in [*path.rglob("*"), path]:
        sync(part)


def replace(path: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a file or folder, whose content is flushed, its final name. What had that
    name is removed, but stays where this fails."""
    aside = path.parent / f".tmp-replaced-{target.name}"
    try:
        if kind(path) == "a folder" and kind(target) is not None:
            remove(aside)
            os.rename(target, aside)  # a folder is not replaced in one piece
        os.rename(path, target)
    except BaseException:
        if kind(target) is None and kind(aside) is not None:
            os.rename(aside, target)
        raise
    sync(target.parent)
    with contextlib.suppress(OSError):
        remove(aside)


def make_folders(path: pathlib.Path) -> None:
    """Makes a folder and those above it, where they are missing; a power cut does not
    take them away again, nor those that a killed process has made."""
    path.mkdir(parents=True, exist_ok=True)
    for folder in path.resolve().parents:
        with contextlib.suppress(OSError):  # one that may not be listed is not new
            sync(folder)


@contextlib.contextmanager
def literal(folder: str | os.PathLike) -> Iterator[str]:
    """A name of a folder for TensorFlow's readers of checkpoints. They take names for
    patterns and find nothing where one has a bracket or a backslash; there, it is that
    of an open descriptor, which Linux has.

    Raises:
        OSError: the folder cannot be opened.
    """
    name = os.fspath(folder)
    if not has_pattern(name):
        yield name
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def has_pattern(path: str | os.PathLike) -> bool:
    """Whether TensorFlow takes the name for a pattern that does not fit itself."""
    return any(character in os.fspath(path) for character in "[\\")


def remove(path: pathlib.Path) -> None:
    """Removes a file, a folder with all that is in it, or a link (not its target), if
    there is one."""
    if kind(path) == "a folder":
        with _depth_as_os_error(path):
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def num_bytes(path: pathlib.Path) -> int:
    """Bytes of the files in a folder and below, or of what else stands there."""
    if kind(path) != "a folder":
        return os.lstat(path).st_size
    with _depth_as_os_error(path):
        return sum(
            os.lstat(os.path.join(folder, name)).st_size
            for folder, _, names in os.walk(path)
            for name in names
        )


@contextlib.contextmanager
def _depth_as_os_error(path):
    """Until Python 3.12, what walks through folders calls itself for each level."""
    try:
        yield
    except RecursionError:
        raise OSError(errno.ELOOP, "its folders are too deep", str(path)) from None


def free_bytes(path: pathlib.Path) -> str:
    """How many bytes are free on the disk of a folder, as words of a message."""
    try:
        return f"{shutil.disk_usage(path).free:,}"
    except OSError:
        return "an unknown number"
