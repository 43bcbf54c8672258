"""Files and folders that are written whole or not at all, also after a power cut.

Nothing else in the package flushes a file or gives it its final name. All errors are
OSErrors.
"""

import contextlib
import itertools
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator


def write_aside(path: str | os.PathLike, content: bytes | str) -> None:
    """Replace a file, as UTF-8 if it is text; readers see the old or the new one."""
    with aside(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def aside(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield a temporary path `.tmp-PID-NAME` for a file or a folder.

    What is written there gets its name at the end, or is removed after an error.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    remove(temporary)  # of a killed process with the same id
    try:
        yield temporary
        replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def free_name(stem: str | os.PathLike, suffix: str = "") -> pathlib.Path:
    """Return the first free path of STEM, STEM-2, STEM-3 and so on."""
    paths = (f"{stem}-{i}{suffix}" for i in itertools.count(2))
    return next(
        pathlib.Path(path)
        for path in itertools.chain([f"{stem}{suffix}"], paths)
        if not os.path.lexists(path)
    )


def replace(path: pathlib.Path, target: pathlib.Path) -> None:
    """Flush a file or folder and give it its final name.

    What had that name is removed, but kept if this fails.
    """
    for part in [*path.rglob("*"), path]:
        # Files of the user, see `keep_others`, may be unreadable, or anything.
        if not part.is_symlink() and (part.is_file() or part.is_dir()):
            with contextlib.suppress(PermissionError):
                sync(part)
    before = target.with_name(f".tmp-replaced-{target.name}")
    is_moved = path.is_dir() and os.path.lexists(target)
    if is_moved:  # a folder is not replaced in one piece
        remove(before)
        os.rename(target, before)
    try:
        os.rename(path, target)
    except BaseException:
        if is_moved:
            os.rename(before, target)
        raise
    sync(target.parent)
    if is_moved:
        with contextlib.suppress(OSError):
            remove(before)


def recover(folder: pathlib.Path, name: str = "*") -> None:
    """Give folders their names again if a `replace` was killed between its renames."""
    for before in folder.glob(f".tmp-replaced-{name}"):
        target = folder / before.name.removeprefix(".tmp-replaced-")
        if not os.path.lexists(target):
            os.rename(before, target)


def keep_others(folder: pathlib.Path, new: pathlib.Path) -> list[pathlib.Path]:
    """Link or copy what a new version of a folder lacks into it; return the paths."""
    kept = []
    for path in sorted(folder.iterdir()):
        target = new / path.name
        is_folder = path.is_dir() and not path.is_symlink()
        if not os.path.lexists(target):
            if is_folder:
                shutil.copytree(path, target, symlinks=True, copy_function=_link)
            else:
                _link(path, target)
            kept.append(path)
        elif is_folder and target.is_dir():
            kept += keep_others(path, target)
    return kept


def _link(path, target):
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, target, follow_symlinks=False)


def leftovers(path: pathlib.Path) -> list[pathlib.Path]:
    """Return files that killed processes of this machine left, see `aside`, `replace`.

    Also temporary folders whose names continue with a hyphen.
    """
    name = re.escape(path.name)
    pattern = re.compile(rf"\.tmp-(?:([0-9]+)-{name}(?:-\w+)?|replaced-{name})")
    matches = ((x, pattern.fullmatch(x.name)) for x in path.parent.glob(".tmp-*"))
    return [x for x, match in matches if match and not _is_alive(match[1])]


def _is_alive(pid):
    try:
        os.kill(int(pid or ""), 0)
    except (OSError, OverflowError, ValueError) as error:
        return isinstance(error, PermissionError)
    return True


def remove_leftovers(
    paths: Iterable[pathlib.Path], of: str, log: Callable[[str], None]
) -> None:
    """Remove what interrupted processes left, and log its size."""
    for path in sorted(paths):
        try:
            size = num_bytes(path)
            remove(path)
            log(f"removed {path}, left by an interrupted {of}: {size:,} bytes")
        except OSError as error:  # it takes room but does no harm
            log(f"cannot remove {path}: {error}")


def append(path: str | os.PathLike, content: bytes) -> None:
    """Append to a file or create it, unflushed; after an error it is as before."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def sync(path: str | os.PathLike) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(path: pathlib.Path) -> None:
    """Create a folder and missing ones above it, so that they outlast a power cut."""
    path.mkdir(parents=True, exist_ok=True)
    for folder in path.resolve().parents:
        with contextlib.suppress(OSError):  # one that may not be listed is not new
            sync(folder)


def remove(path: pathlib.Path) -> None:
    """Remove a file, a link (not its target) or a folder, if there is one.

    A folder loses its name first, so that half of it does not look whole.
    """
    if not os.path.isdir(path) or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    doomed = path
    if not path.name.startswith(".tmp-"):
        doomed = path.with_name(f".tmp-removed-{path.name}")
        remove(doomed)
        os.rename(path, doomed)
    shutil.rmtree(doomed)


def num_bytes(path: pathlib.Path) -> int:
    """Return the size of a file, or of all files in a folder and below."""
    return sum(
        part.lstat().st_size for part in (path, *path.rglob("*")) if not part.is_dir()
    )


def free_space(path: str | os.PathLike) -> str:
    """Return the free space on the disk of a folder, for a message."""
    try:
        status = os.statvfs(path)
    except OSError:
        return "an unknown number of bytes are free"
    if status.f_files and not status.f_favail:
        return "no further file can be made (no inodes are free)"
    return f"{status.f_bavail * status.f_frsize:,} bytes are free"
