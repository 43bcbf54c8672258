"""Downloads by tensorflow-datasets (TFDS) in a separate process, with time limits."""

import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from towers.data.tfds import find_prepared
from towers.errors import DataError, one_line
from towers.output import say

# A missing network is reported within 2 s; over a slow network or proxy a first answer
# may take longer.
CONNECT_SECS = 1.2
ANSWER_SECS = 20.0
# The longest pause in a download. TFDS itself would wait for ever.
STALL_SECS = 30.0

DEFAULT_PORTS = {"https": 443, "socks5": 1080, "socks5h": 1080, "socks4": 1080}


def unreachable(url: str) -> str | None:
    """The reason why `url` cannot be fetched, or None where it answers.

    The request is made as TFDS would make it, with the same library, through the same
    proxy. Without a network the answer comes within CONNECT_SECS, else within
    ANSWER_SECS.
    """
    import requests

    host = urlsplit(url).hostname
    try:
        _within(CONNECT_SECS, lambda: _connect(url))
        response = _within(
            ANSWER_SECS, lambda: requests.get(url, stream=True, timeout=ANSWER_SECS)
        )
    except Exception as error:  # Whatever it is, nothing can be fetched.
        return f"{host} cannot be reached ({one_line(error)})"
    response.close()
    if response.status_code != 200:
        return f"{url} answers {response.status_code} {response.reason}"
    return None


def _connect(url: str) -> None:
    """Opens and closes a connection to the proxy for `url`, or to its host."""
    import requests

    proxies = requests.utils.get_environ_proxies(url)
    proxy = requests.utils.select_proxy(url, proxies)
    first = urlsplit(url if not proxy else proxy if "//" in proxy else f"//{proxy}")
    port = first.port or DEFAULT_PORTS.get(first.scheme, 80)
    try:
        socket.create_connection((first.hostname, port), CONNECT_SECS).close()
    except OSError as error:
        if not proxy:
            raise
        raise OSError(f"proxy {first.hostname}:{port}: {error}") from error


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """`function()`, or TimeoutError; a look-up of a name has no time limit.

    A thread that hangs is abandoned; as a daemon it does not delay the exit.
    """
    results = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((function(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result


def download(name: str, data_dir: str) -> str:
    """Has TFDS download `name` and prepare it in `data_dir`, in a process of its own.

    There it touches no GPU, its output can be suppressed, and it can be stopped at any
    time: on Linux it does not outlive this process.

    Returns:
        The prepared folder.

    Raises:
        DataError: it failed, for whatever reason.
    """
    say(f"tensorflow-datasets downloads {name} to {data_dir} ...")
    # Without a terminal or a GPU, but with the modules that this process sees.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    script = (
        f"from towers import errors; errors.end_with_parent({os.getpid()}); "
        "import sys; from towers.data import download; download.prepare(*sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, name, data_dir],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    folder = find_prepared(name, data_dir)
    if done.returncode or not folder:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DataError(
            f"tensorflow-datasets could not download {name} to {data_dir}: {said[-1]}"
        )
    return folder


def prepare(name: str, data_dir: str) -> None:
    """The main function of the process of `download`; one line and exit 1 on
    failure."""
    import requests
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import downloader

    # TFDS sets no time limit and tries eleven times, for minutes.
    send = requests.adapters.HTTPAdapter.send

    def send_in_time(self, request, **options):
        options["timeout"] = options.get("timeout") or STALL_SECS
        return send(self, request, **options)

    requests.adapters.HTTPAdapter.send = send_in_time
    downloader.MAX_RETRIES = 2
    tfds.disable_progress_bar()
    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(
                force_checksums_validation=True, try_download_gcs=False
            )
        )
    except Exception as error:
        sys.exit(_wrong_checksum(str(error)) or one_line(error))


def _wrong_checksum(message):
    """TFDS's message about a wrong checksum in fewer words; None for any other."""
    url = re.search(r"Artifact (\S+), downloaded", message)
    sums = re.findall(r"checksum='(\w+)'", message)
    if not url or len(sums) != 2:
        return None
    where = one_line(url[1], 100)
    return f"wrong checksum of {where}: expected {sums[0]}, found {sums[1]}"
