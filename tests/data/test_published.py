"""CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST: their official files and archives, what
tensorflow-datasets prepared, and downloads from a server on this machine."""

import gzip
import hashlib
import os
import pickle
import shutil
import socket

import pytest
from containers import serving
from pictures import write_folder
from prepared_sets import (
    CIFAR,
    IMAGES,
    LABELS,
    MNIST,
    archive_of,
    assert_holds,
    change,
    message,
    official,
    shrink_published,
    write,
)

from towers import data
from towers.data.sets.official_files import PUBLISHED
from towers.data.sets.photos import photo_options
from towers.errors import ConfigError

every_set = pytest.mark.parametrize("name", PUBLISHED)
each_cifar = pytest.mark.parametrize("name", CIFAR)


@pytest.fixture(autouse=True)
def small_and_nothing_at_home(monkeypatch, tmp_path):
    """Files of few records; no data set in the usual places, no proxy, no network."""
    monkeypatch.chdir(tmp_path)
    shrink_published(monkeypatch, tmp_path)
    for kind in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{kind}_proxy", raising=False)
        monkeypatch.delenv(f"{kind}_PROXY".upper(), raising=False)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("Network is unreachable")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


@every_set
def test_official_files_are_found_in_every_usual_place(tmp_path, no_network, name):
    files, splits = official(name)
    for packed in (False, True) if name in MNIST else (False,):
        for place in (*PUBLISHED[name].folders, "."):
            home = tmp_path / f"{place.replace('/', '-')}-{packed}"
            write(home / "data" / place, files, packed)
            os.chdir(home)
            data_set = data.load(name)
            assert_holds(data_set, splits)
            assert data_set.origin == f"{home / 'data' / place} (official files)"


def test_the_table_is_that_of_the_data_sets(monkeypatch):
    """As tensorflow-datasets has it: addresses, checksums, classes, examples."""
    import tensorflow_datasets

    package = os.path.dirname(tensorflow_datasets.__file__)
    names = {
        "cifar10": ("airplane", "dog", "truck"),
        "cifar100": ("apple", "bed", "worm"),
        "mnist": ("0", "5", "9"),
        "fashion_mnist": ("T-shirt/top", "Sandal", "Ankle boot"),
    }
    monkeypatch.undo()
    for name, known in PUBLISHED.items():
        with open(os.path.join(package, "url_checksums", f"{name}.txt")) as file:
            sums = {url: sha256 for url, _, sha256, _ in map(str.split, file)}
        assert {known.url(x): y for x, y in known.archives.items()} == sums
        classes = known.class_names
        assert (classes[0], classes[5], classes[-1]) == names[name]
        assert len(set(classes)) == (100 if name == "cifar100" else 10)
        counts = [sum(x.values()) for x in known.files.values()]
        assert counts == ([50_000, 10_000] if name in CIFAR else [60_000, 10_000])


BIN, T10K_IMAGES, T10K_LABELS = "data_batch_3.bin", f"t10k-{IMAGES}", f"t10k-{LABELS}"
# What is done to a file, and what is said of it.
WRONG = [
    (BIN, lambda x: x[:9219], "(4 records of 3073), got 9219"),
    (BIN, lambda x: x + b"\0", "got more"),
    (BIN, lambda x: x[:6146] + b"\x0a" + x[6147:], "record 2 (counted from 0)"),
    ("train.bin", lambda x: b"\x14" + x[1:], "coarse label 20, expected 0 to 19"),
    (T10K_IMAGES, lambda x: b"PK" + x[2:], "begins with 0x504b0803"),
    (T10K_IMAGES, lambda x: x[:-785], "records of 784), got "),
    (T10K_LABELS, lambda x: x + b"\0", "got more"),
]


@pytest.mark.parametrize("file, damage, words", WRONG)
@pytest.mark.row(21)
def test_row_21_wrong_files_are_named(tmp_path, file, damage, words):
    name = {BIN: "cifar10", "train.bin": "cifar100"}.get(file, "mnist")
    files, _ = official(name)
    for packed in (False, True) if name == "mnist" else (False,):
        folder = tmp_path / str(packed)
        write(folder, files | {file: damage(files[file])}, packed)
        text = message(data.load, name, str(folder))
        assert text.startswith(f"{folder / file}{'.gz' * packed}: ") and words in text


def test_other_data_sets_with_files_of_these_names_are_refused(tmp_path):
    files, _ = official("fashion_mnist")
    write(tmp_path, files)
    text = message(data.load, "mnist", str(tmp_path))
    assert "--dataset=fashion_mnist" in text
    labels = bytes([8, 7, 0, 1, 4, 2, 4, 8, 1, 1])
    name = f"train-{LABELS}"
    write(tmp_path, {name: files[name][:8] + labels + files[name][18:]})
    for mnist in MNIST:
        assert "np.savez" in message(data.load, mnist, str(tmp_path))


@pytest.mark.parametrize(
    "name, place",
    [
        ("cifar10", "cifar-10-batches-py/data_batch_1"),
        ("cifar10", "cifar-10-python.tar.gz"),
        ("cifar100", "cifar-100-python/train"),
    ],
)
@pytest.mark.row(22)
def test_row_22_pickled_layout_is_refused(tmp_path, no_network, name, place):
    class MakeFolder:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    pickled = tmp_path / place
    pickled.parent.mkdir(exist_ok=True)
    pickled.write_bytes(pickle.dumps(MakeFolder()))
    text = message(data.load, name, str(tmp_path))
    assert "pickled layout" in text and f"{PUBLISHED[name].folders[0]}/*.bin" in text
    assert str(tmp_path / place.split("/")[0]) in text
    assert not (tmp_path / "executed").exists()


@pytest.mark.row(57)
def test_what_is_in_a_folder_decides_where_no_data_set_is_named(tmp_path, no_network):
    for name in ("cifar10", "mnist"):
        write(tmp_path / name / PUBLISHED[name].folders[-1], official(name)[0])
        assert photo_options(str(tmp_path / name)) == {"dataset": name}
    write(tmp_path / "plain", official("mnist")[0])
    assert photo_options(str(tmp_path / "plain")) == {"dataset": "mnist"}
    (tmp_path / "set/flowers/1.0.0").mkdir(parents=True)
    (tmp_path / "set/flowers/1.0.0/dataset_info.json").touch()
    assert photo_options(str(tmp_path / "set")) == {"dataset": "tfds:flowers"}
    shutil.copytree(tmp_path / "mnist", tmp_path / "cifar10", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="cifar10, mnist: name one"):
        photo_options(str(tmp_path / "cifar10"))


@pytest.mark.row(57)
def test_nothing_is_downloaded_into_a_folder_of_other_things(
    tmp_path, monkeypatch, server
):
    """Nor is the data set of another folder taken where it holds images."""
    splits = put_on(server, tmp_path, monkeypatch, "mnist")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    assert "such as notes.txt" in message(data.load, "mnist", "mine")
    assert os.listdir("mine") == ["notes.txt"]
    assert_holds(data.load("mnist"), splits)
    write_folder(tmp_path / "photos", ".", {"cat": 2, "dog": 2})
    for folder in ("photos", "photos/cat"):
        assert "--dataset=image_folder" in message(data.load, "mnist", folder)
    (tmp_path / "mine/notes.txt").rename(tmp_path / "mine/cifar-10-binary.tar.gz")
    shutil.rmtree(tmp_path / "keras")
    assert_holds(data.load("mnist", "mine"), splits)


@each_cifar
def test_an_archive_is_read_in_place(tmp_path, monkeypatch, no_network, name):
    files, splits = official(name)
    content, [archive] = archive_of(name, files), PUBLISHED[name].archives
    path = tmp_path / "home" / archive
    write(tmp_path / "home", {archive: content})
    change(monkeypatch, name, archives={archive: hashlib.sha256(content).hexdigest()})
    data_set = data.load(name, str(tmp_path / "home"))
    assert_holds(data_set, splits)
    assert data_set.origin == f"{path} (official archive, checked)"
    assert os.listdir(tmp_path / "home") == [path.name]
    assert not (tmp_path / "outside").exists()


@each_cifar
def test_what_tensorflow_datasets_prepares_comes_in_the_official_order(
    tmp_path, monkeypatch, no_network, name
):
    """The real builder reads the small files."""
    import tensorflow_datasets

    files, splits = official(name)
    known = PUBLISHED[name]
    names = "\n".join(known.class_names).encode()
    for file in ("fine_label_names.txt", "batches.meta.txt"):
        files[file] = names
    files["coarse_label_names.txt"] = "\n".join(map(str, range(20))).encode()
    write(tmp_path / "files" / known.folders[0], files)
    monkeypatch.setattr(
        tensorflow_datasets.download.DownloadManager,
        "download_and_extract",
        lambda self, url: str(tmp_path / "files"),
    )
    shared = tmp_path / "shared"
    tensorflow_datasets.builder(name, data_dir=shared).download_and_prepare()
    for data_dir in ("", str(shared)):
        data_set = data.load(name, data_dir)
        assert data_set.name == name and data_set.class_names == known.class_names
        assert data_set.origin.startswith(f"tensorflow-datasets {name}/")
        assert_holds(data_set, splits)


@every_set
@pytest.mark.row(19)
def test_row_19_no_network(tmp_path, no_network, name):
    text = message(data.load, name, str(tmp_path / "none"))
    known = PUBLISHED[name]
    for words in (
        f"{known.title} was not found: no {known.folders[0]}, ",
        f"{tmp_path / 'none'} (no such folder), ",
        str(tmp_path / "shared"),
        str(tmp_path / "keras"),
        "no download: ",
        "Network is unreachable",
        f"from {known.address} on a machine with",
        "--data_dir",
        "--dataset=shapes needs no data",
    ):
        assert words in text


@pytest.fixture
def server(tmp_path):
    """The address of a server of the files in `tmp_path / "served"`."""
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as server:
        yield f"{server.url}/"


def put_on(server, tmp_path, monkeypatch, name):
    """Serve the archives of the small data set; return its examples."""
    files, splits = official(name)
    contents = [archive_of(name, files)]
    if name in MNIST:
        contents = [gzip.compress(files[key]) for key in sorted(files)]
    sums = {}
    for path, content in zip(PUBLISHED[name].archives, contents, strict=True):
        (tmp_path / "served" / os.path.basename(path)).write_bytes(content)
        sums[path] = hashlib.sha256(content).hexdigest()
    change(monkeypatch, name, address=server, archives=sums)
    return splits


@every_set
@pytest.mark.parametrize("data_dir", ["", "mine"])
def test_what_is_not_there_is_downloaded(tmp_path, monkeypatch, server, name, data_dir):
    splits = put_on(server, tmp_path, monkeypatch, name)
    assert_holds(data.load(name, data_dir), splits)
    folder, served = tmp_path / (data_dir or "keras/datasets"), tmp_path / "served"
    left = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert left == sorted(os.listdir(served))
    last = max(folder.rglob("*.gz"))
    last.unlink()  # as if a kill had ended the download before it
    assert_holds(data.load(name, data_dir), splits)
    shutil.rmtree(served)
    assert_holds(data.load(name, data_dir), splits)


@pytest.mark.row(20)
def test_row_20_a_bad_download_then_a_clean_second_try(tmp_path, monkeypatch, server):
    splits = put_on(server, tmp_path, monkeypatch, "cifar10")
    [path] = (tmp_path / "served").iterdir()
    content = path.read_bytes()
    for bad in (content[:-1] + b"?", content[:50]):
        path.write_bytes(bad)
        text = message(data.load, "cifar10", "mine")
        expected, found = (hashlib.sha256(x).hexdigest() for x in (content, bad))
        assert f"expected {expected} but got {found}" in text
        assert "to get it, fetch" in text and not os.listdir(tmp_path / "mine")
    path.write_bytes(content)
    (tmp_path / "mine" / "tmpabcdefgh").write_bytes(b"left by a kill")
    assert_holds(data.load("cifar10", "mine"), splits)
