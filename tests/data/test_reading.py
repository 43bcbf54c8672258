"""Bytes of local and remote files that change, are cut, or cannot be read."""

import contextlib
import errno
import os
import pathlib
import subprocess
import sys

import containers
import fsspec
import numpy as np
import pytest
from containers import CONTAINERS, assert_equal_images, examples, serving
from pictures import png
from PIL import Image
from prepared_sets import all_of, message

from towers import data
from towers.data.files import reading, samples
from towers.data.sources import known_labels
from towers.errors import ConfigError, DataError, report


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWERS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.0))
    return tmp_path / "cache"


def write_tar(path, labels):
    """A tar file of gray images whose value is their label."""
    rows = [
        (f"{i:02}.png", int(x), png(np.full((40, 40, 3), 80 * x + 20, np.uint8)))
        for i, x in enumerate(labels)
    ]
    rows = [(name, label, content + bytes(2000)) for name, label, content in rows]
    folder = path.with_suffix("")
    containers.write_tars(folder, rows[:17], "x")
    (folder / "x-000.tar").replace(path)


@contextlib.contextmanager
def change_may_be_noticed():
    try:
        yield
    except DataError as error:
        if "was replaced or changed after" not in str(error):
            raise


def assert_right_or_refused(read):
    """Pixels and labels belong together, or the program says that the file changed."""
    with change_may_be_noticed():
        images, labels = read()
        np.testing.assert_array_equal((images[:, 0, 0, 0] - 20) // 80, labels)


ORDERS = [0, 1] * 8, [0, 0, 1, 1] * 4


@pytest.mark.row(59)
@pytest.mark.parametrize("change", ["size", "etag", "last_modified"])
def test_row_59_a_remote_file_that_changes_is_never_read_with_old_labels(
    tmp_path, cache, change, monkeypatch
):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 8192)
    write_tar(tmp_path / "a.tar", ORDERS[0])
    with serving(tmp_path) as server:
        names = {"size": "Content-Range", "etag": "ETag"}
        server.headers.append(names.get(change, "Last-Modified"))
        place = f"{server.url}/a.tar"
        old = data.load("webdataset", place, image_cache_mb=0)
        some = known_labels(old.train)
        write_tar(tmp_path / "a.tar", ORDERS[1])
        with open(tmp_path / "a.tar", "ab") as file:
            file.write(bytes(10240) if change == "size" else b"")
        os.utime(tmp_path / "a.tar", (10**9, 10**9))
        for path in (cache / "remote").rglob("*-*"):
            path.unlink()
        assert_right_or_refused(lambda: all_of(old.train))
        # A new start reads what is there now, whatever the cache has.
        new = data.load("webdataset", place, image_cache_mb=0)
        labels = known_labels(new.train)
        assert len(labels) != len(some) or (labels != some).any()
        images, labels = all_of(new.train)
        np.testing.assert_array_equal((images[:, 0, 0, 0] - 20) // 80, labels)


@pytest.mark.row(59)
def test_row_59_a_file_in_a_bucket_that_changes_is_read_anew(tmp_path):
    memory, seen = fsspec.filesystem("memory"), []
    for order in ORDERS:
        write_tar(tmp_path / "a.tar", order)
        memory.pipe(f"/{tmp_path.name}/a.tar", (tmp_path / "a.tar").read_bytes())
        data_set = data.load("webdataset", f"memory://{tmp_path.name}/a.tar")
        images, labels = all_of(data_set.train)
        np.testing.assert_array_equal((images[:, 0, 0, 0] - 20) // 80, labels)
        seen.append(labels)
    assert (seen[0] != seen[1]).any()
    for content in (b"1" * 1000, b"2" * 1000):
        memory.pipe(f"/{tmp_path.name}/x.bin", content)
        copy = reading.local_copy(f"memory://{tmp_path.name}/x.bin")
        assert pathlib.Path(copy).read_bytes() == content


@pytest.mark.row(59)
@pytest.mark.parametrize("container", ["tar", "Parquet", "TFRecord"])
@pytest.mark.parametrize("in_place", [True, False])
def test_row_59_a_local_file_that_is_replaced_is_noticed(tmp_path, container, in_place):
    write, name, _ = CONTAINERS[container]
    rows = examples(16)
    write(tmp_path / "old", rows)
    write(tmp_path / "new", [(x, (y + 1) % 3, z) for x, y, z in rows[::-1]])
    [old], [new] = ([*(tmp_path / x).iterdir()] for x in ("old", "new"))
    options = {"image_cache_mb": 0, "image_size": 8, "shuffle_buffer_mb": 0.0001}
    data_set = data.load(name, str(old), **options)
    source = data_set.train
    expected = all_of(source)
    if in_place:
        old.write_bytes(new.read_bytes())
    else:  # with the same size and time, as of `cp -p`
        status = old.stat()
        os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.replace(new, old)
    for _ in range(2):
        with change_may_be_noticed():  # what is still open is read as it was
            for one, other in zip(all_of(source), expected, strict=True):
                np.testing.assert_array_equal(one, other)
    labels = known_labels(data.load(name, str(old), **options).train)
    assert len(labels) != len(expected[1]) or (labels != expected[1]).any()


@pytest.mark.row(59, 62)
@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "longer"])
def test_row_59_a_damaged_block_of_the_cache_is_fetched_again(tmp_path, cache, damage):
    write_tar(tmp_path / "a.tar", ORDERS[0])
    with serving(tmp_path) as server:
        place = f"{server.url}/a.tar"
        expected = data.load("webdataset", place, image_cache_mb=1).train
        all_of(expected)
        for path in (cache / "remote").rglob("*-*"):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            new = {"cut": content[:-9], "empty": b"", "longer": content + b"x"}
            path.write_bytes(new.get(damage, content))
        actual = data.load("webdataset", place, bad_images="skip").train
        assert_equal_images(actual, expected)


@pytest.mark.parametrize("how", ["no HEAD", "no length", "password"])
def test_servers_that_refuse_heads_or_tell_no_length(how, tmp_path):
    content = bytes(range(256)) * 40
    (tmp_path / "a b.bin").write_bytes(content)
    with serving(tmp_path) as server:
        place = f"{server.url}/a b.bin?X-Amz-Signature=[*]"
        if how == "no length":
            server.headers.clear()
        elif how == "password":
            server.password = "Basic bWU6c2VjcmV0"
            place = place.replace("//", "//me:secret@")
        assert reading.expand(place) == [place]
        assert reading.read_range(place, 300, 4) == bytes(range(44, 48))
        with open(reading.local_copy(place), "rb") as file:
            assert file.read() == content


def test_hosts_of_ipv6_are_not_patterns_and_files_are_not_doubled(tmp_path):
    assert reading.expand("http://[::1]:8/a{0..1}.tar?x=*") == [
        f"http://[::1]:8/a{i}.tar?x=*" for i in range(2)
    ]
    (tmp_path / "a.tar").touch()
    assert "names " in message(reading.expand, f"{tmp_path}/{{a,a}}.tar")
    assert "lists no files" in message(reading.expand, "https://host/*.tar")


@pytest.mark.row(62)
@pytest.mark.parametrize("code", [503, 429, 403, 404])
def test_row_62_faults_of_a_server_are_not_those_of_images(tmp_path, code):
    rows = examples(20)
    containers.write_csv(tmp_path, rows)
    with serving(tmp_path) as server:
        server.bad = {"/train/" + rows[3][0]: code}
        arguments = "table", f"{server.url}/train.csv"
        options = {"bad_images": "skip", "image_size": 8}
        if code == 404:  # it is missing, as on a disk
            data_set = data.load(*arguments, **options)
            count = data_set.train.num_examples + data_set.test.num_examples
            assert count == len(rows) - 1
            return
        with pytest.raises(DataError, match=f"cannot be fetched: .*{code}|{code}") as e:
            data.load(*arguments, **options)
        assert report("x", e.value) == (3 if code == 403 else 75)


@pytest.mark.row(62)
@pytest.mark.parametrize("name", ["EIO", "ESTALE", "EMFILE", "EACCES"])
def test_row_62_faults_of_a_disk_are_not_those_of_images(tmp_path, name, monkeypatch):
    number = getattr(errno, name)
    containers.write_images(tmp_path, examples(20))
    opened = reading.open_data_file

    def fail(path, *args):
        if str(path).endswith("7.png"):
            raise OSError(number, os.strerror(number), path)
        return opened(path, *args)

    monkeypatch.setattr(reading, "open_data_file", fail)
    with pytest.raises(DataError, match=os.strerror(number)) as caught:
        data.load("image_folder", str(tmp_path), bad_images="skip")
    assert "--bad_images=skip" not in str(caught.value)
    assert report("x", caught.value) == (3 if number == errno.EACCES else 75)


@pytest.mark.row(62)
def test_row_62_a_container_that_vanishes_is_not_skipped(tmp_path, monkeypatch):
    containers.write_tars(tmp_path, examples(40))
    settle = samples.settle_format

    def settle_and_remove(*args):
        settled = settle(*args)
        (tmp_path / "train-001.tar").unlink()
        return settled

    monkeypatch.setattr(samples, "settle_format", settle_and_remove)
    with pytest.raises(DataError, match=r"train-001\.tar: No such file"):
        data.load("webdataset", str(tmp_path), bad_images="skip")


@pytest.mark.slow
@pytest.mark.row(62)
def test_row_62_few_descriptors_are_enough_for_many_files(tmp_path):
    containers.write_tars(tmp_path, examples(17 * 60))
    code = """
import resource, sys
import tensorflow
limit = len(__import__("os").listdir("/proc/self/fd")) + 24
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from towers import data
x = data.load("webdataset", sys.argv[1], image_size=8, bad_images="skip")
print("images", x.train.num_examples + x.test.num_examples)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"images {17 * 60}" in done.stdout, done.stderr


def test_a_cache_that_cannot_be_written_is_named(tmp_path, cache, monkeypatch):
    cache.symlink_to(tmp_path / "not mounted")
    (tmp_path / "file").write_bytes(b"1")
    with serving(tmp_path) as server:
        text = message(reading.read_range, f"{server.url}/file", 0, 1)
        assert text.startswith(f"{cache}: remote files cannot be kept there: ")
        monkeypatch.setenv("TOWERS_CACHE_GB", "abc")
        with pytest.raises(ConfigError, match="TOWERS_CACHE_GB=abc"):
            reading.read_range(f"{server.url}/file", 0, 1)


@pytest.mark.parametrize("options", [{}, {"bad_images": "skip"}])
def test_the_kinds_of_faults_are_named_if_no_image_can_be_read(
    tmp_path, options, capfd
):
    names = [f"{folder}/{i}.tif" for folder in ("a", "b") for i in range(4)]
    for number, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if number % 4:
            path.write_text(f"version https://git-lfs.github.com/spec/v1\noid {name}\n")
        else:
            Image.fromarray(np.full((9, 9), np.nan, np.float32)).save(path)
    from towers.check.report import check

    load = data.load if options else check
    kwargs = options or {"grid_path": str(tmp_path) + ".png"}
    for size in (0, 8):
        with pytest.raises(DataError) as caught:
            load("image_folder", str(tmp_path), image_size=size, **kwargs)
        assert "is a pointer of Git LFS" in str(caught.value)
        assert "are not finite" in str(caught.value) or not size
    assert "TiffImagePlugin" not in capfd.readouterr().err
