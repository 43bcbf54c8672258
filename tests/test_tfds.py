"""Data sets prepared by tensorflow-datasets: found, and read into memory."""

import json
import os
import socket

import numpy as np
import pytest
from prepared_sets import CLASSES, all_of, features, message, random_examples, store

from towers.data import tfds


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


# Found.


def test_newest_whole_version_is_found(tmp_path):
    for version in ("1.9.0", "1.10.0", "2.0.0", "incomplete.X_3.0.0"):
        (tmp_path / "shapes" / version).mkdir(parents=True)
        if version != "2.0.0":
            (tmp_path / "shapes" / version / "dataset_info.json").touch()
    actual = tfds.find_prepared("shapes", str(tmp_path))
    assert actual == str(tmp_path / "shapes" / "1.10.0")
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
    assert data_set.origin == f"tensorflow-datasets shapes/1.2.3 in {folder}"


def test_without_ids_everything_comes_once_and_in_the_same_order(tmp_path, no_network):
    train, test = random_examples(40, 0), random_examples(1, 1)
    folder = store(tmp_path, train, test, spec=features(id=None))
    images, labels = all_of(tfds.read_prepared(folder).train)
    again, _ = all_of(tfds.read_prepared(folder).train)
    np.testing.assert_array_equal(images, again)
    actual = sorted((x.tobytes(), y) for x, y in zip(images, labels, strict=True))
    assert actual == sorted((x["image"].tobytes(), x["label"]) for x in train)


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


def test_what_is_no_set_of_labeled_images_is_refused(tmp_path, no_network):
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
