"""CIFAR-10 from binary files, from the archive and from tensorflow-datasets.

The files are written here byte by byte, or by tensorflow-datasets itself. With
TOWERS_TEST_DATA naming a folder that holds `cifar-10-batches-bin`, the real pixels
are read too.
"""

import dataclasses
import hashlib
import io
import os
import pickle
import re
import socket
import tarfile
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from towers.data import cifar10, download, tfds
from towers.data.records import read_records
from towers.errors import DataError

FILES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
RECORD_BYTES = 3073
NUM_RECORDS = 4

REAL_DIR = os.environ.get("TOWERS_TEST_DATA", "")
needs_real_pixels = pytest.mark.skipif(
    not os.path.isdir(os.path.join(REAL_DIR, "cifar-10-batches-bin")),
    reason="TOWERS_TEST_DATA names no folder with cifar-10-batches-bin",
)


@pytest.fixture(autouse=True)
def nothing_at_home(monkeypatch, tmp_path):
    """No data set in the usual places, no proxy, and a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "shared"))
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_PROXY".upper(), raising=False)


def replace(monkeypatch, **changes):
    """Changes what is known of the data set."""
    changed = dataclasses.replace(cifar10.CIFAR10, **changes)
    monkeypatch.setattr(cifar10, "CIFAR10", changed)


@pytest.fixture
def small_files(monkeypatch):
    """Files of four records, so that few bytes have to be written."""
    replace(
        monkeypatch,
        train_files=dict.fromkeys(FILES[:5], NUM_RECORDS),
        test_file=(FILES[5], NUM_RECORDS),
    )


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def random_file(seed, num_records=NUM_RECORDS):
    """(bytes of a file, its labels, its images [n, 32, 32, 3])."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, num_records)
    images = rng.integers(0, 256, (num_records, 32, 32, 3))
    content = bytearray()
    for label, image in zip(labels, images, strict=True):
        content.append(label)
        for channel in range(3):
            content += bytes(image[:, :, channel].reshape(-1).tolist())
    return bytes(content), labels, images


def write_folder(folder, names=True):
    """Six small files; gives back the labels and images of train and test."""
    folder.mkdir(parents=True, exist_ok=True)
    if names:
        (folder / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n\n")
    labels, images = [], []
    for seed, name in enumerate(FILES):
        content, some_labels, some_images = random_file(seed)
        (folder / name).write_bytes(content)
        labels.append(some_labels)
        images.append(some_images)
    return (
        (np.concatenate(images[:5]), np.concatenate(labels[:5])),
        (images[5], labels[5]),
    )


def examples(source):
    indices = tf.range(source.num_examples, dtype=tf.int64)
    return [values.numpy() for values in source.read(indices)]


def assert_holds(data_set, train, test):
    for source, (images, labels) in ((data_set.train, train), (data_set.test, test)):
        found_images, found_labels = examples(source)
        assert found_images.dtype == np.uint8 and found_labels.dtype == np.int32
        np.testing.assert_array_equal(found_images, images)
        np.testing.assert_array_equal(found_labels, labels)
    np.testing.assert_allclose(data_set.mean, train[0].mean((0, 1, 2)))
    np.testing.assert_allclose(data_set.deviation, train[0].std((0, 1, 2)))


def message(function, *arguments):
    """The one line that a user reads."""
    with pytest.raises(DataError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert caught.value.exit_code == 3 and "\n" not in text
    return text


# Binary files.


def test_records_are_label_then_planes(tmp_path):
    content, labels, images = random_file(0, 7)
    (tmp_path / "x.bin").write_bytes(content)
    found_images, found_labels = read_records(str(tmp_path / "x.bin"), 7, {"label": 10})
    np.testing.assert_array_equal(found_images, images)
    np.testing.assert_array_equal(found_labels, labels)
    assert found_images.dtype == np.uint8 and found_labels.dtype == np.int32


def test_full_size_folder_is_read_in_official_order(tmp_path):
    content, labels, images = random_file(0, 6)
    for i, name in enumerate(FILES):  # Holes but for the record at place i.
        with open(tmp_path / name, "wb") as file:
            file.truncate(10_000 * RECORD_BYTES)
            file.seek(i * RECORD_BYTES)
            file.write(content[i * RECORD_BYTES : (i + 1) * RECORD_BYTES])
    data_set = cifar10.load(str(tmp_path))
    assert data_set.train.num_examples == 50_000
    assert data_set.test.num_examples == 10_000
    assert data_set.train.image_shape == (32, 32, 3)
    assert data_set.class_names == tuple(CLASSES)
    assert data_set.name == "cifar10"
    actual = [
        values.numpy() for values in data_set.train.read([0, 10001, 20002, 40004])
    ]
    np.testing.assert_array_equal(actual[0], images[[0, 1, 2, 4]])
    np.testing.assert_array_equal(actual[1], labels[[0, 1, 2, 4]])
    np.testing.assert_array_equal(data_set.test.read([5])[0].numpy(), images[5:])


@pytest.mark.parametrize("place", ["cifar-10-batches-bin", "."])
def test_folder_is_found(tmp_path, small_files, no_network, place):
    train, test = write_folder(tmp_path / "home" / place)
    data_set = cifar10.load(str(tmp_path / "home"))
    assert_holds(data_set, train, test)
    folder = os.path.normpath(tmp_path / "home" / place)
    assert data_set.origin == f"{folder} (official binary layout)"


def test_empty_data_dir_means_data(tmp_path, small_files, no_network):
    train, test = write_folder(tmp_path / "data" / "cifar-10-batches-bin", names=False)
    assert_holds(cifar10.load(""), train, test)


@pytest.mark.parametrize(
    "size, place",
    [
        (0, "record 0 and those after it are missing"),
        (3 * RECORD_BYTES, "record 3 and those after it are missing"),
        (4 * RECORD_BYTES - 1, "it breaks off in record 3, after 3072 of its bytes"),
        (4 * RECORD_BYTES + 1, "it goes on after record 3, the last"),
        (5 * RECORD_BYTES, "it goes on after record 3, the last"),
    ],
)
def test_row_21_file_of_wrong_size(tmp_path, small_files, size, place):
    write_folder(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = random_file(2, 6)[0][:size]
    path.write_bytes(content)
    text = message(cifar10.load, str(tmp_path))
    assert text.startswith(f"{path}: expected 12292 bytes (4 records of 3073)")
    assert f"found {size}: {place}" in text


def test_row_21_fewer_whole_records_than_official(tmp_path):
    write_folder(tmp_path / "cifar-10-batches-bin")
    text = message(cifar10.load, str(tmp_path))
    assert "data_batch_1.bin: expected 30730000 bytes" in text
    assert "found 12292: record 4 and those after it are missing" in text


def test_row_21_label_out_of_range(tmp_path, small_files):
    write_folder(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    content = bytearray(path.read_bytes())
    content[2 * RECORD_BYTES] = 10
    path.write_bytes(content)
    text = message(cifar10.load, str(tmp_path))
    assert text.startswith(f"{path}: record 2 ") and "label 10, expected 0 to 9" in text


@pytest.mark.parametrize("name", FILES)
def test_row_21_missing_file(tmp_path, small_files, no_network, name):
    write_folder(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / name
    path.unlink()
    text = message(cifar10.load, str(tmp_path))
    assert text == f"{path}: cannot be read: No such file or directory"


def test_folder_in_place_of_a_file(tmp_path, small_files):
    write_folder(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / FILES[0]
    path.unlink()
    path.mkdir()
    assert str(path) in message(cifar10.load, str(tmp_path))


def test_other_class_names_are_refused(tmp_path, small_files):
    write_folder(tmp_path)
    names = tmp_path / "batches.meta.txt"
    names.write_text("\n".join([*CLASSES[:8], "truck", "ship"]))
    text = message(cifar10.load, str(tmp_path))
    assert text.startswith(f"{names}: ") and text.endswith("horse truck ship")


def test_data_dir_that_is_a_file(tmp_path):
    (tmp_path / "x.tar.gz").touch()
    assert "x.tar.gz is not a folder" in message(
        cifar10.load, str(tmp_path / "x.tar.gz")
    )


# The pickled layout.


@pytest.mark.parametrize(
    "place",
    [
        "cifar-10-batches-py/data_batch_1",
        "data_batch_1",
        "cifar-10-batches-bin/data_batch_1",
        "cifar-10-python.tar.gz",
    ],
)
def test_row_22_pickled_layout_is_refused(tmp_path, no_network, place):
    class MakeFolder:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    pickled = tmp_path / place
    pickled.parent.mkdir(exist_ok=True)
    pickled.write_bytes(pickle.dumps(MakeFolder()))
    text = message(cifar10.load, str(tmp_path))
    assert "pickled layout" in text and "cifar-10-batches-bin/*.bin" in text
    assert str(tmp_path / place.split("/")[0]) in text
    assert not (tmp_path / "executed").exists()


def test_row_22_folder_itself_is_pickled(tmp_path, no_network):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").touch()
    text = message(cifar10.load, str(tmp_path / "cifar-10-batches-py"))
    assert "pickled layout" in text


# The archive.


def write_archive(path, members, monkeypatch):
    """A small archive, and its size and sum in place of the official ones."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    replace(monkeypatch, archive_bytes=len(content), archive_sha256=sha256)


@pytest.fixture
def members(tmp_path):
    train_and_test = write_folder(tmp_path / "packed")
    content = {
        f"cifar-10-batches-bin/{name}": (tmp_path / "packed" / name).read_bytes()
        for name in ["test_batch.bin", "batches.meta.txt", *FILES[:5]]
    }
    return content, train_and_test


def test_archive_is_read_in_place(
    tmp_path, monkeypatch, small_files, no_network, members
):
    content, (train, test) = members
    home = tmp_path / "home"
    home.mkdir()
    write_archive(
        home / "cifar-10-binary.tar.gz", {"../outside": b"x", **content}, monkeypatch
    )
    data_set = cifar10.load(str(home))
    assert_holds(data_set, train, test)
    assert data_set.origin == (
        f"{home}/cifar-10-binary.tar.gz (official archive, checked)"
    )
    assert os.listdir(home) == ["cifar-10-binary.tar.gz"]
    assert not (tmp_path / "outside").exists()


def test_row_20_archive_with_wrong_sum(tmp_path, monkeypatch, small_files, members):
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, members[0], monkeypatch)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    text = message(cifar10.load, str(tmp_path))
    assert f"expected sha256 {cifar10.CIFAR10.archive_sha256}" in text
    assert f"found {hashlib.sha256(content).hexdigest()}" in text
    assert str(path) in text and "delete it and fetch" in text


def test_row_20_partial_archive(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"\x1f\x8b" * 50)
    text = message(cifar10.load, str(tmp_path))
    assert "expected 170052171 bytes, found 100;" in text


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda name, content: None, "is missing"),
        (lambda name, content: content[:-1], "it breaks off in record 3"),
        (lambda name, content: b"\x0a" + content[1:], "has the label 10"),
    ],
)
def test_archive_with_a_bad_member(
    tmp_path, monkeypatch, small_files, members, change, expected
):
    name = "cifar-10-batches-bin/data_batch_5.bin"
    content = {**members[0], name: change(name, members[0][name])}
    content = {key: value for key, value in content.items() if value is not None}
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, content, monkeypatch)
    text = message(cifar10.load, str(tmp_path))
    assert text.startswith(f"{path}: {name}") and expected in text


@pytest.mark.parametrize("content", [b"no archive", b"\x1f\x8b\x08\x00torn", b""])
def test_archive_that_is_none(tmp_path, monkeypatch, content):
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    replace(monkeypatch, archive_bytes=len(content), archive_sha256=sha256)
    assert str(path) in message(cifar10.load, str(tmp_path))


def test_folder_goes_before_archive(tmp_path, small_files):
    train, test = write_folder(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-binary.tar.gz").touch()
    assert_holds(cifar10.load(str(tmp_path)), train, test)


def test_sum_is_the_one_tensorflow_datasets_has():
    import tensorflow_datasets

    package = os.path.dirname(tensorflow_datasets.__file__)
    with open(os.path.join(package, "url_checksums", "cifar10.txt")) as file:
        url, size, sha256, name = file.read().split()
    assert (cifar10.CIFAR10.url, cifar10.CIFAR10.archive) == (url, name)
    assert (cifar10.CIFAR10.archive_bytes, cifar10.CIFAR10.archive_sha256) == (
        int(size),
        sha256,
    )


# Through tensorflow-datasets.


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """(data_dir, train, test), written by the real builder from small files."""
    import tensorflow_datasets

    home = tmp_path_factory.mktemp("prepared")
    train, test = write_folder(home / "files" / "cifar-10-batches-bin")
    builder = tensorflow_datasets.builder("cifar10", data_dir=home / "tfds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tensorflow_datasets.download.DownloadManager,
            "download_and_extract",
            lambda self, url: str(home / "files"),
        )
        builder.download_and_prepare()
    return home / "tfds", train, test


def test_prepared_folder_gives_what_the_files_give(prepared, no_network):
    data_dir, train, test = prepared
    data_set = cifar10.load(str(data_dir))
    assert_holds(data_set, train, test)
    assert data_set.name == "cifar10" and data_set.class_names == tuple(CLASSES)
    assert re.fullmatch(
        rf"tensorflow-datasets cifar10/(\d+\.\d+\.\d+) in {data_dir}/cifar10/\1",
        data_set.origin,
    )


def test_prepared_folder_is_found_in_the_default_place(
    prepared, monkeypatch, no_network
):
    data_dir, train, test = prepared
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert_holds(cifar10.load(""), train, test)


def test_prepared_folder_of_something_else_is_refused(tmp_path, no_network):
    import tensorflow_datasets

    features = tensorflow_datasets.features
    example = {"image": np.zeros((28, 28, 1), np.uint8), "label": 0}
    builder = tensorflow_datasets.dataset_builders.store_as_tfds_dataset(
        name="cifar10",
        version="3.0.2",
        features=features.FeaturesDict(
            {
                "image": features.Image(shape=(28, 28, 1)),
                "label": features.ClassLabel(names=CLASSES),
            }
        ),
        split_datasets={"train": [(0, example)], "test": [(0, example)]},
        data_dir=tmp_path,
    )
    text = message(cifar10.load, str(tmp_path))
    assert text.startswith(str(builder.data_path))
    assert "images of [32, 32, 3], found [28, 28, 1]" in text


# No data and no network.


def assert_says_everything(text, data_dir, shared):
    assert "cifar-10-batches-bin" in text and "cifar-10-binary.tar.gz" in text
    assert str(data_dir) in text and str(shared) in text
    assert cifar10.CIFAR10.url in text and "--data_dir" in text
    assert "--dataset=embedded needs no data" in text


def test_row_19_no_network(tmp_path, no_network):
    start = time.monotonic()
    text = message(cifar10.load, str(tmp_path / "none"))
    assert time.monotonic() - start < 2
    assert_says_everything(text, tmp_path / "none", tmp_path / "shared")
    assert "www.cs.toronto.edu cannot be reached (Network is unreachable)" in text
    assert "none (no such folder)" in text


@pytest.mark.parametrize("function", ["getaddrinfo", "create_connection"])
def test_row_19_network_that_never_answers(tmp_path, monkeypatch, function):
    tfds.default_dir()  # Imports are not counted.
    over = threading.Event()
    monkeypatch.setattr(socket, function, lambda *_, **__: over.wait(60))
    start = time.monotonic()
    text = message(cifar10.load, "")
    assert time.monotonic() - start < 2
    over.set()
    assert_says_everything(text, tmp_path / "data", tmp_path / "shared")
    assert "no answer within 1.2 s" in text


def test_row_19_proxy_that_is_down(tmp_path, monkeypatch):
    tfds.default_dir()
    with socket.socket() as unused:  # Bound but not listening: refuses.
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        start = time.monotonic()
        text = message(cifar10.load, str(tmp_path))
        assert time.monotonic() - start < 2
    assert_says_everything(text, tmp_path, tmp_path / "shared")
    assert f"proxy 127.0.0.1:{port}: " in text
    assert "Connection refused" in text


def test_failed_download_says_how_to_get_it(tmp_path, monkeypatch):
    def fail(name, data_dir):
        raise DataError(f"no {name} for {data_dir}")

    monkeypatch.setattr(download, "unreachable", lambda url: None)
    monkeypatch.setattr(download, "download", fail)
    text = message(cifar10.load, str(tmp_path / "here"))
    assert text.startswith(f"no cifar10 for {tmp_path / 'here'}; to get it, fetch")
    text = message(cifar10.load, "")
    assert text.startswith(f"no cifar10 for {tmp_path / 'shared'}; to get it, fetch")


# Real pixels.


@needs_real_pixels
def test_real_pixels():
    data_set = cifar10.load(REAL_DIR)
    folder = os.path.join(REAL_DIR, "cifar-10-batches-bin")
    first = np.memmap(os.path.join(folder, FILES[0]), np.uint8, "r")
    last = np.memmap(os.path.join(folder, FILES[5]), np.uint8, "r")
    images, labels = data_set.train.read([0])
    assert labels[0] == first[0]
    assert images[0, 5, 7].numpy().tolist() == [
        first[1 + channel * 1024 + 5 * 32 + 7] for channel in range(3)
    ]
    images, labels = data_set.test.read([9_999])
    assert labels[0] == last[9_999 * RECORD_BYTES]
    assert images[0, 31, 31, 2] == last[-1]
    np.testing.assert_allclose(data_set.mean, (125.3, 123.0, 113.9), atol=0.5)
    counts = np.bincount(examples(data_set.train)[1])
    np.testing.assert_array_equal(counts, [5_000] * 10)
