"""CIFAR-100: what differs from CIFAR-10, whose tests cover what they share."""

import dataclasses
import hashlib
import io
import os
import socket
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from towers.data import cifar100
from towers.errors import DataError

RECORD_BYTES = 3074
COUNTS = {"train.bin": 7, "test.bin": 3}


@pytest.fixture(autouse=True)
def nothing_at_home(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "shared"))
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def replace(monkeypatch, **changes):
    changed = dataclasses.replace(cifar100.CIFAR100, **changes)
    monkeypatch.setattr(cifar100, "CIFAR100", changed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two small files; the pixels count up from the number of their record."""
    replace(
        monkeypatch,
        train_files={"train.bin": COUNTS["train.bin"]},
        test_file=("test.bin", COUNTS["test.bin"]),
    )
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, count in COUNTS.items():
        content = bytearray()
        for i in range(count):
            content += bytes([19 - i, 99 - i])
            content += bytes((i + k) % 256 for k in range(3072))
        (folder / name).write_bytes(content)
    return folder


def message(data_dir):
    with pytest.raises(DataError) as caught:
        cifar100.load(str(data_dir))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_holds(data_set):
    for source, count in ((data_set.train, 7), (data_set.test, 3)):
        images, labels = source.read(tf.range(count, dtype=tf.int64))
        np.testing.assert_array_equal(labels, 99 - np.arange(count))
        # Red comes first, row by row.
        at_row_2_column_5 = images[:, 2, 5].numpy().astype(int)
        expected = np.arange(count)[:, None] + 2 * 32 + 5 + 1024 * np.arange(3)
        np.testing.assert_array_equal(at_row_2_column_5, expected % 256)


def test_the_fine_label_is_the_second_byte(folder, tmp_path):
    data_set = cifar100.load(str(tmp_path))
    assert_holds(data_set)
    assert data_set.name == "cifar100" and len(data_set.class_names) == 100
    assert data_set.origin == f"{folder} (official binary layout)"


def test_classes_are_a_hundred_in_the_order_of_their_names():
    names = cifar100.FINE_LABEL_NAMES
    assert len(set(names)) == 100 and list(names) == sorted(names)
    assert (names[0], names[49], names[99]) == ("apple", "mountain", "worm")


def test_official_counts_are_those_of_the_set():
    assert cifar100.CIFAR100.files == {"train.bin": 50_000, "test.bin": 10_000}


@pytest.mark.parametrize(
    "place,value,words",
    [(0, 20, "coarse label 20, expected 0 to 19"), (1, 100, "fine label 100, expec")],
)
def test_row_21_either_label_out_of_range(folder, tmp_path, place, value, words):
    content = bytearray((folder / "train.bin").read_bytes())
    content[4 * RECORD_BYTES + place] = value
    (folder / "train.bin").write_bytes(content)
    text = message(tmp_path)
    assert text.startswith(f"{folder}/train.bin: record 4 ") and words in text


def test_row_21_file_cut_short(folder, tmp_path):
    os.truncate(folder / "test.bin", 2 * RECORD_BYTES + 7)
    assert "it breaks off in record 2, after 7 of its bytes" in message(tmp_path)


def test_the_file_of_class_names_is_compared(folder, tmp_path):
    names = list(cifar100.FINE_LABEL_NAMES)
    (folder / "fine_label_names.txt").write_text("\n".join(names) + "\n\n")
    assert_holds(cifar100.load(str(tmp_path)))
    (folder / "fine_label_names.txt").write_text("\n".join(names[::-1]))
    assert "are not the classes of CIFAR-100" in message(tmp_path)


def test_archive_is_read_in_place(folder, tmp_path, monkeypatch):
    path = tmp_path / "home" / "cifar-100-binary.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        for name in COUNTS:
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = (folder / name).stat().st_size
            archive.addfile(member, io.BytesIO((folder / name).read_bytes()))
    content = path.read_bytes()
    assert f"found {len(content)}; it may be a partial download" in message(path.parent)
    sha256 = hashlib.sha256(content).hexdigest()
    replace(monkeypatch, archive_bytes=len(content), archive_sha256=sha256)
    assert_holds(cifar100.load(str(path.parent)))


def test_prepared_folder_gives_what_the_files_give(folder, tmp_path, monkeypatch):
    """Written by the real builder from the small files."""
    import tensorflow_datasets

    names = "\n".join(cifar100.FINE_LABEL_NAMES) + "\n"
    (folder / "fine_label_names.txt").write_text(names)
    (folder / "coarse_label_names.txt").write_text("\n".join(map(str, range(20))))
    monkeypatch.setattr(
        tensorflow_datasets.download.DownloadManager,
        "download_and_extract",
        lambda self, url: str(tmp_path),
    )
    home = tmp_path / "tfds"
    tensorflow_datasets.builder("cifar100", data_dir=home).download_and_prepare()
    data_set = cifar100.load(str(home))
    assert_holds(data_set)
    assert data_set.origin.startswith("tensorflow-datasets cifar100/")


@pytest.mark.parametrize("place", ["cifar-100-python/train", "train", "test"])
def test_row_22_pickled_layout_is_refused(tmp_path, place):
    path = tmp_path / "home" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cos\nmkdir\n")
    text = message(tmp_path / "home")
    assert "pickled layout of CIFAR-100" in text and "cifar-100-binary/*.bin" in text


def test_the_folders_of_an_image_folder_are_no_pickles(tmp_path):
    (tmp_path / "home" / "train").mkdir(parents=True)
    text = message(tmp_path / "home")
    assert text.startswith("CIFAR-100 was not found: no cifar-100-binary, train.bin, ")
    assert "www.cs.toronto.edu cannot be reached" in text
    assert "--dataset=embedded needs no data" in text


def test_sum_is_the_one_tensorflow_datasets_has():
    import tensorflow_datasets

    package = os.path.dirname(tensorflow_datasets.__file__)
    with open(os.path.join(package, "url_checksums", "cifar100.txt")) as file:
        url, size, sha256, name = file.read().split()
    known = cifar100.CIFAR100
    assert (known.url, known.archive) == (url, name)
    assert (known.archive_bytes, known.archive_sha256) == (int(size), sha256)
