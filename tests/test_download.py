"""Downloads, from a server on this machine."""

import contextlib
import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from prepared_sets import all_of, features, message, random_examples
from test_launch import is_running

from towers.data import download, tfds


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_PROXY".upper(), raising=False)


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with `answer(request)`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Request)
        self.answer = lambda request: None
        self.requests = []
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=[0.05], daemon=True).start()


class Request(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        self.server.answer(self)

    do_CONNECT = do_GET

    def log_message(self, *args):
        pass

    def send(self, content, status=200, length=None):
        self.send_response(status)
        self.send_header("Content-Length", len(content) if length is None else length)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def over():
    """An event to wait for, set when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_reachable(server):
    server.answer = lambda request: request.send(b"x")
    assert download.unreachable(f"http://127.0.0.1:{server.port}/x") is None


def test_address_that_answers_with_an_error(server):
    server.answer = lambda request: request.send(b"", 404)
    url = f"http://127.0.0.1:{server.port}/x"
    assert download.unreachable(url) == f"{url} answers 404 Not Found"


def test_host_that_takes_the_call_and_is_silent(server, over, monkeypatch):
    monkeypatch.setattr(download, "ANSWER_SECS", 0.3)
    server.answer = lambda request: over.wait(60)
    start = time.monotonic()
    reason = download.unreachable(f"http://127.0.0.1:{server.port}/x")
    assert reason.startswith("127.0.0.1 cannot be reached (")
    assert time.monotonic() - start < 2


def test_proxy_is_asked_in_place_of_the_host(server, monkeypatch):
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{server.port}")
    server.answer = lambda request: request.send(b"", 403)
    reason = download.unreachable("https://host.invalid/x")
    assert reason.startswith("host.invalid cannot be reached (") and "403" in reason
    assert server.requests == ["host.invalid:443"]


def test_host_that_needs_no_proxy_is_asked_itself(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.answer = lambda request: request.send(b"x")
    assert download.unreachable(f"http://127.0.0.1:{server.port}/x") is None


CONTENT = random_examples(3, 0)[0]["image"].tobytes()


@pytest.fixture
def one_image(tmp_path, server, monkeypatch):
    """A data set `one_image` whose only file lies on the server."""
    import requests
    import tensorflow_datasets
    from tensorflow_datasets.core import registered
    from tensorflow_datasets.core.download import checksums, downloader

    address = f"http://127.0.0.1:{server.port}/image.bin"

    class OneImage(tensorflow_datasets.core.GeneratorBasedBuilder):
        VERSION = tensorflow_datasets.core.Version("1.0.0")
        pkg_dir_path = tmp_path  # TFDS looks there for more about the data set.
        url_infos = {
            address: checksums.UrlInfo(
                size=tensorflow_datasets.core.utils.Size(len(CONTENT)),
                checksum=hashlib.sha256(CONTENT).hexdigest(),
                filename="image.bin",
            )
        }

        def _info(self):
            return tensorflow_datasets.core.DatasetInfo(
                builder=self, features=features(id=None)
            )

        def _split_generators(self, dl_manager):
            path = dl_manager.download(address)
            return {split: self._generate_examples(path) for split in ("train", "test")}

        def _generate_examples(self, path):
            image = np.frombuffer(path.read_bytes(), np.uint8).reshape(8, 6, 3)
            yield 0, {"image": image, "label": 2}

    # What `prepare` changes in its own process is put back in this one.
    monkeypatch.setattr(
        requests.adapters.HTTPAdapter, "send", requests.adapters.HTTPAdapter.send
    )
    monkeypatch.setattr(downloader, "MAX_RETRIES", downloader.MAX_RETRIES)
    yield "one_image"
    del registered._DATASET_REGISTRY["one_image"]


def test_prepare_downloads_and_prepares(tmp_path, server, one_image):
    server.answer = lambda request: request.send(CONTENT)
    download.prepare(one_image, str(tmp_path))
    data_set = tfds.read_prepared(tfds.find_prepared(one_image, str(tmp_path)))
    images, labels = all_of(data_set.test)
    assert images.tobytes() == CONTENT and labels.tolist() == [2]


def test_row_20_wrong_sum_then_a_clean_second_try(tmp_path, server, one_image):
    wrong = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    server.answer = lambda request: request.send(wrong)
    with pytest.raises(SystemExit) as caught:
        download.prepare(one_image, str(tmp_path))
    text = str(caught.value)
    assert "\n" not in text and "checksum" in text
    assert hashlib.sha256(CONTENT).hexdigest() in text
    assert hashlib.sha256(wrong).hexdigest() in text
    assert tfds.find_prepared(one_image, str(tmp_path)) is None

    server.answer = lambda request: request.send(CONTENT)
    download.prepare(one_image, str(tmp_path))
    assert tfds.find_prepared(one_image, str(tmp_path))


def test_row_20_partial_download(tmp_path, server, one_image):
    server.answer = lambda request: request.send(CONTENT[:50], length=len(CONTENT))
    with pytest.raises(SystemExit, match="50 bytes read, 94 more expected"):
        download.prepare(one_image, str(tmp_path))
    assert tfds.find_prepared(one_image, str(tmp_path)) is None


def test_download_that_stands_still_ends(
    tmp_path, server, one_image, over, monkeypatch
):
    def stall(request):
        request.send(CONTENT[:50], length=len(CONTENT))
        over.wait(60)

    server.answer = stall
    monkeypatch.setattr(download, "STALL_SECS", 0.2)
    start = time.monotonic()
    with pytest.raises(SystemExit, match="[Tt]imed out"):
        download.prepare(one_image, str(tmp_path))
    assert time.monotonic() - start < 5


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_row_39_a_signal_ends_the_download_too(tmp_path):
    """The downloader is at its first import, of a TensorFlow that never comes."""
    (tmp_path / "tensorflow.py").write_text(
        f"import os, signal; print(os.getpid(), file=open({str(tmp_path / 'pid')!r}, "
        "'w'), flush=True); signal.pause()"
    )
    script = (
        "import sys, types; sys.modules['towers.data.tfds'] = types.SimpleNamespace("
        "find_prepared=None); from towers.run.signals import exit_on_signals\n"
        "from towers.data import download\n"
        "exit_on_signals(); download.download('cifar10', '.')"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.terminate()
    assert process.wait() == 75
    pid = int((tmp_path / "pid").read_text())
    try:
        wait_for(lambda: not is_running(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition):
    patience = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.01)


def test_failed_download_is_one_line(tmp_path, server, monkeypatch, capfd):
    server.answer = lambda request: request.send(b"", 403)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.port}")
    text = message(download.download, "cifar10", str(tmp_path))
    assert text.startswith(
        f"tensorflow-datasets could not download cifar10 to {tmp_path}: "
    )
    assert "www.cs.toronto.edu" in text and "403" in text
    assert capfd.readouterr() == (
        f"tensorflow-datasets downloads cifar10 to {tmp_path} ...\n",
        "",
    )
