"""Read bytes of files that are on this machine, on a web server or in a bucket.

What is read of URLs is kept in the folder of `cache_folder`: at most TOWERS_CACHE_GB
gigabytes (20 by default) of what was used last. http and https are read with `urllib`,
as fsspec does not compare their versions; other schemes with fsspec, which needs a
package for each, see PACKAGES.
"""

import base64
import collections
import contextlib
import errno
import glob
import hashlib
import http.client
import io
import os
import re
import socket
import stat
import string
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
import zlib
from typing import BinaryIO, NamedTuple, Self

from towers.errors import ConfigError, DataError, TowersError, UnavailableDataError
from towers.messages import one_line, printable

BLOCK_BYTES = 4 * 2**20
# Bytes that an image file may have for each pixel, as of four channels of 16 bits, and
# for everything else, such as a profile of colors.
PIXEL_BYTES = 8
OTHER_BYTES = 64_000_000
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "hf": "huggingface_hub"}
# How a file begins that only names what Git LFS has stored elsewhere.
LFS = b"version https://git-lfs.github.com/"
LFS_HINT = "is a pointer of Git LFS and not the file itself: run git lfs pull"
# A request is repeated after pauses, in seconds.
PAUSES = (0.2, 1.0, 4.0)
TIMEOUT_SECS = 30.0
# Faults of a disk, of a machine or of a network, which may be over later.
TRANSIENT = (
    *(errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.EAGAIN, errno.EBUSY, errno.ENXIO, errno.ENODEV, errno.ENOTCONN),
)


class Version(NamedTuple):
    """What tells a file from the one that replaces it: the size in bytes; the time of
    its last change, or ETag, Last-Modified or the like; of a local file its inode, and
    when that changed, in ns.
    """

    size: int
    tag: str
    inode: int = 0
    changed: int = 0

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the version of a local file."""
        time_ns = str(status.st_mtime_ns)
        return cls(status.st_size, time_ns, status.st_ino, status.st_ctime_ns)

    def require(self, path: str, found: Self) -> None:
        """Raise DataError if a file is not the one that was indexed. Some file systems
        in user space give a file another inode when it is opened again.
        """
        is_same = self.inode == found.inode or self.changed == found.changed
        if self[:2] != found[:2] or not is_same:
            raise DataError(
                f"{printable(path)}: was replaced or changed after this program had "
                "indexed it; start again to read it as it is now"
            )


def is_url(path: str | os.PathLike) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", os.fsdecode(path)) is not None


def is_web(path: str) -> bool:
    """True if a path is a URL of a web server."""
    return re.match("https?://", path, re.IGNORECASE) is not None


def without_query(path: str) -> str:
    """Return a URL of a web server without what follows its path; others as they are.
    The path of a signed URL is followed by `?` and its signature.
    """
    return re.split(r"[?#]", path)[0] if is_web(path) else path


def open_data_file(path: str, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file, or a link to one; OSError if it cannot be opened, is another
    thing, or has more bytes than `most_bytes`.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a file", path)
    if most_bytes is not None and status.st_size > most_bytes:
        message = f"has {status.st_size:,} bytes, and at most {most_bytes:,} are read"
        raise OSError(errno.EFBIG, message, path)
    return open(path, "rb")


def read_data_file(path: str, most_bytes: int) -> bytes:
    """Read a regular file; OSError as of `open_data_file`."""
    with open_data_file(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_range(
    path: str, offset: int, length: int, version: Version | None = None
) -> bytes:
    """Read some bytes of a file that has this version.

    OSError if it cannot be read, ValueError if it ends before, DataError if it has
    another version, UnavailableDataError if a disk or a server does not answer.
    """
    if not is_url(path):
        content = _retry(path, _pread, offset, length, version)
    else:
        version = version or known_version(path)
        end = min(offset + length, version.size)
        blocks = range(offset - offset % BLOCK_BYTES, end, BLOCK_BYTES)
        content = b"".join(
            _read_block(path, version, begin, offset, end) for begin in blocks
        )
    if len(content) < length:
        raise ValueError(f"the file ends {length - len(content):,} bytes too early")
    return content


def read_image_file(path: str, max_pixels: int) -> bytes:
    """Read an image file that may have as many pixels as are decoded; ValueError if it
    is larger than such a file, other errors as of `read_range`.
    """
    most_bytes = PIXEL_BYTES * max_pixels + OTHER_BYTES
    num_bytes = known_version(path).size
    if num_bytes > most_bytes:
        raise ValueError(
            f"has {num_bytes:,} bytes, and at most {most_bytes:,} are read with "
            f"max_image_pixels={max_pixels}; shrink it, or raise --max_image_pixels"
        )
    if is_url(path):
        return read_range(path, 0, num_bytes)
    with open_file(path) as file:
        return _retry(path, lambda _: file.read())


def open_file(path: str, version: Version | None = None) -> BinaryIO:
    """Open a file for reading, with `seek`; errors as of `read_range`."""
    if is_url(path):
        file = _RemoteFile(path, version or current_version(path))
        return io.BufferedReader(file, BLOCK_BYTES)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_retry(path, open_data_file))
        if version is not None:
            version.require(path, Version.of(os.fstat(file.fileno())))
        stack.pop_all()
    return file


def local_copy(path: str) -> str:
    """Return the path, or for a URL that of a copy in the cache; errors as of
    `read_range`.
    """
    if not is_url(path):
        return path
    version = current_version(path)
    return _cached(path, version, 0, version.size)


def current_version(path: str) -> Version:
    """Return the version that a file has now."""
    version = _retry(path, _version_now)
    if is_url(path):
        _versions[path] = version
    return version


def known_version(path: str) -> Version:
    """Return the version of a file, of a remote one as it was asked for last."""
    return _versions.get(path) or current_version(path)


# URL -> version, of images that are read one by one.
_versions: dict[str, Version] = {}
# Another data set that is loaded asks for all versions anew.
forget_versions = _versions.clear


def expand(pattern: str) -> list[str]:
    """Return the files of a pattern with `*`, `?` and `{a,b}` or `{000..146}`, sorted
    within each alternative of the braces; DataError if there are none, or one twice. A
    file on this machine, or what follows the path in a URL, may look like a pattern.
    """
    paths = []
    for one in [pattern] if os.path.exists(pattern) else expand_braces(pattern):
        if is_url(one):
            name = without_query(one).partition("://")[2].partition("/")[2]
            matches = sorted(_list(one)) if re.search(r"[*?\[]", name) else [one]
        else:
            matches = [one] if os.path.exists(one) else sorted(glob.glob(one))
        if not matches:
            raise DataError(f"{printable(one)}: there is no such file")
        paths += matches
    [(path, count)] = collections.Counter(paths).most_common(1)
    if count > 1:
        raise DataError(f"{printable(pattern)}: names {printable(path)} twice")
    return paths


def matches(folder: str, pattern: str = "**") -> list[str]:
    """Return the files of a pattern in a folder, sorted; all in it and below it by
    default. DataError if it cannot be listed.
    """
    if is_url(folder):
        return sorted(_list(f"{folder.rstrip('/')}/{pattern}"))
    paths = glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    return sorted(path for path in paths if not os.path.isdir(path))


def expand_braces(pattern: str) -> list[str]:
    """Return `x{a,b}` as xa and xb, `{08..10}` as 08, 09 and 10."""
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


def _pread(path, offset, length, version=None):
    # Keeping files open would save 3 microseconds of the 150 that an image takes.
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if version is not None:
            version.require(path, Version.of(os.fstat(number)))
        return os.pread(number, length, offset)
    finally:
        os.close(number)


def open_lock_file(path: str) -> BinaryIO:
    """Open a regular file to lock, made if it is missing, and never written to; OSError
    if it is a link or another thing.
    """
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a file", path)
    return open(path, "ab")


# Requests.


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
    """Return `request(path, *arguments)`, repeated after errors that may be over later.
    UnavailableDataError if they are not.
    """
    for pause in (*PAUSES, None):
        try:
            return request(path, *arguments)
        except Exception as error:  # of any class, by the library of a bucket
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if isinstance(error, TowersError) or not is_url(path):
                if getattr(error, "errno", None) not in TRANSIENT:
                    raise
            elif final := _final(path, error):
                raise final from error
            if pause is None:
                why = getattr(error, "strerror", None) or one_line(error, 150)
                what = "fetched" if is_url(path) else "read"
                raise UnavailableDataError(
                    f"{printable(path)}: cannot be {what}: {why}; the same command "
                    "may succeed later"
                ) from error
        time.sleep(pause)


def _final(path, error):
    """Return the error to raise if another request would fail alike; else None."""
    code, cause = getattr(error, "code", None), getattr(error, "reason", error)
    code = code if isinstance(code, int) else 0
    why = f"cannot be fetched: {one_line(error, 150)}"
    if code in (404, 410) or isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, why, path)
    if code in (401, 403) or isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, why, path)
    is_unknown = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME
    is_refused = 400 <= code < 500 and code not in (408, 425, 429)
    # A certificate that is not valid is a ValueError.
    is_wrong = isinstance(cause, TypeError | ValueError | http.client.InvalidURL)
    if is_unknown or is_refused or is_wrong:
        return DataError(f"{printable(path)}: {why}")
    return None


def _fetch(path, version, begin, end):
    """Return some bytes of a remote file; DataError if it has another version."""
    if not is_web(path):
        content = _bucket(path).cat_file(path, start=begin, end=end)
        version.require(path, _version_now(path))
    else:
        is_whole = (begin, end) == (0, version.size)
        ranges = {} if is_whole else {"Range": f"bytes={begin}-{end - 1}"}
        with _open_url(path, headers=ranges) as answer:
            if ranges and answer.status != 206:
                raise DataError(
                    f"{printable(path)}: the server gives no ranges of files"
                )
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
    try:
        with _open_url(path, method="HEAD") as answer:
            version = _version_in(answer)
        if version.size >= 0:
            return version
    except urllib.error.HTTPError as error:
        if error.code not in (400, 403, 405, 501):  # a URL may be signed for GET alone
            raise
    with _open_url(path, headers={"Range": "bytes=0-0"}) as answer:
        version = _version_in(answer)
        if version.size < 0:
            version = version._replace(size=len(answer.read()))
    return version


def _version_in(answer, expected=None):
    """Return the version in an answer of a web server. What the answer does not tell is
    taken from the expected version.
    """
    known, names = Version(-1, ""), ("ETag", "Last-Modified")
    if expected is not None:
        known, names = expected, (expected.tag.partition(" ")[0],)
    header = "Content-Range" if answer.status == 206 else "Content-Length"
    size = answer.headers.get(header, "").rpartition("/")[2]
    name = next((name for name in names if answer.headers.get(name)), None)
    tag = f"{name} {answer.headers[name].removeprefix('W/')}" if name else known.tag
    return Version(int(size) if size.isdigit() else known.size, tag)


def _open_url(path, **options):
    parts = urllib.parse.urlsplit(path)
    account, _, host = parts.netloc.rpartition("@")
    # Spaces and letters that are not ASCII are encoded.
    url = urllib.parse.quote(parts._replace(netloc=host).geturl(), string.punctuation)
    request = urllib.request.Request(url, **options)  # noqa: S310, http or https
    if account:
        text = base64.b64encode(urllib.parse.unquote_to_bytes(account)).decode()
        request.add_unredirected_header("Authorization", f"Basic {text}")
    return urllib.request.urlopen(request, timeout=TIMEOUT_SECS)  # noqa: S310


def _list(pattern):
    scheme = pattern.split(":")[0]
    if is_web(pattern):
        raise DataError(
            f"{printable(pattern)}: a web server lists no files; name them, such as "
            "https://HOST/train-{000..146}.tar"
        )
    bucket = _bucket(pattern)
    try:
        found = bucket.glob(pattern, detail=True)
    except Exception as error:
        raise DataError(f"{printable(pattern)}: {one_line(error, 150)}") from error
    names = [name for name, about in found.items() if about["type"] == "file"]
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
        raise DataError(
            f"{printable(path)}: {scheme}:// cannot be read here; {hint}"
        ) from None


# The cache on the disk.


def cache_folder() -> str:
    """Return TOWERS_CACHE_DIR, or `towers` in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TOWERS_CACHE_DIR") or os.path.join(home, "towers")


def _cache_bytes():
    text = os.environ.get("TOWERS_CACHE_GB", "20")
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text) * 1e9
    raise ConfigError(f"TOWERS_CACHE_GB={text}: should be a number of gigabytes")


# Bytes are fetched by one thread; the others that need them wait.
_fetching = [threading.Lock() for _ in range(256)]
_guard = threading.Lock()
# Name in the cache without the checksum -> path, and what changes if it is written to.
_checked: dict[str, tuple[str, int, int, int]] = {}


def _read_block(path, version, begin, first, last):
    """Return the bytes from `first` to `last`, as far as they are in a block."""
    end = min(begin + BLOCK_BYTES, version.size)
    first, last = max(first, begin), min(last, end)
    for _ in range(5):
        place = _cached(path, version, begin, end)
        with contextlib.suppress(FileNotFoundError):  # deleted by another process
            content = _retry(place, _pread, first - begin, last - first)
            if len(content) == last - first:
                return content
    raise UnavailableDataError(
        f"{cache_folder()}: files are deleted before they are read"
    )


def _cached(path: str, version: Version, begin: int, end: int) -> str:
    """Return the path of a file with the bytes from `begin` to `end` of a remote file,
    which are fetched once. Its name ends with their checksum.
    """
    key = f"{path} {version.size} {version.tag} {begin} {end}"
    name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    prefix = os.path.join(cache_folder(), "remote", name[:2], name)
    if place := _intact(prefix, end - begin):
        return place
    with _fetching[hash(prefix) % len(_fetching)]:
        if place := _intact(prefix, end - begin):
            return place
        most = _cache_bytes()
        # Several machines may share the folder: process numbers are not enough.
        temporary, checksum = f"{prefix}.{uuid.uuid4().hex}.partial", 0
        ending = os.path.splitext(without_query(path))[1][:12]
        try:
            os.makedirs(os.path.dirname(prefix), exist_ok=True)
            with open(temporary, "wb") as file:
                for first in range(begin, end, BLOCK_BYTES):
                    last = min(first + BLOCK_BYTES, end)
                    content = _retry(path, _fetch, version, first, last)
                    checksum = zlib.crc32(content, checksum)
                    file.write(content)
            place = f"{prefix}-{checksum:08x}{ending}"
            os.replace(temporary, place)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            if not isinstance(error, OSError) or error.filename == path:
                raise
            raise DataError(
                f"{cache_folder()}: remote files cannot be kept there: "
                f"{error.strerror}; TOWERS_CACHE_DIR names another folder"
            ) from error
        _shrink(place, end - begin, most)
    return place


def _intact(prefix, num_bytes):
    """Return the path of a file in the cache with its length and checksum, or None. The
    checksum is computed again only if the file was changed since.
    """
    known = _checked.get(prefix)
    for path in [known[0]] if known else glob.glob(f"{glob.escape(prefix)}-*"):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            about = path, status.st_ino, status.st_size, status.st_mtime_ns
            if known == about or _has_checksum(path, prefix, num_bytes):
                _checked[prefix] = about
                with contextlib.suppress(OSError):  # it was used now
                    os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
                return path
            os.remove(path)
    _checked.pop(prefix, None)
    return None


def _has_checksum(path, prefix, num_bytes):
    checksum = 0
    with open_data_file(path) as file:
        while content := file.read(BLOCK_BYTES):
            checksum, num_bytes = (
                zlib.crc32(content, checksum),
                num_bytes - len(content),
            )
    return not num_bytes and path.startswith(f"{prefix}-{checksum:08x}")


_written = [float("inf")]  # bytes since the folder was last measured


def _shrink(kept, num_bytes, most):
    """Delete the files used longest ago if there are more bytes than may be; look only
    after every twentieth of them.
    """
    with _guard:
        _written[0] += num_bytes
        if _written[0] < most / 20:
            return
        _written[0] = 0
    files, root = [], os.path.join(glob.escape(cache_folder()), "remote")
    for path in glob.glob(os.path.join(root, "**"), recursive=True):
        with contextlib.suppress(FileNotFoundError):  # it got its name, or is gone
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                files.append((status.st_atime, status.st_size, path))
    excess = sum(size for _, size, _ in files) - 0.95 * most
    for _, num_bytes, path in sorted(files):
        if excess <= 0:
            break
        if path == kept:
            continue
        with contextlib.suppress(OSError):
            os.remove(path)
        excess -= num_bytes
