"""Data sets that tensorflow-datasets has prepared: what else there is in a folder."""

import os
import pathlib
import shutil
import socket

import numpy as np
import pytest
import tensorflow as tf
from prepared_sets import all_of, features, message, random_examples, store

from towers import data
from towers.data.files.image_files import ImageOptions, Survey
from towers.data.files.tf_records import open_records
from towers.data.sets import tfds

TRAIN = "shapes-train.tfrecord-00000-of-00001"
each_format = pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])


@pytest.fixture(autouse=True)
def nothing_at_home(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "shared"))
    for name in ("create_connection", "getaddrinfo"):  # the network is not asked
        monkeypatch.setattr(socket, name, None)


def spec(**changes):
    return features(id=None, **changes)


def load(data_dir, name="shapes", **options):
    return tfds.load(name, str(data_dir), ImageOptions(**options))


def refusal(data_dir, name="shapes"):
    return message(load, data_dir, name)


def pairs(images, labels):
    """Images with their labels in an order of their own: TFDS shuffles them."""
    both = zip(images, labels, strict=True)
    return sorted((np.asarray(image).tobytes(), int(label)) for image, label in both)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    home = tmp_path_factory.mktemp("stored")
    store(home, random_examples(6, 0), random_examples(2, 1), spec=spec())
    return home


@pytest.fixture
def prepared(stored, tmp_path):
    """The folder of a data set of six and two images, to do with as one likes."""
    shutil.copytree(stored / "shapes", tmp_path / "shapes")
    return str(tmp_path / "shapes" / "1.2.3")


def test_a_prepared_folder_is_left_as_it_is_and_nothing_is_said(prepared, capsys):
    """Also on a share that cannot be written to."""
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(prepared)}
    os.chmod(prepared, 0o500)
    data_set = data.load("tfds:shapes", f"{prepared}/../..")
    os.chmod(prepared, 0o700)
    after = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(prepared)}
    assert after == before
    assert data_set.name == "tfds:shapes"
    folder = os.path.normpath(prepared)
    origin = f"tensorflow-datasets shapes/1.2.3 in {folder}"
    assert os.path.normpath(data_set.origin) == origin
    assert data_set.inventory.splits["test"] == "split test"
    assert not capsys.readouterr().out


@each_format
def test_images_of_any_size_and_other_features(tmp_path, file_format):
    from tensorflow_datasets import features as kinds

    rng = np.random.default_rng(0)
    examples = [
        {
            "photo": rng.integers(0, 256, (8, 20 + i, 1)).astype(np.uint8),
            "kind": i % 3,
            "note": "x",
        }
        for i in range(12)
    ]
    features = kinds.FeaturesDict(
        {
            "photo": kinds.Image(shape=(None, None, 1)),
            "kind": kinds.ClassLabel(num_classes=3),
            "note": kinds.Text(),
        }
    )
    store(tmp_path, examples, None, spec=features, file_format=file_format)
    assert "resized to 64x64" in load(tmp_path).inventory.inferred["sizes"]
    data_set = load(tmp_path, image_size=8)
    assert data_set.train.image_shape == (8, 8, 1)
    assert data_set.class_names == ("0", "1", "2")
    counts = data_set.train.num_examples, data_set.test.num_examples
    assert counts == (11, 1) and "10% of" in data_set.inventory.splits["test"]
    actual = pairs(*all_of(data_set.train)) + pairs(*all_of(data_set.test))
    # What is 8 pixels high is cropped and no more where the width is even.
    even = [x for x in examples if x["photo"].shape[1] % 2 == 0]
    cropped = [x["photo"][:, (x["photo"].shape[1] - 8) // 2 :][:, :8] for x in even]
    assert set(pairs(cropped, [x["kind"] for x in even])) <= set(actual)


@pytest.mark.row(19)
@pytest.mark.row(60)
def test_row_60_other_splits_are_named(tmp_path):
    others = {"extra": random_examples(2, 2), "validation": random_examples(2, 3)}
    examples = random_examples(6, 0), random_examples(2, 1)
    store(tmp_path, *examples, spec=spec(), others=others)
    inventory = load(tmp_path).inventory
    assert sorted(inventory.names["splits"]) == ["extra", "validation"]


def test_row_19_what_is_not_there_is_told_with_the_way_out(tmp_path, monkeypatch):
    text = refusal(tmp_path, "flowers")
    assert text.startswith("tfds:flowers was not found: no flowers/VERSION in ")
    assert str(tmp_path) in text and str(tmp_path / "shared") in text
    assert text.endswith("tfds build flowers --file_format=array_record")

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "flowers").mkdir()
    monkeypatch.setattr("os.listdir", refuse)
    text = refusal(tmp_path, "flowers")
    assert text == f"{tmp_path}/flowers: cannot be read: Permission denied"


def test_records_are_those_that_tensorflow_reads(tmp_path):
    contents = [bytes([i]) * (7 * i % 50) for i in range(30)]
    paths = [str(tmp_path / name) for name in ("a", "b", "empty", "c")]
    parts = contents[:9], contents[9:10], [], contents[10:]
    for path, some in zip(paths, parts, strict=True):
        with tf.io.TFRecordWriter(path) as writer:
            for content in some:
                writer.write(content)
    records = open_records(paths)
    assert [records.read(i)[0] for i in range(len(records))] == contents
    expected = tf.data.TFRecordDataset(paths).as_numpy_iterator()
    assert list(expected) == contents
    size = os.path.getsize(paths[3])
    for cut in (1, 5, 13, size - 1):
        os.truncate(paths[3], size - cut)
        with pytest.raises(ValueError, match=r"c: record .* breaks off"):
            open_records(paths)


def spoil_record(path):
    content = path.read_bytes()
    path.write_bytes(content[:150] + b"xyz" + content[153:])


def test_damaged_records_are_named_or_left_out(prepared, tmp_path):
    spoil_record(pathlib.Path(prepared) / TRAIN)
    survey = Survey()
    all_of(load(tmp_path, survey=survey).train)
    assert list(survey.faults) == [
        f"{prepared}: split 'train', image 0 (counted from 0)"
    ]
    data_set = load(tmp_path, bad_images="skip")
    assert data_set.train.num_examples == 5 and data_set.test.num_examples == 2
    assert data_set.inventory.unused == {"bad images": 1}
