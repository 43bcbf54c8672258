"""Bytes of files that are on this machine, on a web server or in a bucket.

Whole files, or blocks of BLOCK_BYTES, of URLs are kept in the folder of `cache_folder`:
those used last, at most TOWERS_CACHE_GB gigabytes (20 by default). A file that changes
under its URL and keeps its size is not read again. http and https are read with
`urllib`, other schemes with fsspec, which needs a package for each, see PACKAGES.
"""

import contextlib
import errno
import functools
import glob
import hashlib
import io
import os
import re
import stat
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable
from typing import BinaryIO

from towers.errors import DataError, one_line, printable

BLOCK_BYTES = 4 * 2**20
# Of an image file: what four channels of 16 bits take, for each pixel, and what all
# that is no pixels may take, such as a profile of colors.
PIXEL_BYTES = 8
OTHER_BYTES = 64_000_000
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "hf": "huggingface_hub"}
# A request is repeated after pauses, in seconds.
PAUSES = (0.2, 1.0, 4.0)
TIMEOUT_SECS = 30.0
# Files of which ranges are read.
MOST_OPEN = 64


def is_url(path: str | os.PathLike) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", os.fsdecode(path)) is not None


def open_data_file(path: str, most_bytes: int | None = None) -> BinaryIO:
    """A regular file, or a link to one, that is open for reading; OSError where it
    cannot be opened, is another thing, or has more bytes than `most_bytes`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no file", path)
    if most_bytes is not None and status.st_size > most_bytes:
        message = f"has {status.st_size:,} bytes, and at most {most_bytes:,} are read"
        raise OSError(errno.EFBIG, message, path)
    return open(path, "rb")


def read_data_file(path: str, most_bytes: int) -> bytes:
    """The content of a regular file; OSError as of `open_data_file`."""
    with open_data_file(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_range(path: str, offset: int, length: int) -> bytes:
    """Some bytes of a file; OSError where it cannot be read, ValueError where it ends
    before."""
    if not is_url(path):
        file = _KeptOpen.of(path)  # another thread may drop it
        content = os.pread(file.number, length, offset)
    elif os.path.exists(_cache_path(path)):
        content = _from_cache(path, lambda: _fetch_blocks(path), offset, length)
    else:
        pieces, end = [], min(offset + length, size(path))
        while offset < end:
            number, begin = divmod(offset, BLOCK_BYTES)
            most = min(BLOCK_BYTES - begin, end - offset)
            pieces.append(_from_block(path, number, begin, most))
            offset += most
        content = b"".join(pieces)
    if len(content) < length:
        raise ValueError(f"the file ends {length - len(content):,} bytes too early")
    return content


def read_image_file(path: str, max_pixels: int) -> bytes:
    """The content of an image file that may have as many pixels as are decoded;
    ValueError where it is larger than such a file."""
    if is_url(path):
        path = local_copy(path, in_blocks=False)
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


def open_file(path: str) -> BinaryIO:
    """A file that is open for reading, with `seek`; OSError where it cannot be read."""
    if is_url(path):
        return io.BufferedReader(_RemoteFile(path), BLOCK_BYTES)
    return open_data_file(path)


def local_copy(path: str, in_blocks: bool = True) -> str:
    """The path, or the path of a copy of a URL in the cache, of a file that may be
    large and is fetched `in_blocks`; OSError where it cannot be read."""
    if not is_url(path):
        return path
    fetch = _fetch_blocks if in_blocks else lambda path: [_fetch(path)]
    return _cached(path, lambda: fetch(path))


@functools.cache
def size(path: str) -> int:
    """Bytes of the file at a URL."""
    return _retry(path, _size_of)


def version(path: str) -> str:
    """A text that differs after a file is replaced."""
    if is_url(path):
        return f"{path} {size(path)}"
    status = os.stat(path)
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


def expand(pattern: str) -> list[str]:
    """The files of a pattern with `*`, `?` and `{a,b}` or `{000..146}`, sorted within
    each alternative of the braces; DataError where there is none. A file on this
    machine may have such a name itself."""
    paths = []
    for one in [pattern] if os.path.exists(pattern) else expand_braces(pattern):
        if is_url(one):
            matches = sorted(_list(one)) if re.search(r"[*?\[]", one) else [one]
        else:
            matches = [one] if os.path.exists(one) else sorted(glob.glob(one))
        if not matches:
            raise DataError(f"{printable(one)}: there is no such file")
        paths += matches
    return paths


def matches(folder: str, pattern: str = "**") -> list[str]:
    """The files of a pattern in a folder, sorted; all in it and below it by default.
    DataError where it cannot be listed."""
    if is_url(folder):
        return sorted(_list(f"{folder.rstrip('/')}/{pattern}"))
    paths = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(path for path in paths if not os.path.isdir(path))


def expand_braces(pattern: str) -> list[str]:
    """`x{a,b}` as xa and xb, `{08..10}` as 08, 09 and 10."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        first, last = numbers.groups()
        values = [str(x).zfill(len(first)) for x in range(int(first), int(last) + 1)]
    else:
        values = match[1].split(",")
    begin, end = pattern[: match.start()], pattern[match.end() :]
    return [x for value in values for x in expand_braces(f"{begin}{value}{end}")]


class _KeptOpen:
    """A file that is closed when nobody uses it."""

    def __init__(self, path):
        with open_data_file(path) as file:
            self.number = os.dup(file.fileno())

    def __del__(self, close=os.close):
        if hasattr(self, "number"):
            close(self.number)

    @classmethod
    @functools.lru_cache(MOST_OPEN)
    def of(cls, path):
        return cls(path)


def _pread(path, offset, length):
    with open_data_file(path) as file:
        return os.pread(file.fileno(), length, offset)


def open_lock_file(path: str) -> BinaryIO:
    """A regular file to lock, made where it is missing, and never written to; OSError
    where it is a link or another thing."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is no file", path)
    return open(path, "ab")


# Requests.


class _RemoteFile(io.RawIOBase):
    def __init__(self, path):
        self._path, self._place, self._size = path, 0, size(path)

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer):
        length = max(0, min(len(buffer), self._size - self._place))
        content = read_range(self._path, self._place, length) if length else b""
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


def _from_block(path, number, offset, length):
    begin = number * BLOCK_BYTES
    end = min(begin + BLOCK_BYTES, size(path))
    key = f"{path} {size(path)} {number}"
    return _from_cache(key, lambda: [_fetch(path, begin, end)], offset, length)


def _fetch_blocks(path):
    for begin in range(0, size(path), BLOCK_BYTES):
        yield _fetch(path, begin, min(begin + BLOCK_BYTES, size(path)))


def _fetch(path, begin=None, end=None):
    return _retry(path, lambda path: _request(path, begin, end))


def _retry(path, request):
    for pause in (*PAUSES, None):
        try:
            return request(path)
        except Exception as error:  # of any class, by the library of a bucket
            final = FileNotFoundError | PermissionError | DataError
            is_final = isinstance(error, final)
            is_final |= getattr(error, "code", 500) in (401, 403, 404)
            if pause is None or is_final:
                if isinstance(error, DataError):
                    raise
                why = f"cannot be fetched: {one_line(error, 150)}"
                raise OSError(errno.EIO, why, path) from error
        time.sleep(pause)


def _request(path, begin, end):
    if not path.startswith(("http://", "https://")):
        return _bucket(path).cat_file(path, start=begin, end=end)
    ranges = {} if begin is None else {"Range": f"bytes={begin}-{end - 1}"}
    with _open_url(path, headers=ranges) as response:
        if ranges and response.status != 206:
            raise DataError(f"{printable(path)}: the server gives no ranges of files")
        content = response.read()
    expected = int(response.headers.get("Content-Length", len(content)))
    if len(content) != expected:
        raise OSError(errno.EIO, f"{len(content)} of {expected} bytes came", path)
    return content


def _size_of(path):
    if not path.startswith(("http://", "https://")):
        return int(_bucket(path).info(path)["size"])
    with _open_url(path, method="HEAD") as response:
        return int(response.headers["Content-Length"])


def _open_url(path, **options):
    request = urllib.request.Request(path, **options)  # noqa: S310, http or https
    return urllib.request.urlopen(request, timeout=TIMEOUT_SECS)  # noqa: S310


def _list(pattern):
    scheme = pattern.split(":")[0]
    if scheme in ("http", "https"):
        raise DataError(
            f"{printable(pattern)}: a web server lists no files; name them, such as "
            "https://HOST/train-{000..146}.tar"
        )
    try:
        bucket = _bucket(pattern)
        names = [x for x in bucket.glob(pattern) if bucket.isfile(x)]
        return [f"{scheme}://{name.lstrip('/')}" for name in names]
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{printable(pattern)}: {one_line(error, 150)}") from error


def _bucket(path):
    import fsspec

    scheme = path.split(":")[0].lower()
    try:
        return fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        package = PACKAGES.get(scheme)
        hint = f"pip install {package}" if package else one_line(error, 100)
        raise DataError(
            f"{printable(path)}: {scheme}:// cannot be read here; {hint}"
        ) from None


# The cache on the disk.


def cache_folder() -> str:
    """TOWERS_CACHE_DIR, or `towers` in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TOWERS_CACHE_DIR") or os.path.join(home, "towers")


def _cache_path(key):
    name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    ending = os.path.splitext(key)[1] if key.count(" ") == 0 else ""
    return os.path.join(cache_folder(), "remote", name + ending[:12])


# A file is fetched by one thread; the others that need it wait.
_fetching = [threading.Lock() for _ in range(256)]
_guard = threading.Lock()


def _from_cache(key, fetch, offset, length):
    while True:
        with contextlib.suppress(FileNotFoundError):  # deleted by another process
            return _pread(_cached(key, fetch), offset, length)


def _cached(key: str, fetch: Callable[[], Iterable[bytes]]) -> str:
    """The path of the file with the content of a key, which is fetched once."""
    path = _cache_path(key)

    def is_there():
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return True
        return False

    if is_there():
        return path
    with _fetching[hash(path) % len(_fetching)]:
        if is_there():
            return path
        # Several machines may share the folder: process numbers are not enough.
        folder, temporary = os.path.dirname(path), f"{path}.{uuid.uuid4().hex}.partial"
        os.makedirs(folder, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.writelines(fetch())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
        _shrink(folder, path)
    return path


_written = [float("inf")]  # bytes since the folder was last measured


def _shrink(folder, kept):
    """Deletes the files used longest ago where there are more bytes than may be; looks
    only after every twentieth of them."""
    most = float(os.environ.get("TOWERS_CACHE_GB", "20")) * 1e9
    with _guard:
        _written[0] += os.path.getsize(kept)
        if _written[0] < most / 20:
            return
        _written[0] = 0
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it got its name, or is gone
                status = entry.stat()
                files.append((status.st_mtime, status.st_size, entry.path))
    excess = sum(size for _, size, _ in files) - 0.95 * most
    for _, num_bytes, path in sorted(files):
        if excess <= 0:
            break
        if path == kept:
            continue
        with contextlib.suppress(OSError):
            os.remove(path)
        excess -= num_bytes
