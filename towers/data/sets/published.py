"""Published data sets: CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST.

Their official files are read from a folder, packed or not, or what tensorflow-datasets
prepared of them; all give the same arrays in the same order. The network is used only
where no folder has the data set. Pickled files are refused, because unpickling runs the
code that a file holds.
"""

import contextlib
import fcntl
import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from towers.data.files.class_folders import has_classes
from towers.data.files.paths import data_folder, is_image_name, reason
from towers.data.files.reading import open_data_file, open_lock_file
from towers.data.sets import tfds
from towers.data.sets.download import fetch, unreachable
from towers.data.sets.official_files import PUBLISHED, Published, RecordFile
from towers.data.sources import ArraySource, DataSet, channel_moments
from towers.errors import DataError
from towers.messages import shown

# Of an archive.
MAX_ARCHIVE_BYTES = 2**28
# Of a packed file besides twice its content.
PACKING_BYTES = 2**20

DOWNLOAD_LOCK = ".towers-download.lock"


def load(name: str, data_dir: str = "") -> DataSet:
    """Finds and reads a published data set, in the official order.

    `data_dir` holds the official files, or what tensorflow-datasets prepared (which
    keeps the numbers it was prepared with); empty means `data`. The folders of Keras'
    downloads and of tensorflow-datasets come next, and a download last: into
    `data_dir`, where nothing else is in it, or without one into the folder of Keras'
    downloads.

    DataError where there are no files and nothing can be downloaded (within 2 s where
    there is no network), the files are not the expected ones, or `data_dir` has class
    folders of images.
    """
    published, root = PUBLISHED[name], data_folder(data_dir)
    downloads, shared = downloads_folder(), tfds.default_dir()
    data_set = _read(name, root)
    if data_set is None:
        _refuse_pickled(published, root)
        names = os.listdir(root) if os.path.isdir(root) else []
        if data_dir and (has_classes(root) or any(map(is_image_name, names))):
            raise DataError(
                f"{root}: holds images, and not {published.title}; set "
                "--dataset=image_folder, or leave --data_dir away"
            )
        data_set = _read(name, downloads) or _read(name, shared)
    if data_set is not None:
        return data_set
    folder = root if data_dir else downloads
    address = published.url(next(iter(published.archives)))
    if data_dir and (others := _other_things(names)):
        raise DataError(
            f"{published.title} is not in {root}, and is not downloaded into a folder "
            f"with other things, such as {shown(others[0], 60)}; name an empty folder, "
            f"or leave --data_dir away; {published.how_to_get_it}"
        )
    why = unreachable(address)
    if why:
        read_official(published, folder)  # names what a download lacks
        missing = "" if os.path.isdir(root) else " (no such folder)"
        raise DataError(
            f"{published.title} was not found: no {published.folders[0]}, "
            f"{next(iter(published.archives))} or {name}/VERSION in {root}{missing}, "
            f"{downloads} or {shared}; no download: {why}; {published.how_to_get_it}"
        )
    download(published, folder)
    return _read(name, folder)


def data_sets_in(root: str) -> list[str]:
    """Names, for --dataset, of the data sets whose files a folder holds. Of files that
    may be of MNIST or Fashion-MNIST it is the former; loading tells them apart.
    """
    names = {}
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
    """The names in a folder that no download leaves there."""
    paths = sum(([*x.archives, *x.folders] for x in PUBLISHED.values()), [])
    ours = {path.split("/")[0] for path in paths}
    names = (x for x in names if x.removesuffix(".partial") not in ours)
    return sorted(name for name in names if not name.startswith("."))


def downloads_folder() -> str:
    """The folder of Keras' downloads."""
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    return os.path.abspath(os.path.join(os.path.expanduser(home), "datasets"))


def _read(name: str, root: str) -> DataSet | None:
    """The data set from a folder, which may be missing; None where it is not there, or
    where a download has not come to its end.
    """
    published = PUBLISHED[name]
    if _is_partly_downloaded(published, root):
        return None
    arrays = read_official(published, root)
    if arrays is None:
        folder = tfds.find_prepared(name, root)
        if folder is None:
            return None
        *arrays, names = tfds.read_arrays(folder, published.image_shape)
        _compare_names(published, folder, names)
    train, test, origin = arrays
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


def _compare_names(published, location, names):
    if names != published.class_names:
        raise DataError(
            f"{location}: these are not the classes of {published.title}: expected "
            f"{shown(' '.join(published.class_names), 100)}, got "
            f"{shown(' '.join(names[:20]), 100) or 'none'}"
        )


def _refuse_pickled(published, root):
    for name in published.pickled:
        path, archive = os.path.join(root, name), next(iter(published.archives))
        if os.path.exists(path):
            raise DataError(
                f"{path} is the pickled layout of {published.title}, which is not read "
                "because unpickling runs code out of the file; the binary layout is "
                f"expected: {published.folders[0]}/*.bin or {archive} "
                f"({published.url(archive)}) in {root}"
            )


def read_official(
    published: Published, root: str
) -> tuple[tfds.Examples, tfds.Examples, str] | None:
    """Reads the official files of a folder, packed or not, or out of the checked
    archive without unpacking it: training and test examples and their origin; None
    where the folder has none. DataError where a file is missing or not what it should
    be; names the record.
    """
    splits = [published.record_files(split) for split in published.files]
    files, records = sum(splits, []), None
    for folder in (*(os.path.join(root, name) for name in published.folders), root):
        # One file is enough; an error then names those that are missing.
        if any(_find(folder, file.name) for file in files):
            counts, origin = published.label_counts, f"{folder} (official files)"
            records = {file.name: read_file(file, folder, counts) for file in files}
            break
    path = os.path.join(root, next(iter(published.archives)))
    if records is None and os.path.exists(path) and not published.first_labels:
        records, origin = _read_archive(published, path, files)
    if records is None:
        return None
    train, test = (_examples([records[x.name] for x in split]) for split in splits)
    _refuse_others(published, train[1], origin)
    return train, test, origin


def _examples(records):
    """Images and labels of files of records, in their order."""
    planes = [x["planes"] for x in records if "planes" in x.dtype.names]
    *_, label = (name for x in records for name in x.dtype.names if name != "planes")
    labels = [x[label] for x in records if label in x.dtype.names]
    images = np.concatenate([x.transpose(0, 2, 3, 1) for x in planes])
    return np.ascontiguousarray(images), np.concatenate(labels).astype(np.int32)


def _refuse_others(published, labels, origin):
    for name, other in PUBLISHED.items():
        first = other.first_labels
        if first == published.first_labels or not first:
            continue
        if tuple(labels[: len(first)].tolist()) == first:
            raise DataError(
                f"{origin}: these are the files of {other.title}, as the first labels "
                f"say; --dataset={name} reads them"
            )


def _find(folder, name):
    for path in (os.path.join(folder, name), os.path.join(folder, f"{name}.gz")):
        if os.path.exists(path):
            return path
    return None


def read_file(
    wanted: RecordFile, folder: str, label_counts: Mapping[str, int]
) -> np.ndarray:
    """The records of a file of a folder, packed or not; DataError as `read_records`."""
    path = _find(folder, wanted.name)
    if path is None:
        raise DataError(f"{folder}: {wanted.name}, or that with .gz, is missing")
    is_packed = path.endswith(".gz")
    # Behind its content a packed file may go on with zeros, which would all be read.
    most_bytes = 2 * wanted.num_bytes + PACKING_BYTES if is_packed else None
    with _reading(path), contextlib.ExitStack() as stack:
        file = stack.enter_context(open_data_file(path, most_bytes))
        if is_packed:
            file = stack.enter_context(gzip.open(file))
        return read_records(wanted, file, path, label_counts)


def _read_archive(published, path, files):
    """File -> its records, out of the archive, and their origin; nothing is written."""
    members = {f"{published.folders[0]}/{file.name}": file for file in files}
    [sha256] = published.archives.values()
    records = {}
    # What is checked is what is read: both through one open file.
    with _reading(path), open_data_file(path, MAX_ARCHIVE_BYTES) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            raise DataError(
                f"{path}: expected sha256 {sha256}, got {digest}; it may be a partial "
                f"download: delete it and fetch {published.url(path)} again"
            )
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r|gz") as archive:
            for member in archive:
                wanted = members.get(member.name)
                if wanted and member.isreg():
                    records[wanted.name] = read_records(
                        wanted,
                        archive.extractfile(member),
                        f"{path}: {wanted.name}",
                        published.label_counts,
                    )
    for wanted in files:
        if wanted.name not in records:
            raise DataError(f"{path}: {wanted.name} is missing")
    return records, f"{path} (official archive, checked)"


def read_records(
    wanted: RecordFile, file: BinaryIO, location: str, label_counts: Mapping[str, int]
) -> np.ndarray:
    """The records [num_records] of a file that is open for reading; DataError, which
    begins with the location, where it has another header or size, or a label is too
    high.
    """
    header = file.read(len(wanted.header))
    record = wanted.dtype.itemsize
    size = wanted.num_records * record
    # One byte more than expected reveals a file that is too long.
    content = file.read(size + 1)
    if header != wanted.header:
        raise DataError(
            f"{location}: begins with 0x{header.hex()}, expected "
            f"0x{wanted.header.hex()}: magic number of IDX files, number of records, "
            "height and width"
        )
    if len(content) != size:
        actual = "more" if len(content) > size else len(content)
        raise DataError(
            f"{location}: expected {size} bytes ({wanted.num_records} records of "
            f"{record}), got {actual}"
        )
    records = np.frombuffer(content, wanted.dtype)
    for kind in (x for x in label_counts if x in wanted.dtype.names):
        labels, most = records[kind], label_counts[kind] - 1
        wrong = np.flatnonzero(labels > most)
        if wrong.size:
            raise DataError(
                f"{location}: record {wrong[0]} (counted from 0) has the {kind} "
                f"{labels[wrong[0]]}, expected 0 to {most}; {wrong.size} such records"
            )
    return records


# Downloads.


def _is_partly_downloaded(published, folder):
    paths = [os.path.join(folder, x.removesuffix(".gz")) for x in published.archives]
    present = [_find(*os.path.split(path)) for path in paths]
    begun = os.path.exists(os.path.join(folder, DOWNLOAD_LOCK))
    return begun and any(present) and not all(present)


def download(published: Published, folder: str) -> None:
    """Downloads the archives into a folder, one process at a time. DataError where one
    cannot be fetched or written, has another checksum, or nothing of it came for
    STALL_SECS; nothing is left of it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with open_lock_file(os.path.join(folder, DOWNLOAD_LOCK)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name, sha256 in published.archives.items():
                path = os.path.join(folder, name)
                if not os.path.exists(path):  # else another process was faster
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    fetch(published.url(name), sha256, path)
    except OSError as error:
        location = error.filename or folder
        raise DataError(f"{location}: cannot be written: {error.strerror}") from error
    except DataError as error:
        raise DataError(f"{error}; {published.how_to_get_it}") from error
