"""Files on this machine, on web servers and in buckets, cached if they are remote.

http(s) uses `urllib`, since fsspec ignores ETags; other schemes use fsspec.
"""

import base64
import collections
import contextlib
import errno
import functools
import glob
import http.client
import io
import os
import re
import resource
import socket
import stat
import string
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import BinaryIO, NamedTuple, Self

from towers.data.files import byte_cache
from towers.errors import DataError, TowersError, UnavailableDataError
from towers.messages import one_line, printable

BLOCK_BYTES = 4 * 2**20
# Size limits of an image file: bytes per pixel (4 x 16 bits), plus metadata.
PIXEL_BYTES = 8
OTHER_BYTES = 64_000_000
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs"}
LFS = b"version https://git-lfs.github.com/"  # first bytes of a pointer file of Git LFS
LFS_HINT = "is a pointer of Git LFS and not the file itself: run git lfs pull"
PAUSES = (0.2, 1.0, 4.0)  # seconds between repeated requests
TIMEOUT_SECS = 30.0
# Maximum number of local files that stay open, of the descriptors of a process.
_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_OPEN = max(4, min(256, _LIMIT // 4)) if _LIMIT > 0 else 256
# Errors of disks, machines and networks that may be over later.
TRANSIENT = (
    *(errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.EAGAIN, errno.EBUSY, errno.ENXIO, errno.ENODEV, errno.ENOTCONN),
)


class Version(NamedTuple):
    """Size, modification time or ETag, and for local files inode and change time."""

    size: int
    tag: str
    inode: int = 0
    changed: int = 0

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the version of a local file."""
        time_ns = str(status.st_mtime_ns)
        return cls(status.st_size, time_ns, status.st_ino, status.st_ctime_ns)

    def require(self, path: str, now: Self) -> None:
        """Raise DataError if a file changed; some file systems renumber inodes."""
        is_same = self.inode == now.inode or self.changed == now.changed
        if self[:2] != now[:2] or not is_same:
            why = "was replaced or changed after this program had indexed it"
            raise DataError(f"{printable(path)}: {why}; start again to read it anew")


def is_url(path: str | os.PathLike) -> bool:
    """Return whether a path is a URL."""
    text = os.fsdecode(path)
    return "://" in text and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text) is not None


def is_web(path: str) -> bool:
    """Return whether a path is an http or https URL."""
    return re.match("https?://", path, re.IGNORECASE) is not None


def without_query(path: str) -> str:
    """Return a web URL without its query; other paths unchanged."""
    return re.split(r"[?#]", path)[0] if is_web(path) else path


def open_data_file(path: str, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file of at most `most_bytes`; OSError for other files."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a file", path)
    if most_bytes is not None and status.st_size > most_bytes:
        message = f"has {status.st_size:,} bytes, and at most {most_bytes:,} are read"
        raise OSError(errno.EFBIG, message, path)
    return open(path, "rb")


def read_data_file(path: str, most_bytes: int) -> bytes:
    """Read a regular file of at most `most_bytes`."""
    with open_data_file(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_range(
    path: str, offset: int, length: int, version: Version | None = None
) -> bytes:
    """Read a range of bytes of a file.

    Raises OSError if it cannot be read, ValueError if it is too short, DataError if its
    version changed, UnavailableDataError if a disk or server does not answer.
    """
    if not is_url(path):
        content = _retry(path, _pread, offset, length, version)
    else:
        version = version or known_version(path)
        end = min(offset + length, version.size)
        blocks = range(offset - offset % BLOCK_BYTES, end, BLOCK_BYTES)
        parts = (_read_block(path, version, begin, offset, end) for begin in blocks)
        content = b"".join(parts)
    if len(content) < length:
        raise ValueError(f"the file ends {length - len(content):,} bytes too early")
    return content


def read_image_file(path: str, max_pixels: int) -> bytes:
    """Read an image file; ValueError if it is too large for `max_pixels`."""
    most_bytes = PIXEL_BYTES * max_pixels + OTHER_BYTES
    num_bytes = known_version(path).size
    if num_bytes > most_bytes:
        why = f"has {num_bytes:,} bytes, and at most {most_bytes:,} are read with"
        way = f"max_image_pixels={max_pixels}; shrink it, or raise --max_image_pixels"
        raise ValueError(f"{why} {way}")
    if is_url(path):
        return read_range(path, 0, num_bytes)
    with open_file(path) as file:
        return _retry(path, lambda _: file.read())


def open_file(path: str, version: Version | None = None) -> BinaryIO:
    """Open a seekable file for reading; for errors see `read_range`."""
    if is_url(path):
        file = _RemoteFile(path, version or current_version(path))
        return io.BufferedReader(file, BLOCK_BYTES)
    file = _retry(path, open_data_file)
    if version is not None:
        try:
            version.require(path, Version.of(os.fstat(file.fileno())))
        except DataError:
            file.close()
            raise
    return file


def local_copy(path: str) -> str:
    """Return a local path, or the path of a cached copy of a URL."""
    if not is_url(path):
        return path
    version = current_version(path)
    return _cached(path, version, 0, version.size)


def current_version(path: str) -> Version:
    """Return the current version of a file."""
    version = _retry(path, _version_now)
    if is_url(path):
        _versions[path] = version
    return version


def known_version(path: str) -> Version:
    """Return the version of a file; for a remote file the last one fetched."""
    return _versions.get(path) or current_version(path)


_versions: dict[str, Version] = {}  # URL -> version of files that were read


class RemoteEntry(NamedTuple):
    """Entry of a folder in a bucket, as `os.DirEntry` of one on a disk."""

    path: str
    name: str
    is_folder: bool


# URL of a folder that was listed -> name -> entry.
listed: dict[str, dict[str, RemoteEntry]] = {}


def list_folders(root: str) -> None:
    """Add all folders below a URL to `listed`."""
    for file in matches(root):
        path, is_folder = file, False
        while path.startswith(f"{root}/"):
            folder, _, name = path.rpartition("/")
            entry = RemoteEntry(path, name, is_folder)
            if listed.setdefault(folder, {}).setdefault(name, entry) is not entry:
                break
            path, is_folder = folder, True


def forget_versions() -> None:
    """Forget versions and lists of remote files, which may have changed."""
    _versions.clear()
    listed.clear()


def expand(pattern: str) -> list[str]:
    """Return the files that match a pattern with `*`, `?`, `{a,b}` or `{000..146}`."""
    paths = []
    for one in [pattern] if os.path.exists(pattern) else expand_braces(pattern):
        if is_url(one):
            name = without_query(one).partition("://")[2].partition("/")[2]
            matches = sorted(_list(one)) if re.search(r"[*?\[]", name) else [one]
        else:
            matches = [one] if os.path.exists(one) else sorted(glob.glob(one))
        if not matches:
            raise DataError(f"{printable(one)}: no such file")
        paths += matches
    [(path, count)] = collections.Counter(paths).most_common(1)
    if count > 1:
        raise DataError(f"{printable(pattern)}: names {printable(path)} twice")
    return paths


def matches(folder: str, pattern: str = "**") -> list[str]:
    """Return the sorted files in a folder that match a pattern, by default all."""
    if is_url(folder):
        return sorted(_list(f"{folder.rstrip('/')}/{pattern}"))
    paths = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(path for path in paths if not os.path.isdir(path))


def expand_braces(pattern: str) -> list[str]:
    """Expand `x{a,b}` to xa and xb, and `{08..10}` to 08, 09 and 10."""
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


class _OpenFile:
    """A local file that is closed when nobody reads it anymore."""

    def __init__(self, path, version=None):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.checked = None  # size and time when its version was last compared

    def __del__(self, close=os.close):
        if hasattr(self, "number"):
            close(self.number)


# Opening a file for each image takes as long as decoding a small one.
_kept_open = functools.lru_cache(MAX_OPEN)(_OpenFile)


def _pread(path, offset, length, version=None):
    if version is None:
        file = _OpenFile(path)
    else:
        file = _kept_open(path, version)
        status = os.fstat(file.number)
        if not status.st_nlink:  # deleted or replaced
            file = _OpenFile(path)
            status = os.fstat(file.number)
        if file.checked != (status.st_size, status.st_mtime_ns):
            version.require(path, Version.of(status))
            file.checked = status.st_size, status.st_mtime_ns
    return os.pread(file.number, length, offset)


class _RemoteFile(io.RawIOBase):
    def __init__(self, path, version):
        self._path, self._place, self._version = path, 0, version

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self._place = offset + (0, self._place, self._version.size)[whence]
        return self._place

    def readinto(self, buffer):
        length = max(0, min(len(buffer), self._version.size - self._place))
        content = read_range(self._path, self._place, length, self._version)
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


def _retry(path, request, *arguments):
    """Return `request(path, *arguments)`, repeated after transient errors."""
    pauses = iter(PAUSES)
    while True:
        try:
            return request(path, *arguments)
        except Exception as error:  # libraries of buckets raise any class
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if isinstance(error, TowersError) or not is_url(path):
                if getattr(error, "errno", None) not in TRANSIENT:
                    raise
            elif final := _final(path, error):
                raise final from error
            pause = next(pauses, None)
            if pause is None:
                why = getattr(error, "strerror", None) or one_line(error, 150)
                why = f"cannot be {'fetched' if is_url(path) else 'read'}: {why}"
                why = f"{printable(path)}: {why}; the same command may succeed later"
                raise UnavailableDataError(why) from error
        time.sleep(pause)


def _final(path, error):
    """Return the error to raise if a repeated request would fail too, else None."""
    code, cause = getattr(error, "code", None), getattr(error, "reason", error)
    code = code if isinstance(code, int) else 0
    why = f"cannot be fetched: {one_line(error, 150)}"
    if code in (404, 410) or isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, why, path)
    if code in (401, 403) or isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, why, path)
    is_unknown = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME
    is_refused = 400 <= code < 500 and code not in (408, 425, 429)
    # An invalid certificate is a ValueError.
    is_wrong = isinstance(cause, TypeError | ValueError | http.client.InvalidURL)
    is_final = is_unknown or is_refused or is_wrong
    return DataError(f"{printable(path)}: {why}") if is_final else None


def _fetch(path, version, begin, end):
    if not is_web(path):
        content = _bucket(path).cat_file(path, start=begin, end=end)
        version.require(path, _version_now(path))
    else:
        is_whole = (begin, end) == (0, version.size)
        ranges = {} if is_whole else {"Range": f"bytes={begin}-{end - 1}"}
        with _open_url(path, ranges) as answer:
            if ranges and answer.status != 206:
                raise DataError(f"{printable(path)}: the server does not serve ranges")
            version.require(path, _version_in(answer, version))
            content = answer.read()
    if len(content) != end - begin:
        raise OSError(errno.EIO, f"{len(content)} of {end - begin} bytes came", path)
    return content


def _version_now(path):
    if not is_url(path):
        return Version.of(os.stat(path))
    if not is_web(path):
        about = _bucket(path).info(path, refresh=True)
        return Version(int(about["size"]), str(about))  # as in fsspec's `ukey`
    # Not HEAD: a URL may be signed for GET alone, and some servers refuse HEAD.
    for headers in ({"Range": "bytes=0-0"}, {}):
        with _open_url(path, headers) as answer:
            version = _version_in(answer)
            if version.size < 0 and answer.status != 206:
                version = version._replace(size=len(answer.read()))
        if version.size >= 0:
            break
    return version


def _version_in(answer, expected=None):
    """Return the version in a response; `expected` fills in what it lacks."""
    known, names = Version(-1, ""), ("ETag", "Last-Modified")
    if expected is not None:
        known, names = expected, (expected.tag.partition(" ")[0],)
    header = "Content-Range" if answer.status == 206 else "Content-Length"
    size = answer.headers.get(header, "").rpartition("/")[2]
    name = next((name for name in names if answer.headers.get(name)), None)
    tag = f"{name} {answer.headers[name].removeprefix('W/')}" if name else known.tag
    return Version(int(size) if size.isdigit() else known.size, tag)


def _open_url(path, headers):
    parts = urllib.parse.urlsplit(path)
    account, _, host = parts.netloc.rpartition("@")
    # Spaces and letters that are not ASCII are encoded.
    url = urllib.parse.quote(parts._replace(netloc=host).geturl(), string.punctuation)
    request = urllib.request.Request(url, headers=headers)  # noqa: S310, http or https
    if account:
        text = base64.b64encode(urllib.parse.unquote_to_bytes(account)).decode()
        request.add_unredirected_header("Authorization", f"Basic {text}")
    return urllib.request.urlopen(request, timeout=TIMEOUT_SECS)  # noqa: S310


def _list(pattern):
    scheme = pattern.split(":")[0]
    if is_web(pattern):
        way = "name them, such as https://HOST/train-{000..146}.tar"
        raise DataError(f"{printable(pattern)}: a web server lists no files; {way}")
    bucket = _bucket(pattern)
    try:
        entries = bucket.glob(pattern, detail=True)
    except Exception as error:
        raise DataError(f"{printable(pattern)}: {one_line(error, 150)}") from error
    names = [name for name, about in entries.items() if about["type"] == "file"]
    root = "/" if scheme == "file" else ""
    return [f"{scheme}://{root}{name.lstrip('/')}" for name in names]


def _bucket(path):
    import fsspec

    scheme = path.split(":")[0].lower()
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        package = PACKAGES.get(scheme)
        hint = f"pip install {package}" if package else one_line(error, 100)
        why = f"{scheme}:// cannot be read here; {hint}"
        raise DataError(f"{printable(path)}: {why}") from None


def _read_block(path, version, begin, first, last):
    end = min(begin + BLOCK_BYTES, version.size)
    first, last = max(first, begin), min(last, end)
    for _ in range(5):
        place = _cached(path, version, begin, end)
        with contextlib.suppress(FileNotFoundError):  # deleted by another process
            content = _retry(place, _pread, first - begin, last - first)
            if len(content) == last - first:
                return content
    why = "files are deleted before they are read"
    raise UnavailableDataError(f"{byte_cache.folder()}: {why}")


def _cached(path, version, begin, end):
    """Return the path of a copy of some bytes of a remote file."""
    key = f"{path} {version.size} {version.tag} {begin} {end}"
    firsts = range(begin, end, BLOCK_BYTES)
    spans = ((first, min(first + BLOCK_BYTES, end)) for first in firsts)
    contents = (_retry(path, _fetch, version, *span) for span in spans)
    return byte_cache.cached(path, key, end - begin, contents)
