"""Published data sets: CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST.

Their official files are read from a folder, packed or not, or what tensorflow-datasets
prepared of them; all give the same arrays in the same order. The network is used only
if no folder has the data set. Pickled files are refused, because unpickling runs the
code that a file holds.
"""

import contextlib
import gzip
import hashlib
import itertools
import os
import tarfile
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from towers import console
from towers.data.files.class_folders import has_classes
from towers.data.files.paths import data_folder, is_image_name, reason
from towers.data.files.reading import open_data_file
from towers.data.sets import tfds
from towers.data.sets.official_files import PUBLISHED, Published, RecordFile
from towers.data.sources import ArraySource, DataSet, channel_moments
from towers.errors import DataError
from towers.messages import one_line, shown

MAX_ARCHIVE_BYTES = 2**28
PACKING_BYTES = 2**20  # bytes allowed in a gzip file beyond twice its uncompressed size

# Longest wait for a connection, and longest pause in a download.
CONNECT_SECS, STALL_SECS = 1.2, 30.0


def load(name: str, data_dir: str = "") -> DataSet:
    """Read a published data set, in the official order, or download it.

    `data_dir` holds the official files, or what tensorflow-datasets prepared; empty
    means `data`. The folders of Keras' downloads and of tensorflow-datasets come next,
    and a download last: into `data_dir` if nothing else is in it, or without one into
    the folder of Keras' downloads. DataError if it is not found, or another one is.
    """
    published, root = PUBLISHED[name], data_folder(data_dir)
    downloads, shared = downloads_folder(), tfds.default_dir()
    if data_set := _read(name, root):
        return data_set
    _refuse_pickled(published, root)
    names = os.listdir(root) if os.path.isdir(root) else []
    if data_dir and (has_classes(root) or any(map(is_image_name, names))):
        way = "set --dataset=image_folder, or omit --data_dir"
        raise DataError(f"{root}: holds images, and not {published.title}; {way}")
    if data_set := _read(name, downloads) or _read(name, shared):
        return data_set
    folder = root if data_dir else downloads
    if data_dir and (others := _other_things(names)):
        what = f"{root} has other things than {published.title}, such as "
        what += shown(others[0], 60)
        way = "name an empty folder to download into, or omit --data_dir"
        raise DataError(f"{what}; {way}; {published.how_to_get_it}")
    try:
        download(published, folder)
    except (OSError, ValueError) as error:
        read_official(published, folder)  # names what a download lacks
        missing = "" if os.path.isdir(root) else " (no such folder)"
        raise DataError(
            f"{published.title} was not found: no {published.folders[0]}, "
            f"{next(iter(published.archives))} or {name}/VERSION in {root}{missing}, "
            f"{downloads} or {shared}; no download: {one_line(error, 400)}; "
            f"{published.how_to_get_it}"
        ) from error
    if data_set := _read(name, folder):
        return data_set
    raise DataError(f"{folder}: {published.title} was removed after its download")


def download(published: Published, folder: str) -> None:
    """Download what a folder lacks; ValueError if an archive has another checksum."""
    import pooch  # takes a while

    seconds = CONNECT_SECS, STALL_SECS
    http = pooch.HTTPDownloader(progressbar=console.is_terminal(), timeout=seconds)
    # Fails without a network, before pooch makes the folder.
    http(published.address, None, None, check_only=True)
    for archive, sha256 in published.archives.items():
        if not os.path.exists(os.path.join(folder, archive)):
            url = published.url(archive)
            pooch.retrieve(url, sha256, archive, folder, downloader=http)


def data_sets_in(root: str) -> list[str]:
    """Return the names, for --dataset, of the data sets whose files a folder holds.

    MNIST stands for Fashion-MNIST too; loading tells them apart.
    """
    names: dict[str, str] = {}
    for name, published in PUBLISHED.items():
        files = [file.name for file in published.record_files("train")]
        paths = [f"{folder}/{file}" for folder in published.folders for file in files]
        for path in (*paths, *files, *published.archives, *published.pickled):
            if _find(root, path):
                names.setdefault(path, name)
    for name in os.listdir(root):
        if tfds.find_prepared(name, root):
            names[name] = name if name in PUBLISHED else tfds.PREFIX + name
    return list(dict.fromkeys(names.values()))


def _other_things(names):
    """Return the names in a folder that no download leaves there."""
    paths = itertools.chain(*((*x.archives, *x.folders) for x in PUBLISHED.values()))
    ours = {path.split("/")[0] for path in paths}
    # pooch names its files tmp... until they are complete.
    return sorted(x for x in names if x not in ours and not x.startswith((".", "tmp")))


def downloads_folder() -> str:
    """Return the folder of Keras' downloads."""
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    return os.path.abspath(os.path.join(os.path.expanduser(home), "datasets"))


def _read(name: str, root: str) -> DataSet | None:
    """Return the data set from a folder; None if a part of the download is missing."""
    published = PUBLISHED[name]
    present = [_find(root, x.removesuffix(".gz")) for x in published.archives]
    if any(present) and not all(present):
        return None
    if official := read_official(published, root):
        train, test, origin = official
    elif folder := tfds.find_prepared(name, root):
        train, test, origin, names = tfds.read_arrays(folder, published.image_shape)
        if names != published.class_names:
            text = shown(" ".join(names[:20]), 100) or "none"
            why = f"expected the classes of {published.title}, got {text}"
            raise DataError(f"{folder}: {why}")
    else:
        return None
    mean, std = channel_moments(train[0])
    return DataSet(
        name=name,
        train=ArraySource(*train),
        test=ArraySource(*test),
        class_names=published.class_names,
        mean=mean,
        std=std,
        origin=origin,
    )


@contextlib.contextmanager
def _reading(path):
    try:
        yield
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error


def _refuse_pickled(published, root):
    for name in published.pickled:
        path, archive = os.path.join(root, name), next(iter(published.archives))
        if os.path.exists(path):
            raise DataError(
                f"{path} is the pickled layout of {published.title}, which could run "
                f"code; the binary one is read: {published.folders[0]}/*.bin or "
                f"{archive} ({published.url(archive)}) in {root}"
            )


def read_official(
    published: Published, root: str
) -> tuple[tfds.Examples, tfds.Examples, str] | None:
    """Read training and test examples of official files, and their origin.

    None if the folder has none. DataError if a file is missing or wrong.
    """
    splits = [published.record_files(split) for split in published.files]
    files = [*itertools.chain(*splits)]
    archive = os.path.join(root, next(iter(published.archives)))
    for folder in (*(os.path.join(root, name) for name in published.folders), root):
        # One file is enough; an error then names those that are missing.
        if any(_find(folder, file.name) for file in files):
            counts, origin = published.label_counts, f"{folder} (official files)"
            records = (read_file(file, folder, counts) for file in files)
            break
    else:
        if published.first_labels or not os.path.exists(archive):
            return None
        records = _read_archive(published, archive, files)
        origin = f"{archive} (official archive, checked)"
    train, test = (_examples(split, records, published) for split in splits)
    first = tuple(train[1][: len(published.first_labels)].tolist())
    if first != published.first_labels:  # other data sets have files of these names
        way = "save x_train, y_train, x_test, y_test with np.savez, and name the file"
        for name, other in PUBLISHED.items():
            if first == other.first_labels:
                way = f"they are those of {other.title}, which --dataset={name} reads"
        why = f"the first labels are not those of {published.title}"
        raise DataError(f"{origin}: {why}; {way}")
    return train, test, origin


def _examples(files, records, published):
    """Return images and labels of some files, of whose records the next are read."""
    num_images = sum(x.num_records for x in files if "planes" in x.dtype.names)
    images, labels = np.empty((num_images, *published.image_shape), np.uint8), []
    end = 0
    for file in files:
        values, names = next(records), file.dtype.names
        if "planes" in names:
            begin, end = end, end + len(values)
            images[begin:end] = values["planes"].transpose(0, 2, 3, 1)
        labels += [values[x].astype(np.int32) for x in names if x != "planes"][-1:]
        del values  # before the next file is read
    return images, np.concatenate(labels)


def _find(folder, name):
    for path in (os.path.join(folder, name), os.path.join(folder, f"{name}.gz")):
        if os.path.exists(path):
            return path
    return None


def read_file(wanted: RecordFile, folder: str, counts: Mapping[str, int]) -> np.ndarray:
    """Read the records of a file of a folder, packed or not, as `read_records`."""
    path = _find(folder, wanted.name)
    if path is None:
        raise DataError(f"{folder}: {wanted.name}, or that with .gz, is missing")
    is_packed = path.endswith(".gz")
    # A packed file may continue with zeros after its content, which gzip would read.
    num_bytes = len(wanted.header) + wanted.num_records * wanted.dtype.itemsize
    most_bytes = 2 * num_bytes + PACKING_BYTES if is_packed else None
    with _reading(path), open_data_file(path, most_bytes) as packed:
        file: Any = gzip.GzipFile(fileobj=packed) if is_packed else packed
        return read_records(wanted, file, path, counts)


def _read_archive(published, path, files):
    """Yield the records of each file out of the archive; nothing is written."""
    [sha256] = published.archives.values()
    # What is checked is what is read: both through one open file.
    with _reading(path), open_data_file(path, MAX_ARCHIVE_BYTES) as packed:
        digest = hashlib.file_digest(packed, "sha256").hexdigest()
        if digest != sha256:
            way = f"delete it and fetch {published.url(path)} again"
            raise DataError(f"{path}: expected sha256 {sha256}, got {digest}; {way}")
        packed.seek(0)
        counts = published.label_counts
        with tarfile.open(fileobj=packed) as archive:
            for x in files:
                file = archive.extractfile(f"{published.folders[0]}/{x.name}")
                yield read_records(x, file, f"{path}: {x.name}", counts)


def read_records(
    wanted: RecordFile, file: IO[bytes], location: str, label_counts: Mapping[str, int]
) -> np.ndarray:
    """Read the records of an open file; DataError with the location if it is wrong."""
    header = file.read(len(wanted.header))
    record = wanted.dtype.itemsize
    size = wanted.num_records * record
    # One byte more than expected reveals a file that is too long.
    content = file.read(size + 1)
    if header != wanted.header:
        expected = f"0x{wanted.header.hex()} as the header of an IDX file"
        raise DataError(f"{location}: begins with 0x{header.hex()}, not {expected}")
    if len(content) != size:
        actual = "more" if len(content) > size else len(content)
        what = f"{size} bytes ({wanted.num_records} records of {record})"
        raise DataError(f"{location}: expected {what}, got {actual}")
    records = np.frombuffer(content, wanted.dtype)
    for kind in (x for x in label_counts if x in (wanted.dtype.names or ())):
        labels, most = records[kind], label_counts[kind] - 1
        wrong = np.flatnonzero(labels > most)
        if wrong.size:
            what = f"record {wrong[0]} (counted from 0) has the {kind}"
            why = f"{what} {labels[wrong[0]]}, expected 0 to {most}"
            raise DataError(f"{location}: {why}; {wrong.size} such records")
    return records
