"""The contract of all containers of images: the same images give the same batches."""

import itertools

import fsspec
import numpy as np
import pytest
from containers import CONTAINERS, examples, serving, write_images
from prepared_sets import all_of

from towers import data
from towers.data.augment.augmentation import pad_crop_flip
from towers.data.batches import TrainBatches
from towers.data.block_order import block_order
from towers.data.sources import checksum

COUNT = 45


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWERS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=CONTAINERS)
def written(request, tmp_path):
    """(--dataset, --data_dir) of the images in a container."""
    write, name, pattern = CONTAINERS[request.param]
    write(tmp_path / "container", examples(COUNT))
    return name, str(tmp_path / "container" / pattern)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    write_images(root, examples(COUNT))
    return data.load("image_folder", str(root))


def first_batches(data_set, first_step=0, count=12):
    """More than two epochs."""
    augment = pad_crop_flip(data_set.image_shape, data_set.mean, data_set.deviation)
    order = block_order(data_set.train, 1000)
    batches = TrainBatches(data_set.train, augment, 3, 10, order=order)
    return list(itertools.islice(batches.stream(first_step).as_numpy_iterator(), count))


def assert_equal_batches(batches, expected):
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


def assert_equal_sets(data_set, expected):
    assert data_set.class_names == expected.class_names
    assert (data_set.mean, data_set.deviation) == (expected.mean, expected.deviation)
    for split, source in expected.sources.items():
        for actual, values in zip(
            all_of(data_set.sources[split]), all_of(source), strict=True
        ):
            np.testing.assert_array_equal(actual, values)


def test_every_container_gives_the_batches_of_the_folder(written, folder):
    name, place = written
    data_set = data.load(name, place)
    assert_equal_sets(data_set, folder)
    assert_equal_batches(first_batches(data_set), first_batches(folder))
    # In the middle of an epoch, from the index that was kept.
    again = data.load(name, place)
    assert_equal_batches(first_batches(again, 6, 6), first_batches(folder)[6:])
    assert checksum(again.train) == checksum(data_set.train)
    with_faults = data.load(name, place, bad_images="skip")
    assert_equal_sets(with_faults, folder)


@pytest.mark.parametrize("scheme", ["http", "memory"])
def test_remote_files_give_the_same_batches(written, folder, scheme, tmp_path):
    name, place = written
    root = tmp_path / "container"
    with serving(root) as server:
        base = server.url
        if scheme == "memory":
            base = f"memory://{tmp_path.name}"
            fsspec.filesystem("memory").put(
                str(root), f"/{tmp_path.name}", recursive=True
            )
        elif place.endswith("*"):
            names = sorted(path.name for path in root.iterdir())
            place = str(root / f"{{{','.join(names)}}}")
        place = place.replace(str(root), base)
        if scheme == "http" and name == "parquet":
            names = ",".join(sorted(path.name for path in root.iterdir()))
            place = f"{base}/{{{names}}}"
        server.fail = 2
        data_set = data.load(name, place)
        assert_equal_batches(first_batches(data_set), first_batches(folder))
        count = len(server.requests)
        assert_equal_batches(
            first_batches(data.load(name, place)), first_batches(folder)
        )
        # Everything is in the cache but for the sizes of files.
        assert not [x for x in server.requests[count:] if x[1]]
