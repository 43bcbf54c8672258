"""Data sets prepared by tensorflow-datasets: found, read, downloaded."""

import hashlib
import http.server
import json
import os
import socket
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from towers.data import tfds
from towers.errors import DataError

CLASSES = ["circle", "square", "star"]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_PROXY".upper(), raising=False)


def features(**changes):
    from tensorflow_datasets import features

    parts = {
        "image": features.Image(shape=(8, 6, 3)),
        "label": features.ClassLabel(names=CLASSES),
        "id": features.Text(),
        **changes,
    }
    return features.FeaturesDict({k: v for k, v in parts.items() if v is not None})


def random_examples(num_examples, seed):
    rng = np.random.default_rng(seed)
    return [
        {
            "image": rng.integers(0, 256, (8, 6, 3)).astype(np.uint8),
            "label": int(rng.integers(3)),
            "id": f"{i:05d}",
        }
        for i in range(num_examples)
    ]


def store(data_dir, train, test=None, name="shapes", spec=None):
    """A folder that TFDS itself writes, in its own shuffled order."""
    import tensorflow_datasets

    spec = spec or features()
    splits = {"train": train} if test is None else {"train": train, "test": test}
    builder = tensorflow_datasets.dataset_builders.store_as_tfds_dataset(
        name=name,
        version="1.2.3",
        features=spec,
        split_datasets={
            split: [(i, {key: value[key] for key in spec}) for i, value in enumerate(x)]
            for split, x in splits.items()
        },
        data_dir=data_dir,
    )
    return str(builder.data_path)


def all_of(source):
    images, labels = source.read(tf.range(source.num_examples, dtype=tf.int64))
    return images.numpy(), labels.numpy()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def message(function, *arguments):
    with pytest.raises(DataError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Found.


def test_newest_whole_version_is_found(tmp_path):
    for version in ("1.9.0", "1.10.0", "2.0.0", "incomplete.X_3.0.0"):
        (tmp_path / "shapes" / version).mkdir(parents=True)
        if version != "2.0.0":
            (tmp_path / "shapes" / version / "dataset_info.json").touch()
    found = tfds.find_prepared("shapes", str(tmp_path))
    assert found == str(tmp_path / "shapes" / "1.10.0")
    assert tfds.find_prepared("others", str(tmp_path)) is None
    assert tfds.find_prepared("shapes", str(tmp_path / "none")) is None


def test_default_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "~/sets")
    assert tfds.default_dir() == os.path.expanduser("~/sets")
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert tfds.default_dir() == os.path.expanduser("~/tensorflow_datasets")


# Read.


def test_what_was_stored_is_read_in_the_order_of_the_ids(tmp_path, no_network):
    train, test = random_examples(13, 0), random_examples(5, 1)
    folder = store(tmp_path, train, test)
    assert tfds.find_prepared("shapes", str(tmp_path)) == folder
    data_set = tfds.read_prepared(folder)
    for source, stored in ((data_set.train, train), (data_set.test, test)):
        images, labels = all_of(source)
        np.testing.assert_array_equal(images, [x["image"] for x in stored])
        np.testing.assert_array_equal(labels, [x["label"] for x in stored])
    images = np.stack([x["image"] for x in train])
    np.testing.assert_allclose(data_set.mean, images.mean((0, 1, 2)))
    np.testing.assert_allclose(data_set.deviation, images.std((0, 1, 2)))
    assert data_set.name == "shapes" and data_set.class_names == tuple(CLASSES)
    assert data_set.found == f"tensorflow-datasets shapes/1.2.3 in {folder}"


def test_without_ids_everything_comes_once_and_in_the_same_order(tmp_path, no_network):
    train, test = random_examples(40, 0), random_examples(1, 1)
    folder = store(tmp_path, train, test, spec=features(id=None))
    images, labels = all_of(tfds.read_prepared(folder).train)
    again, _ = all_of(tfds.read_prepared(folder).train)
    np.testing.assert_array_equal(images, again)
    found = sorted((x.tobytes(), y) for x, y in zip(images, labels, strict=True))
    assert found == sorted((x["image"].tobytes(), x["label"]) for x in train)


def test_other_features_are_left_alone(tmp_path, no_network):
    from tensorflow_datasets import features as kinds

    examples = [{**x, "note": "x"} for x in random_examples(3, 0)]
    folder = store(tmp_path, examples, examples, spec=features(note=kinds.Text()))
    assert tfds.read_prepared(folder).train.num_examples == 3


def spoil_one_bit(folder):
    path = os.path.join(folder, "shapes-train.tfrecord-00000-of-00001")
    with open(path, "r+b") as file:
        file.seek(200)
        byte = file.read(1)[0]
        file.seek(200)
        file.write(bytes([byte ^ 1]))


def cut_file(folder):
    path = os.path.join(folder, "shapes-train.tfrecord-00000-of-00001")
    os.truncate(path, os.path.getsize(path) - 10)


def empty_file(folder):
    os.truncate(os.path.join(folder, "shapes-test.tfrecord-00000-of-00001"), 0)


def remove_file(folder):
    os.remove(os.path.join(folder, "shapes-test.tfrecord-00000-of-00001"))


def remove_features(folder):
    os.remove(os.path.join(folder, "features.json"))


def cut_info(folder):
    os.truncate(os.path.join(folder, "dataset_info.json"), 30)


def change_count(folder, count):
    path = os.path.join(folder, "dataset_info.json")
    with open(path) as file:
        info = json.load(file)
    info["splits"][0]["shardLengths"] = [count]
    info["splits"][1]["shardLengths"] = [count]
    with open(path, "w") as file:
        json.dump(info, file)


@pytest.mark.parametrize(
    "damage",
    [
        spoil_one_bit,
        cut_file,
        empty_file,
        remove_file,
        remove_features,
        cut_info,
        lambda folder: change_count(folder, "4"),
        lambda folder: change_count(folder, "6"),
    ],
)
def test_damaged_folder_is_refused(tmp_path, no_network, damage):
    folder = store(tmp_path, random_examples(5, 0), random_examples(5, 1))
    damage(folder)
    assert message(tfds.read_prepared, folder).startswith(f"{folder}: ")


def test_what_is_no_set_of_labelled_images_is_refused(tmp_path, no_network):
    from tensorflow_datasets import features as kinds

    some = random_examples(2, 0)
    wide = [{**x, "image": np.zeros((8, 6, 3), np.uint16)} for x in some]
    for name, examples, test, spec, expected in (
        ("a", some, None, features(), "has no split 'test', only train"),
        ("b", some, some, features(label=None), "no classes under 'label'"),
        ("c", some, some, features(image=None), "no images under 'image'"),
        ("d", some, some, features(label=kinds.Scalar(np.int64)), "no classes under"),
        ("e", some, some, features(image=kinds.Image()), "found uint8 [None, None, 3]"),
        (
            "f",
            wide,
            wide,
            features(image=kinds.Image(shape=(8, 6, 3), dtype=np.uint16)),
            "found uint16 [8, 6, 3]",
        ),
    ):
        folder = store(tmp_path, examples, test, name=f"set_{name}", spec=spec)
        assert expected in message(tfds.read_prepared, folder)


# Downloaded, from a server on this machine.


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
    assert tfds.unreachable(f"http://127.0.0.1:{server.port}/x") is None


def test_address_that_answers_with_an_error(server):
    server.answer = lambda request: request.send(b"", 404)
    url = f"http://127.0.0.1:{server.port}/x"
    assert tfds.unreachable(url) == f"{url} answers 404 Not Found"


def test_host_that_takes_the_call_and_is_silent(server, over, monkeypatch):
    monkeypatch.setattr(tfds, "ANSWER_SECS", 0.3)
    server.answer = lambda request: over.wait(60)
    start = time.monotonic()
    reason = tfds.unreachable(f"http://127.0.0.1:{server.port}/x")
    assert reason.startswith("127.0.0.1 cannot be reached (")
    assert time.monotonic() - start < 2


def test_proxy_is_asked_in_place_of_the_host(server, monkeypatch):
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{server.port}")
    server.answer = lambda request: request.send(b"", 403)
    reason = tfds.unreachable("https://host.invalid/x")
    assert reason.startswith("host.invalid cannot be reached (") and "403" in reason
    assert server.requests == ["host.invalid:443"]


def test_host_that_needs_no_proxy_is_asked_itself(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.answer = lambda request: request.send(b"x")
    assert tfds.unreachable(f"http://127.0.0.1:{server.port}/x") is None


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
    tfds.prepare(one_image, str(tmp_path))
    data_set = tfds.read_prepared(tfds.find_prepared(one_image, str(tmp_path)))
    images, labels = all_of(data_set.test)
    assert images.tobytes() == CONTENT and labels.tolist() == [2]


def test_row_20_wrong_sum_then_a_clean_second_try(tmp_path, server, one_image):
    wrong = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    server.answer = lambda request: request.send(wrong)
    with pytest.raises(SystemExit) as caught:
        tfds.prepare(one_image, str(tmp_path))
    text = str(caught.value)
    assert "\n" not in text and "checksum" in text
    assert hashlib.sha256(CONTENT).hexdigest() in text
    assert hashlib.sha256(wrong).hexdigest() in text
    assert tfds.find_prepared(one_image, str(tmp_path)) is None

    server.answer = lambda request: request.send(CONTENT)
    tfds.prepare(one_image, str(tmp_path))
    assert tfds.find_prepared(one_image, str(tmp_path))


def test_row_20_partial_download(tmp_path, server, one_image):
    server.answer = lambda request: request.send(CONTENT[:50], length=len(CONTENT))
    with pytest.raises(SystemExit, match="50 bytes read, 94 more expected"):
        tfds.prepare(one_image, str(tmp_path))
    assert tfds.find_prepared(one_image, str(tmp_path)) is None


def test_download_that_stands_still_ends(
    tmp_path, server, one_image, over, monkeypatch
):
    def stall(request):
        request.send(CONTENT[:50], length=len(CONTENT))
        over.wait(60)

    server.answer = stall
    monkeypatch.setattr(tfds, "STALL_SECS", 0.2)
    start = time.monotonic()
    with pytest.raises(SystemExit, match="[Tt]imed out"):
        tfds.prepare(one_image, str(tmp_path))
    assert time.monotonic() - start < 5


def test_failed_download_is_one_line(tmp_path, server, monkeypatch, capfd):
    server.answer = lambda request: request.send(b"", 403)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.port}")
    text = message(tfds.download, "cifar10", str(tmp_path))
    assert text.startswith(
        f"tensorflow-datasets could not download cifar10 to {tmp_path}: "
    )
    assert "www.cs.toronto.edu" in text and "403" in text
    assert capfd.readouterr() == (
        f"tensorflow-datasets downloads cifar10 to {tmp_path} ...\n",
        "",
    )
