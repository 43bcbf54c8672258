"""The contract of all containers of images: the same images give the same batches."""

import dataclasses
import functools
import gzip
import itertools
import json
import re
import shutil
import signal
import subprocess
import tarfile

import containers
import fsspec
import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from containers import CONTAINERS, assert_equal_sets, examples, serving, write_images
from marks import slow
from pictures import png, random_pixels, write_folder
from prepared_sets import all_of, message
from processes import run
from pyarrow import parquet
from small_runs import assert_equal_states, saved, saved_steps, small_config

from towers import data
from towers.check.report import check
from towers.data.augment import augmentation
from towers.data.batches import TrainBatches
from towers.data.files import reading
from towers.data.files.parquet import ParquetIndex
from towers.data.orders import BlockOrder, block_order
from towers.data.sources import checksum
from towers.errors import DataError, UnavailableDataError
from towers.training.train import train

COUNT = 45
ALL = ("tar", "folder", "CSV", "Parquet", "TFRecord", "HTTP")


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
    augment = augmentation.none(data_set.image_shape, data_set.mean, data_set.std)
    order = block_order(data_set.train, 1000)
    batches = TrainBatches(data_set.train, augment, 3, 10, order=order)
    return list(itertools.islice(batches.stream(first_step).as_numpy_iterator(), count))


@pytest.fixture(scope="module")
def expected_batches(folder):
    return first_batches(folder)


def assert_equal_batches(batches, expected):
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


def test_every_container_gives_the_batches_of_the_folder(
    written, folder, expected_batches
):
    name, place = written
    data_set = data.load(name, place)
    assert data_set.train.decodes
    assert_equal_sets(data_set, folder)
    assert_equal_batches(first_batches(data_set), expected_batches)
    # In the middle of an epoch, from the index that was kept.
    again = data.load(name, place)
    assert_equal_batches(first_batches(again, 6, 6), expected_batches[6:])
    assert checksum(again.train) == checksum(data_set.train)
    with_faults = data.load(name, place, bad_images="skip")
    assert_equal_sets(with_faults, folder)


# A run that kills itself after step 7, near the end of the second epoch; checkpoint 6
# may not be written then.
KILLED_RUN = """
import json, os, signal, sys
from towers.callbacks import Callback
from towers.config import Config
from towers.training.train import train

class Kill(Callback):
    def on_log(self, step, metrics):
        if step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

train(sys.argv[1], Config(**json.loads(sys.argv[2])), callbacks=[Kill()])
"""


def run_config(dataset, data_dir):
    options = {"model": "lenet", "image_size": 14, "num_epochs": 3.0}
    options |= {"log_every_steps": 1, "checkpoint_every_steps": 3}
    return small_config(dataset=dataset, data_dir=data_dir, **options)


@pytest.fixture(scope="module")
def whole_run(folder, tmp_path_factory):
    """The run of the folder, from its start to its end in one process."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train(workdir, run_config("image_folder", folder.origin))
    return workdir


@pytest.mark.row(1)
@pytest.mark.parametrize(
    "container,is_killed", [("tar", False), *(slow(x, True) for x in ALL)]
)
def test_a_run_that_ends_in_mid_epoch_continues_to_the_state_of_the_folder(
    container, is_killed, whole_run, tmp_path, cache
):
    folder = tmp_path / "container"
    write, name, pattern = CONTAINERS.get(container, CONTAINERS["tar"])
    if container == "folder":
        write, name, pattern = write_images, "image_folder", ""
    write(folder, examples(COUNT))
    with serving(folder) as server:
        place = server.url if container == "HTTP" else folder
        config = run_config(name, f"{place}/{pattern}")
        text = json.dumps(dataclasses.asdict(config))
        environ = {"TOWERS_CACHE_DIR": str(cache)}
        if is_killed:
            killed = run("-c", KILLED_RUN, str(tmp_path / "run"), text, **environ)
            assert killed.returncode == -signal.SIGKILL, killed.stderr
            assert saved_steps(tmp_path / "run") in ([3], [3, 6])
        else:
            train(tmp_path / "run", dataclasses.replace(config, max_steps=6))
        assert train(tmp_path / "run", config).step == 12
    state = saved(tmp_path / "run").tensors
    assert_equal_states(state, saved(whole_run).tensors)


@pytest.mark.parametrize(
    "written,scheme",
    [("CSV", "memory"), ("Parquet", "http"), ("tar", "http"), ("TFRecord", "memory")],
    indirect=["written"],
)
def test_remote_files_give_the_same_batches(
    written, scheme, expected_batches, tmp_path, monkeypatch
):
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.0))
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
        assert_equal_batches(first_batches(data_set), expected_batches)
        count = len(server.requests)
        again = first_batches(data.load(name, place), count=5)
        assert_equal_batches(again, expected_batches[:5])
        # Everything is in the cache but for the sizes of files.
        assert all(x[1] == ("0", "0") for x in server.requests[count:])


@pytest.mark.parametrize("container", CONTAINERS)
def test_images_for_training_and_for_testing_are_compared(container, tmp_path):
    write, name, _ = CONTAINERS[container]
    write(tmp_path / "root", examples(COUNT))
    write(tmp_path / "root", examples(6), "test")
    lines, picture = [], str(tmp_path / "picture.png")
    check(name, str(tmp_path / "root"), grid_path=picture, say=lines.append)
    [line] = [x for x in lines if x.startswith("identical") and "test" in x]
    assert line.split()[1:7] == "6 test image(s) also in training,".split()


@pytest.mark.parametrize("pattern", ["{train,val}/*.tar", "*/0.tar"])
def test_folders_of_a_pattern_may_be_splits(tmp_path, pattern):
    for split in ("train", "val"):
        folder = tmp_path / "test" / split
        containers.write_tars(folder, examples(9), "x")
        (folder / "x-000.tar").rename(folder / "0.tar")
    data_set = data.load("webdataset", f"{tmp_path}/test/{pattern}")
    assert data_set.sources.keys() == {"training", "test"}  # val/ is used for both
    assert (data_set.train.num_examples, data_set.test.num_examples) == (9, 9)


@pytest.mark.row(60)
def test_row_60_two_sets_below_a_folder_are_not_one(tmp_path):
    """Configurations of a data set of Hugging Face."""
    for number, config in enumerate(("small", "large")):
        containers.write_parquet(tmp_path / config, examples(12 + number))
    text = message(data.load, "parquet", str(tmp_path))
    ways = re.findall(r"--data_dir=([^ ,]+?),|'--data_dir=(.*?)'", text)
    one, both = (first or second for first, second in ways)
    counts = [
        sum(x.num_examples for x in data.load("parquet", y).sources.values())
        for y in (one, both)
    ]
    assert counts == [13, 25]


def test_files_may_be_named_like_patterns(tmp_path):
    folder = tmp_path / "a {1..3}"
    containers.write_tars(folder, examples(9), "b[1]")
    for place in (folder, folder / "b[1]-000.tar"):
        data_set = data.load("webdataset", str(place))
        assert data_set.train.num_examples + data_set.test.num_examples == 9


def test_a_folder_at_a_url_is_the_folder_on_the_disk(tmp_path, monkeypatch):
    names = ["10/1", "2/1", "2/.x", "a-b/1", "a/b/1", "a/1", "__MACOSX/1", ".git/1"]
    for number, split in enumerate(("train/train", "val")):
        rows = zip(names, examples(len(names), number), strict=True)
        rows = [(f"{split}/{name}.png", *row[1:]) for name, row in rows]
        write_images(tmp_path, rows)
    for path in ("test/1.png", "other/1.png", "x.png"):
        write_images(tmp_path, [(path, *examples(1)[0][1:])])
    fsspec.filesystem("memory").put(str(tmp_path), f"/{tmp_path.name}", recursive=True)
    place = f"memory://{tmp_path.name}"
    on_disk = data.load("image_folder", str(tmp_path))
    at_url = data.load("image_folder", place)
    assert at_url.class_names == on_disk.class_names == ("10", "2", "a", "a-b")
    assert at_url.inventory.splits == on_disk.inventory.splits
    unused = at_url.inventory.names
    assert unused["folders of images without class folders"] == ["test/"]
    assert unused["folders next to train/"] == ["other/"]
    for split, source in on_disk.sources.items():
        assert checksum(at_url.sources[split]) == checksum(source)
        for index in range(source.num_examples):
            path = source.location(index).replace(str(tmp_path), place)
            assert at_url.sources[split].location(index) == path
    monkeypatch.setattr(reading, "OTHER_BYTES", 0)
    with pytest.raises(DataError, match="at most 72 are read with max_image_pixels=9"):
        data.load("image_folder", place, max_image_pixels=9)


def test_the_cache_of_remote_files_is_bounded(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1000)
    monkeypatch.setenv("TOWERS_CACHE_GB", "2e-5")  # 20 blocks
    content = np.random.default_rng(0).bytes(100_500)
    (tmp_path / "file").write_bytes(content)
    with serving(tmp_path) as server:
        path = f"{server.url}/file"
        for first in (0, 99_000, 50_000, 700, 100_499):
            assert reading.read_range(path, first, 1) == content[first : first + 1]
        for first in range(0, 98_000, 2100):
            read = reading.read_range(path, first, 2000)
            assert read == content[first : first + 2000]
            files = (cache / "remote").rglob("*-*")
            sizes = [path.stat().st_size for path in files]
            assert sum(sizes) <= 21_000
        with pytest.raises(ValueError, match="ends 500 bytes too early"):
            reading.read_range(path, 100_000, 1000)
        (cache / "remote" / "x").symlink_to("x.partial")  # renamed since it was listed
        with open(reading.local_copy(path), "rb") as file:
            assert file.read() == content
        server.fail = 9
        monkeypatch.setattr(reading, "PAUSES", (0.0, 0.0))
        with pytest.raises(UnavailableDataError, match=r"cannot be fetched: .*503"):
            reading.read_range(f"{server.url}/other", 0, 1)


# Files that are not what they should be.

NAMES = '{"info": {"features": {"label": {"_type": "ClassLabel", "names": %s}}}}'


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    """Changes a bit in the middle of an image."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def columns(table):
    return lambda path: parquet.write_table(table, path)


def members(*names):
    def spoil(path):
        with tarfile.open(path, "w") as archive:
            for name in names:
                containers.add_member(archive, name, b"1")

    return spoil


def write_records(path, *records):
    """Records of features, name -> values of one type."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for features in records:
            example = tf.train.Example()
            for name, values in features.items():
                kind = "bytes_list" if isinstance(values[0], bytes) else "int64_list"
                feature = example.features.feature[name]
                getattr(feature, kind).value.extend(values)
            writer.write(example.SerializeToString())


def two_labels(path):
    one, two = {"image/encoded": [b"x"]}, {"image/class/label": [1, 2]}
    write_records(path, one | {"image/class/label": [1]}, one | two)


def packed(path):
    path.write_bytes(gzip.compress(path.read_bytes()))


def pointer(path):
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )


def metadata(text):
    about = {b"huggingface": text.encode()}
    return columns(containers.table(examples(20)).replace_schema_metadata(about))


THREE, XY = containers.table([("x", 3, b"y")]), pyarrow.table({"a": ["x"], "b": [1]})
PICTURE = pyarrow.table({"picture": [b"x"], "label": [1]})
SPOILED = [
    ("TFRecord", packed, "is compressed by gzip"),
    ("tar", packed, "is compressed; unpack it"),
    ("TFRecord", pointer, "is a pointer of Git LFS"),
    ("tar", pointer, "is a pointer of Git LFS"),
    ("Parquet", pointer, "is a pointer of Git LFS"),
    ("Parquet", metadata(NAMES % 5), "no texts for the classes of label"),
    ("Parquet", metadata(NAMES % "[1, 2]"), "no texts for the classes of label"),
    ("Parquet", metadata("[" * 9**5), "has other columns than"),
    ("Parquet", metadata("[1]"), "has other columns than"),
    ("Parquet", cut, "cannot be read: "),
    (
        "Parquet",
        columns(PICTURE),
        "other columns than .*: picture and label (integers)",
    ),
    ("Parquet", columns(THREE), "row 0 has the label 3, expected 0 to 2"),
    ("Parquet", columns(XY), "no image column found among a, b; choose one"),
    ("tar", cut, "breaks off"),
    ("tar", lambda path: path.write_bytes(b"x" * 9000), "is not a tar file"),
    ("tar", lambda path: path.write_bytes(b""), "the file is empty"),
    ("tar", members("a.png", "a.cls", "b.png"), "b.png has no label in cls or json or"),
    (
        "tar",
        members("a.jpg", "a.mask.png", "a.cls"),
        "has two images, jpg and mask.png",
    ),
    ("TFRecord", cut, "record 0 or one of the next"),
    ("TFRecord", flip, "corrupted record"),
    ("TFRecord", two_labels, "record 1 (counted from 0) has several labels; one"),
    ("TFRecord", lambda path: write_records(path, {}), "has no bytes in image/encoded"),
]


@pytest.mark.parametrize("name, spoil, words", SPOILED)
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path, name, spoil, words):
    write, dataset, pattern = CONTAINERS[name]
    write(tmp_path, examples(COUNT))
    path = sorted(tmp_path.iterdir())[1]
    data.load(dataset, str(tmp_path / pattern))  # an index of the file is kept
    spoil(path)
    text = message(data.load, dataset, str(tmp_path / pattern))
    assert text.startswith(str(path)) and re.search(
        re.escape(words).replace(r"\.\*", ".*"), text
    )


def test_paths_of_images_in_a_parquet_file_are_no_images(tmp_path):
    write_folder(tmp_path, "photos", {"ant": 3, "cat": 3})
    paths = sorted(map(str, tmp_path.glob("photos/*/*.png")))
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = pyarrow.array([{"path": path} for path in paths], kind)
    file = tmp_path / "train.parquet"
    parquet.write_table(containers.table([("", 0, b"")] * 6, image=images), file)
    for number in range(2):
        load = functools.partial(data.load, bad_images="skip")
        text = message(load, "parquet", str(file))
        assert text.startswith(f"{file}: ") and paths[0] in text
        folders = re.findall(r"--data_dir=(\S+)", text)
        assert len(folders) == 1 - number  # if the files are here
        for folder in folders:
            assert data.load("image_folder", folder).class_names == ("ant", "cat")
        shutil.rmtree(tmp_path / "photos", ignore_errors=True)


def test_a_row_group_that_cannot_be_read_is_named(tmp_path):
    containers.write_parquet(tmp_path, examples(COUNT))
    path = min(tmp_path.iterdir())
    source = data.load("parquet", str(tmp_path)).test
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(36)  # the header of its first page
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        all_of(data.load("parquet", str(tmp_path)).train)
    assert str(caught.value).startswith(f"{path}: image ")
    assert "row group 0 cannot be read" in str(caught.value)
    assert source.num_examples == 6


def test_labels_of_two_widths_are_one_kind_and_columns_are_listed(tmp_path):
    for number, kind in enumerate((pyarrow.int32(), pyarrow.int64())):
        table = pyarrow.table(
            {
                "img": [content for _, _, content in examples(20)],
                "label": pyarrow.array([label for _, label, _ in examples(20)], kind),
                "width": range(20),
            }
        )
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    data_set = data.load("parquet", str(tmp_path))
    assert data_set.class_names == ("0", "1", "2")
    assert data_set.train.num_examples + data_set.test.num_examples == 40
    assert data_set.inventory.inferred["columns"].startswith("img and label")
    assert data_set.inventory.names["columns"] == ["width"]


@pytest.mark.parametrize("label", ["class_id", "class_name"])
def test_other_keys_of_records_are_listed_and_the_hint_works(tmp_path, label):
    records = [
        {
            "jpeg": [content],
            "size": [6],
            label: [number if label == "class_id" else b"%d" % number],
        }
        for _, number, content in examples(30)
    ]
    write_records(tmp_path / "train.tfrecord", *records)
    text = message(data.load, "tfrecord", str(tmp_path))
    assert "jpeg (bytes)" in text and "--columns=image:KEY" in text
    role = "label" if label == "class_id" else "text"
    with pytest.raises(DataError) as caught:
        data.load("tfrecord", str(tmp_path), columns="image:jpeg")
    assert f"{label} (" in str(caught.value) and f"{role}:NAME" in str(caught.value)
    write_records(tmp_path / "test.tfrecord", {"jpeg": records[0]["jpeg"]})
    data_set = data.load(
        "tfrecord", str(tmp_path), columns=f"image:jpeg,{role}:{label}"
    )
    assert data_set.class_names == ("0", "1", "2")
    assert data_set.inventory.unused["splits without labels"] == 1
    assert data_set.inventory.names["features"] == ["size (int64)"]


# Files of other programs.


@pytest.mark.parametrize(
    "name, dataset, class_names",
    [
        ("train-00000-of-00001.parquet", "parquet", ("ant", "cat")),
        ("train-000.tar", "webdataset", ("0", "1")),
        ("table.csv", "table", ("ant", "cat")),
        ("table.parquet", "table", ("ant", "cat")),
        ("table.jsonl", "table", ("ant", "cat")),
    ],
)
def test_files_of_datasets_webdataset_and_pandas_are_read(
    tmp_path, name, dataset, class_names
):
    """Image i of six has the value 10 i and the label i % 2; `files_of_others.json` has
    the files, packed, as datasets 5.2.0, webdataset 1.0.2 and pandas 3.1.1 wrote them.
    """
    (tmp_path / name).write_bytes(containers.file_of_others(name))
    for number in range(6):
        image = np.full((8, 6, 3), 10 * number, np.uint8)
        (tmp_path / f"{number}.png").write_bytes(png(image))
    data_set = data.load(dataset, str(tmp_path / name))
    assert data_set.class_names == class_names
    values = []
    for source in data_set.sources.values():
        for image, label in zip(*all_of(source), strict=True):
            assert np.ptp(image) == 0 and label == image[0, 0, 0] // 10 % 2
            values.append(int(image[0, 0, 0]))
    assert sorted(values) == [0, 10, 20, 30, 40, 50]
    if dataset == "table":
        assert sorted(values[4:]) == [40, 50]  # the split for testing


def test_formats_of_tar_and_kinds_of_labels(tmp_path):
    rows = examples(3)
    long_name = "folder/" * 20 + "name" * 20
    for number, form in enumerate(
        (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    ):
        name = long_name if form != tarfile.USTAR_FORMAT else "folder/ab"
        with tarfile.open(tmp_path / f"{number}.tar", "w", format=form) as archive:
            for key, (_, label, content) in enumerate(rows):
                about = json.dumps({"kind": str(label), "label": "wrong"}).encode()
                containers.add_member(archive, f"{name}{key}.input.png", content)
                containers.add_member(archive, f"{name}{key}.json", about)
                containers.add_member(archive, f"{name}{key}.target.png", b"x")
    command = ["tar", "--sort=name", "-cf", "3.tar", "-C", "plain", "."]
    for key, (_, label, content) in enumerate(rows):
        (tmp_path / "plain").mkdir(exist_ok=True)
        (tmp_path / "plain" / f"{key}.input.png").write_bytes(content)
        (tmp_path / "plain" / f"{key}.json").write_text(f'{{"kind": {label}}}')
    subprocess.run(command, cwd=tmp_path, check=True)
    columns = "image:input.png,label:json:kind"
    data_set = data.load("webdataset", str(tmp_path / "*.tar"), columns=columns)
    assert data_set.class_names == ("0", "1", "2")
    assert data_set.train.num_examples + data_set.test.num_examples == 12
    for source in data_set.sources.values():
        for image, label in zip(*all_of(source), strict=True):
            np.testing.assert_array_equal(image, random_pixels([0, label]))


# Order.


def test_an_order_of_blocks_has_every_example_once_and_few_blocks_at_a_time():
    blocks = np.repeat(np.arange(100), np.arange(100) % 7 + 1)
    order = BlockOrder(blocks, window=5)
    orders = [order(1, tf.constant(epoch, tf.int64)).numpy() for epoch in (0, 1, 0)]
    np.testing.assert_array_equal(orders[0], orders[2])
    for one in orders[:2]:
        np.testing.assert_array_equal(np.sort(one), np.arange(len(blocks)))
        places = [np.flatnonzero(blocks[one] == block) for block in range(100)]
        active = np.zeros(len(blocks))
        for place in places:
            active[place.min() : place.max() + 1] += 1
        assert active.max() <= 5 + 1 + 1 and active.mean() > 2
        # Blocks are far from their order, and examples from that in their block.
        firsts = np.array([place.min() for place in places])
        assert abs(np.corrcoef(firsts, np.arange(100))[0, 1]) < 0.4
        assert (np.diff(one) < 0).mean() > 0.3
    assert (orders[0] != orders[1]).mean() > 0.9


def test_row_groups_are_read_once_an_epoch_where_they_do_not_fit(tmp_path, monkeypatch):
    containers.write_parquet(tmp_path, examples(150))
    data_set = data.load(
        "parquet", str(tmp_path), shuffle_buffer_mb=0.0025, image_cache_mb=0.0
    )
    source, reads = data_set.train, []
    order = block_order(source, 0.0025)
    read_group = ParquetIndex._read_group
    monkeypatch.setattr(
        ParquetIndex,
        "_read_group",
        lambda self, *place: reads.append(place) or read_group(self, *place),
    )
    indices = order(0, tf.constant(0, tf.int64)).numpy()
    for index in indices:
        source.read(np.array([index]))
    groups = len(np.unique(source.blocks))
    assert groups == 26 and groups - 5 <= len(reads) <= 1.5 * groups
    reads.clear()
    for index in np.random.default_rng(0).permutation(indices):
        source.read(np.array([index]))
    assert len(reads) > 2 * groups
    assert block_order(source, 1000) is None
    assert block_order(data.load("shapes").train, 1e-9) is None
