"""MNIST and Fashion-MNIST from IDX files that are written here byte by byte."""

import gzip
import os
import socket
import struct

import numpy as np
import pytest
import tensorflow as tf

from towers.data import mnist
from towers.errors import DataError

COUNTS = {"train": 6, "t10k": 4}
SPLITS = ("train", "test")
LOADERS = {"mnist": mnist.load, "fashion_mnist": mnist.load_fashion}


@pytest.fixture(autouse=True)
def small_and_nothing_at_home(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "shared"))
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(mnist, "SPLITS", {"train": ("train", 6), "test": ("t10k", 4)})


def images_file(images):
    return struct.pack(">iiii", 0x803, *images.shape) + images.tobytes()


def labels_file(labels):
    return struct.pack(">ii", 0x801, len(labels)) + bytes(list(labels))


def write(folder, packed=False):
    """The four files; gives back the images and labels of each."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    examples = {}
    for stem, count in COUNTS.items():
        images = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = rng.integers(0, 10, count)
        for name, content in (
            (f"{stem}-images-idx3-ubyte", images_file(images)),
            (f"{stem}-labels-idx1-ubyte", labels_file(labels)),
        ):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
        examples[stem] = images, labels
    return examples


def message(data_dir, load=mnist.load):
    with pytest.raises(DataError) as caught:
        load(str(data_dir))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_holds(data_set, examples):
    sources = (data_set.train, data_set.test)
    for source, (images, labels) in zip(sources, examples.values(), strict=True):
        assert source.image_shape == (28, 28, 1)
        actual = source.read(tf.range(source.num_examples, dtype=tf.int64))
        np.testing.assert_array_equal(actual[0], images[..., None])
        np.testing.assert_array_equal(actual[1], labels)
    np.testing.assert_allclose(data_set.mean, [examples["train"][0].mean()])
    np.testing.assert_allclose(data_set.deviation, [examples["train"][0].std()])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name,place",
    [
        ("mnist", "."),
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "fashion-mnist"),
        ("fashion_mnist", "."),
    ],
)
def test_files_are_found_packed_or_not(tmp_path, name, place, packed):
    examples = write(tmp_path / place, packed)
    data_set = LOADERS[name](str(tmp_path))
    assert_holds(data_set, examples)
    assert data_set.name == name and len(data_set.class_names) == 10
    assert "(official IDX files)" in data_set.origin


@pytest.mark.parametrize("name", LOADERS)
def test_what_tensorflow_datasets_prepared_is_found(tmp_path, name):
    import tensorflow_datasets as tfds

    rng = np.random.default_rng(0)
    known = {"mnist": mnist.MNIST, "fashion_mnist": mnist.FASHION_MNIST}[name]
    image = rng.integers(0, 256, (28, 28, 1)).astype(np.uint8)
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version="3.0.1",
        features=tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(28, 28, 1)),
                "label": tfds.features.ClassLabel(names=known.official.class_names),
            }
        ),
        split_datasets=dict.fromkeys(SPLITS, [(0, {"image": image, "label": 7})]),
        data_dir=tmp_path / "shared",
    )
    images, labels = LOADERS[name]("").test.read([0])
    np.testing.assert_array_equal(images[0], image)
    assert labels.numpy().tolist() == [7]


def test_both_sets_can_lie_in_one_folder(tmp_path):
    write(tmp_path / "mnist"), write(tmp_path / "fashion_mnist")
    for name, load in LOADERS.items():
        assert load(str(tmp_path)).origin.startswith(f"{tmp_path}/{name} ")


def test_classes_are_named():
    digits = mnist.MNIST.official.class_names
    clothes = mnist.FASHION_MNIST.official.class_names
    assert digits == tuple(str(i) for i in range(10))
    assert (clothes[0], clothes[5], clothes[9]) == (
        "T-shirt/top",
        "Sandal",
        "Ankle boot",
    )


@pytest.mark.parametrize(
    "name,change,words",
    [
        (
            "train-images-idx3",
            lambda x: x[:3],
            "magic number is 0x000008, expected 0x0",
        ),
        (
            "train-images-idx3",
            lambda x: b"PK" + x[2:],
            "its magic number is 0x504b0803",
        ),
        (
            "train-images-idx3",
            lambda x: x[:2] + b"\x0d" + x[3:],
            "0x00000d03, expected",
        ),
        (
            "train-labels-idx1",
            lambda x: x[:3] + b"\3" + x[4:],
            "0x00000803, expected 0x",
        ),
        ("train-images-idx3", lambda x: x[:9], "breaks off in its header, after 9 byt"),
        ("t10k-images-idx3", lambda x: x[:7] + b"\5" + x[8:], "holds 5x28x28 (records"),
        ("t10k-images-idx3", lambda x: x[:11] + b"\x1d" + x[12:], "holds 4x29x28 (re"),
        ("train-images-idx3", lambda x: x[:-785], "it breaks off in record 4 (rec"),
        (
            "t10k-images-idx3",
            lambda x: x + b"\0",
            "it goes on after record 3, the last",
        ),
        ("t10k-labels-idx1", lambda x: x[:-1], "it breaks off in record 3 (records"),
        (
            "t10k-labels-idx1",
            lambda x: x[:-2] + b"\x0a\0",
            "record 2 (counted from 0) has",
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_row_21_wrong_files_are_named(tmp_path, name, change, words, packed):
    write(tmp_path, packed)
    path = tmp_path / f"{name}-ubyte{'.gz' if packed else ''}"
    if packed:
        path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
    else:
        path.write_bytes(change(path.read_bytes()))
    text = message(tmp_path)
    assert text.startswith(f"{path}: ") and words in text


@pytest.mark.parametrize(
    "change", [lambda x: x[:-20], lambda x: b"no archive", lambda x: x[:40] + b"x" * 99]
)
def test_row_20_damaged_archive(tmp_path, change):
    write(tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    assert message(tmp_path).startswith(f"{path}: cannot be read: ")


def test_row_21_missing_file(tmp_path):
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    expected = "t10k-labels-idx1-ubyte, or that with .gz, is missing"
    assert message(tmp_path) == f"{tmp_path}: {expected}"


@pytest.mark.parametrize("name,other", [LOADERS, list(LOADERS)[::-1]])
def test_the_files_of_the_other_set_are_refused(tmp_path, monkeypatch, name, other):
    """The files do not say whose they are, but the first labels are known."""
    monkeypatch.setattr(mnist, "SPLITS", {"train": ("train", 10), "test": ("t10k", 4)})
    write(tmp_path)
    labels = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]}
    labels["fashion_mnist"] = [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    images = np.zeros((10, 28, 28), np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images_file(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels_file(labels[other]))
    assert f"--dataset={other} reads them" in message(tmp_path, LOADERS[name])
    assert LOADERS[other](str(tmp_path)).name == other


@pytest.mark.parametrize("name", LOADERS)
def test_row_19_without_data_and_network(tmp_path, name):
    text = message(tmp_path, LOADERS[name])
    assert "was not found: no train-images-idx3-ubyte, " in text
    assert f"no {name}/VERSION in {tmp_path / 'shared'}" in text
    assert "to get it, fetch train-*-ubyte.gz" in text and "Network is unreach" in text


@pytest.mark.parametrize("name", LOADERS)
def test_addresses_are_those_of_tensorflow_datasets(name):
    import tensorflow_datasets

    package = os.path.dirname(tensorflow_datasets.__file__)
    with open(os.path.join(package, "url_checksums", f"{name}.txt")) as file:
        urls = [line.split()[0] for line in file]
    known = {"mnist": mnist.MNIST, "fashion_mnist": mnist.FASHION_MNIST}[name]
    assert known.official.url in urls


def test_official_counts(monkeypatch):
    monkeypatch.undo()
    assert mnist.SPLITS == {"train": ("train", 60_000), "test": ("t10k", 10_000)}
