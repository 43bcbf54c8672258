"""Downloads of one file, with a check of its content and limits of time."""

import contextlib
import hashlib
import http.client
import pathlib
import queue
import shutil
import socket
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from towers import console, store
from towers.errors import DataError
from towers.messages import one_line

# A missing network is reported within 2 s.
CONNECT_SECS = 1.2
# The longest pause in a download.
STALL_SECS = 30.0


def unreachable(url: str) -> str | None:
    """The reason why the host of an address, or the proxy for it, cannot be reached
    within CONNECT_SECS; None where it can.
    """
    host = urlsplit(url).hostname
    errors = queue.SimpleQueue()

    def connect():
        try:
            _connect(url)
            errors.put(None)
        except Exception as error:  # Whatever it is, nothing can be fetched.
            errors.put(error)

    # In a thread, as a look-up of a name has no time limit. It does not delay the exit.
    threading.Thread(target=connect, daemon=True).start()
    try:
        error = errors.get(timeout=CONNECT_SECS)
    except queue.Empty:
        error = f"no answer within {CONNECT_SECS:g} s"
    return f"{host} cannot be reached ({one_line(error)})" if error else None


def _connect(url):
    address = urlsplit(url)
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy and not urllib.request.proxy_bypass(address.netloc):
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), CONNECT_SECS).close()
    except OSError as error:
        if address.hostname == urlsplit(url).hostname:
            raise
        raise OSError(f"proxy {address.hostname}:{port}: {error}") from error


@contextlib.contextmanager
def _with_bar(response):
    """The content of a response, with a progress bar on a terminal."""
    if not console.is_terminal():
        yield response
        return
    from rich.progress import wrap_file  # takes a while

    size = response.length or None
    with wrap_file(response, size, description="downloading", transient=True) as file:
        yield file


def fetch(url: str, sha256: str, path: str) -> None:
    """Downloads one file; it gets its name when it is whole and its checksum right.
    DataError where it cannot be fetched or is another, OSError where it cannot be
    written.
    """
    partial = pathlib.Path(f"{path}.partial")
    console.line(f"downloading {url} to {path} ...")
    try:
        with open(partial, "w+b") as file:
            try:
                with urllib.request.urlopen(url, timeout=STALL_SECS) as response:  # noqa: S310
                    with _with_bar(response) as content:
                        shutil.copyfileobj(content, file)
                if response.length:
                    raise OSError(f"it ends {response.length:,} bytes too early")
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                reason = f"{url} was not downloaded: {one_line(error, 200)}"
                raise DataError(reason) from error
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            raise DataError(f"{url}: expected sha256 {sha256}, got {digest}")
        store.replace(partial, pathlib.Path(path))
    finally:
        partial.unlink(missing_ok=True)
