"""Copies of fetched bytes in a folder, of which the least recently used are deleted.

The name of a copy has its checksum, so that a damaged one is fetched again.
"""

import contextlib
import glob
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterable

from towers.errors import ConfigError, DataError

# One thread fetches bytes; others that need them wait.
_fetching = [threading.Lock() for _ in range(256)]
_guard = threading.Lock()
# Name in the cache without the checksum -> path, inode, size, time of last change.
_checked: dict[str, tuple[str, int, int, int]] = {}


def folder() -> str:
    """Return TOWERS_CACHE_DIR, or `towers` in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TOWERS_CACHE_DIR") or os.path.join(home, "towers")


def _max_bytes():
    text = os.environ.get("TOWERS_CACHE_GB", "20")
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text) * 1e9
    raise ConfigError(f"TOWERS_CACHE_GB={text}: should be a number of gigabytes")


def cached(source: str, key: str, num_bytes: int, contents: Iterable[bytes]) -> str:
    """Return the path of a copy; `contents` are read if there is none.

    `key` identifies the bytes and their version; OSErrors with the file name `source`
    are raised. DataError if nothing can be written.
    """
    name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    prefix = os.path.join(folder(), "remote", name[:2], name)
    with _fetching[hash(prefix) % len(_fetching)]:
        if place := _intact(prefix):
            return place
        most = _max_bytes()
        # Several machines may share the folder: process numbers are not enough.
        temporary, digest = f"{prefix}.{uuid.uuid4().hex}.partial", hashlib.sha256()
        ending = os.path.splitext(source.partition("?")[0].partition("#")[0])[1][:12]
        try:
            os.makedirs(os.path.dirname(prefix), exist_ok=True)
            with open(temporary, "wb") as file:
                for content in contents:
                    digest.update(content)
                    file.write(content)
            place = f"{prefix}-{digest.hexdigest()[:16]}{ending}"
            os.replace(temporary, place)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            if not isinstance(error, OSError) or error.filename == source:
                raise
            why = f"remote files cannot be kept there: {error.strerror}"
            raise DataError(f"{folder()}: {why}; set TOWERS_CACHE_DIR") from error
        _shrink(place, num_bytes, most)
    return place


def _intact(prefix):
    """Return the path of an undamaged cached file, or None."""
    known = _checked.get(prefix)
    for path in [known[0]] if known else glob.glob(f"{glob.escape(prefix)}-*"):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            about = path, status.st_ino, status.st_size, status.st_mtime_ns
            if known == about or path.startswith(f"{prefix}-{_checksum(path)}"):
                _checked[prefix] = about
                with contextlib.suppress(OSError):  # it was used now
                    os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
                return path
            os.remove(path)
    _checked.pop(prefix, None)
    return None


def _checksum(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


_written = [float("inf")]  # bytes since the cache was last measured


def _shrink(kept, num_bytes, most):
    """Delete the least recently used files, once in a twentieth of the limit."""
    with _guard:
        _written[0] += num_bytes
        if _written[0] < most / 20:
            return
        _written[0] = 0
    files = []
    for path in glob.glob(os.path.join(glob.escape(folder()), "remote", "*", "*")):
        with contextlib.suppress(FileNotFoundError):  # renamed or deleted
            status = os.stat(path)
            files.append((status.st_atime, status.st_size, path))
    excess = sum(size for _, size, _ in files) - 0.95 * most
    for _, size, path in sorted(files):
        if excess > 0 and path != kept:
            with contextlib.suppress(OSError):
                os.remove(path)
            excess -= size
