"""Small data sets on the disk: the official files of published ones, written byte by
byte, and folders that tensorflow-datasets itself writes."""

import dataclasses
import gzip
import io
import struct
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from towers.data.sets.official_files import PUBLISHED
from towers.errors import DataError

CLASSES = ["circle", "square", "star"]

# Records of the official files, in their order.
COUNTS = {"cifar10": [4] * 6, "cifar100": [7, 3], "mnist": [11, 4]}
COUNTS["fashion_mnist"] = COUNTS["mnist"]
CIFAR, MNIST = ["cifar10", "cifar100"], ["mnist", "fashion_mnist"]
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def change(monkeypatch, name, **changes):
    changed = dataclasses.replace(PUBLISHED[name], **changes)
    monkeypatch.setitem(PUBLISHED, name, changed)


def shrink_published(monkeypatch, tmp_path):
    """The official files have few records; no data set is in the usual places."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "shared"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    for name, known in list(PUBLISHED.items()):
        counts = iter(COUNTS[name])
        files = {
            split: {file: next(counts) for file in of_split}
            for split, of_split in known.files.items()
        }
        change(monkeypatch, name, files=files)


def official(name):
    """File -> bytes; and per split the images and labels."""
    rng, files, splits = np.random.default_rng(0), {}, []
    shape, num_classes = PUBLISHED[name].image_shape, len(PUBLISHED[name].class_names)
    coarse = [19] if name == "cifar100" else []
    for of_split in PUBLISHED[name].files.values():
        images, labels = [], []
        for stem, count in of_split.items():
            images.append(rng.integers(0, 256, (count, *shape)).astype(np.uint8))
            labels.append(rng.integers(0, num_classes, count))
            if stem == "train":
                labels[-1][:10] = PUBLISHED[name].first_labels
            if name in CIFAR:
                records = zip(images[-1].transpose(0, 3, 1, 2), labels[-1], strict=True)
                files[stem] = b"".join(
                    bytes([*coarse, label]) + planes.tobytes()
                    for planes, label in records
                )
                continue
            head = struct.pack(">iiii", 0x803, count, 28, 28)
            files[f"{stem}-{IMAGES}"] = head + images[-1].tobytes()
            head = struct.pack(">ii", 0x801, count)
            files[f"{stem}-{LABELS}"] = head + bytes(labels[-1].tolist())
        splits.append((np.concatenate(images), np.concatenate(labels)))
    return files, splits


def write(folder, files, packed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)


def archive_of(name, files):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for path, content in {"../outside": b"x", **files}.items():
            member = tarfile.TarInfo(f"{PUBLISHED[name].folders[0]}/{path}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def assert_holds(data_set, splits, is_ordered=True):
    """Its images, labels and moments are those of (images, labels) of two splits."""
    for source, expected in zip((data_set.train, data_set.test), splits, strict=True):
        actual = all_of(source)
        assert source.image_shape == actual[0].shape[1:]
        assert (actual[0].dtype, actual[1].dtype) == (np.uint8, np.int32)
        both = actual, expected
        if not is_ordered:
            both = _sorted(*actual), _sorted(*expected)
        for one, other in zip(*both, strict=True):
            np.testing.assert_array_equal(one, other)
    pixels = splits[0][0].astype(np.float64)
    np.testing.assert_allclose(data_set.mean, pixels.mean((0, 1, 2)))
    np.testing.assert_allclose(data_set.std, pixels.std((0, 1, 2)))


def _sorted(images, labels):
    order = np.argsort([image.tobytes() for image in images])
    return images[order], np.asarray(labels)[order]


def features(**changes):
    from tensorflow_datasets import features

    parts = {
        "image": features.Image(shape=(8, 6, 3)),
        "label": features.ClassLabel(names=CLASSES),
        "id": features.Text(),
        **changes,
    }
    return features.FeaturesDict({k: v for k, v in parts.items() if v is not None})


def random_examples(num_examples, seed, shape=(8, 6, 3)):
    rng = np.random.default_rng(seed)
    return [
        {
            "image": rng.integers(0, 256, shape).astype(np.uint8),
            "label": int(rng.integers(3)),
            "id": f"{i:05d}",
        }
        for i in range(num_examples)
    ]


def store(data_dir, train, test=None, name="shapes", spec=None, others=None, **options):
    """A folder that TFDS itself writes, in its own shuffled order."""
    import tensorflow_datasets

    spec = spec or features()
    splits = {"train": train, "test": test, **(others or {})}
    splits = {split: x for split, x in splits.items() if x is not None}
    builder = tensorflow_datasets.dataset_builders.store_as_tfds_dataset(
        name=name,
        version="1.2.3",
        features=spec,
        split_datasets={
            split: [(i, {key: value[key] for key in spec}) for i, value in enumerate(x)]
            for split, x in splits.items()
        },
        data_dir=data_dir,
        **options,
    )
    return str(builder.data_path)


def all_of(source):
    images, labels = source.read(tf.range(source.num_examples, dtype=tf.int64))
    return images.numpy(), labels.numpy()


def message(function, *arguments):
    """The one line that a user reads."""
    with pytest.raises(DataError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
