"""CIFAR-10 (Krizhevsky, 2009): 60,000 colour images of 32x32 pixels in ten classes.

Read from the official binary layout, from the official archive of it, or through
tensorflow-datasets; all three give the same arrays in the same order. The pickled
layout is refused: unpickling runs whatever code the file holds.
"""

import hashlib
import os
import tarfile
import zlib

import numpy as np

from towers.data import tfds
from towers.data.sources import ArraySource, DataSet, channel_moments
from towers.errors import DataError

CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
IMAGE_SHAPE = (32, 32, 3)

FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
NAMES_FILE = "batches.meta.txt"
RECORDS_PER_FILE = 10_000
# One byte of label, then the red, green and blue planes, each row by row.
RECORD = np.dtype([("label", np.uint8), ("planes", np.uint8, (3, 32, 32))])

# As tensorflow-datasets has them in url_checksums/cifar10.txt.
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_BYTES = 170_052_171
ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"

# What the pickled layout looks like; all of it is recognised by name, never opened.
PICKLED_FOLDER = "cifar-10-batches-py"
PICKLED_FILES = ("data_batch_1", "test_batch")
PICKLED_ARCHIVE = "cifar-10-python.tar.gz"

HOW_TO_GET_IT = (
    f"to get it, fetch {URL} on a machine with a network and put it, packed or "
    f"unpacked, into a folder that --data_dir names; --dataset=embedded needs no data"
)

Examples = tuple[np.ndarray, np.ndarray]


def load(data_dir: str) -> DataSet:
    """Finds and reads CIFAR-10; the network is asked only when no folder has it.

    Args:
        data_dir: folder that holds `cifar-10-batches-bin/*.bin`, the `.bin` files
            themselves, `cifar-10-binary.tar.gz`, or what tensorflow-datasets prepared;
            empty means `data`. The default folder of tensorflow-datasets comes next,
            and a download with it last.

    Returns:
        50,000 training and 10,000 test images, uint8 [n, 32, 32, 3], in the official
        order. What tensorflow-datasets prepared keeps the numbers it was prepared with.

    Raises:
        DataError: nothing was found and nothing can be downloaded (within 2 s where
            there is no network), or what was found is not what it should be.
    """
    root = os.path.abspath(os.path.expanduser(data_dir or "data"))
    if os.path.exists(root) and not os.path.isdir(root):
        raise DataError(f"{root} is not a folder; --data_dir names the folder it is in")

    folder = _find_binary_folder(root)
    if folder:
        return _load_folder(folder)
    archive = os.path.join(root, ARCHIVE)
    if os.path.exists(archive):
        return _load_archive(archive)
    prepared = tfds.find_prepared("cifar10", root)
    if prepared:
        return _load_prepared(prepared)
    _refuse_pickled(root)
    shared = tfds.default_dir()
    prepared = tfds.find_prepared("cifar10", shared)
    if prepared:
        return _load_prepared(prepared)

    reason = tfds.unreachable(URL)
    if reason:
        looked_in = f"{FOLDER}, {TRAIN_FILES[0]}, {ARCHIVE} or cifar10/VERSION"
        missing = "" if os.path.isdir(root) else " (no such folder)"
        raise DataError(
            f"CIFAR-10 was not found: no {looked_in} in {root}{missing}; "
            f"no cifar10/VERSION in {shared} (tensorflow-datasets); "
            f"no download: {reason}; {HOW_TO_GET_IT}"
        )
    try:
        return _load_prepared(tfds.download("cifar10", root if data_dir else shared))
    except DataError as error:
        raise DataError(f"{error}; {HOW_TO_GET_IT}") from error


def read_records(path: str, num_records: int) -> Examples:
    """Reads one file of the binary layout.

    Returns:
        uint8 images [num_records, 32, 32, 3] and int32 labels [num_records].

    Raises:
        DataError: the file is missing, has another size, or a label is not 0 to 9.
    """
    try:
        _check_size(path, os.path.getsize(path), num_records)
        records = np.fromfile(path, RECORD, num_records)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return _decode(path, records, num_records)


def _check_size(path: str, size: int, num_records: int) -> None:
    expected = num_records * RECORD.itemsize
    if size == expected:
        return
    whole, rest = divmod(size, RECORD.itemsize)
    if size > expected:
        place = f"it goes on after record {num_records - 1}, the last"
    elif rest:
        place = f"it breaks off in record {whole}, after {rest} of its bytes"
    else:
        place = f"record {whole} and those after it are missing"
    raise DataError(
        f"{path}: expected {expected} bytes ({num_records} records of "
        f"{RECORD.itemsize}), found {size}: {place} (records are counted from 0)"
    )


def _decode(path: str, records: np.ndarray, num_records: int) -> Examples:
    # A file may have shrunk between the look at its size and the reading.
    _check_size(path, records.nbytes, num_records)
    labels = records["label"]
    wrong = np.flatnonzero(labels >= len(CLASS_NAMES))
    if wrong.size:
        raise DataError(
            f"{path}: record {wrong[0]} (counted from 0) has the label "
            f"{labels[wrong[0]]}, expected 0 to {len(CLASS_NAMES) - 1}"
            + (f"; {wrong.size - 1} more are wrong" if wrong.size > 1 else "")
        )
    images = np.empty((num_records, *IMAGE_SHAPE), np.uint8)
    for channel in range(3):  # Three times as fast as one transposition.
        images[..., channel] = records["planes"][:, channel]
    return images, labels.astype(np.int32)


def _data_set(train: list[Examples], test: Examples, found: str) -> DataSet:
    images = np.concatenate([images for images, _ in train])
    labels = np.concatenate([labels for _, labels in train])
    mean, deviation = channel_moments(images)
    return DataSet(
        name="cifar10",
        train=ArraySource(images, labels),
        test=ArraySource(*test),
        class_names=CLASS_NAMES,
        mean=mean,
        deviation=deviation,
        found=found,
    )


def _find_binary_folder(root: str) -> str | None:
    """The folder in or at `root` that is meant to hold the `.bin` files."""
    for folder in (os.path.join(root, FOLDER), root):
        # One file is enough: with others missing the user should hear which.
        if any(map(os.path.exists, _join(folder, *TRAIN_FILES, TEST_FILE))):
            return folder
    return None


def _load_folder(folder: str) -> DataSet:
    _check_names(os.path.join(folder, NAMES_FILE))
    *train, test = [
        read_records(path, RECORDS_PER_FILE)
        for path in _join(folder, *TRAIN_FILES, TEST_FILE)
    ]
    return _data_set(train, test, f"{folder} (official binary layout)")


def _check_names(path: str) -> None:
    """The class names may be missing, but not others or in another order."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            names = tuple(line.strip() for line in file if line.strip())
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    _compare_names(path, names)


def _compare_names(place: str, names: tuple[str, ...]) -> None:
    if names != CLASS_NAMES:
        raise DataError(
            f"{place}: these are not the classes of CIFAR-10: expected "
            f"{' '.join(CLASS_NAMES)}, found {' '.join(names[:20]) or 'none'}"
        )


def _load_archive(path: str) -> DataSet:
    """Reads the members out of the checked archive; nothing is written anywhere."""
    wanted = {f"{FOLDER}/{name}": name for name in (*TRAIN_FILES, TEST_FILE)}
    examples = {}
    try:
        # What was checked is what is read: both through one open file.
        with open(path, "rb") as file:
            _check_archive(path, file)
            with tarfile.open(fileobj=file, mode="r|gz") as archive:
                for member in archive:
                    name = wanted.get(member.name)
                    if name and member.isreg():
                        place = f"{path}: {member.name}"
                        _check_size(place, member.size, RECORDS_PER_FILE)
                        raw = archive.extractfile(member).read()
                        raw = raw[: len(raw) // RECORD.itemsize * RECORD.itemsize]
                        records = np.frombuffer(raw, RECORD)
                        examples[name] = _decode(place, records, RECORDS_PER_FILE)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for member, name in wanted.items():
        if name not in examples:
            raise DataError(f"{path}: {member} is missing")
    *train, test = (examples[name] for name in (*TRAIN_FILES, TEST_FILE))
    return _data_set(train, test, f"{path} (official archive, checked)")


def _check_archive(path: str, file) -> None:
    advice = f"it may be a partial download: delete it and fetch {URL} again"
    size = os.fstat(file.fileno()).st_size
    if size != ARCHIVE_BYTES:
        raise DataError(
            f"{path}: expected {ARCHIVE_BYTES} bytes, found {size}; {advice}"
        )
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != ARCHIVE_SHA256:
        raise DataError(
            f"{path}: expected sha256 {ARCHIVE_SHA256}, found {sha256}; {advice}"
        )
    file.seek(0)


def _load_prepared(folder: str) -> DataSet:
    data_set = tfds.read_prepared(folder)
    if data_set.train.image_shape != IMAGE_SHAPE:
        raise DataError(
            f"{folder}: CIFAR-10 has images of {list(IMAGE_SHAPE)}, "
            f"found {list(data_set.train.image_shape)}"
        )
    _compare_names(folder, data_set.class_names)
    return data_set


def _refuse_pickled(root: str) -> None:
    places = [
        *_join(root, PICKLED_FOLDER, PICKLED_ARCHIVE, *PICKLED_FILES),
        *_join(os.path.join(root, FOLDER), *PICKLED_FILES),
    ]
    for place in filter(os.path.exists, places):
        raise DataError(
            f"{place} is the pickled layout of CIFAR-10, which is not read because "
            f"unpickling runs code out of the file; the binary layout is wanted: "
            f"{FOLDER}/*.bin or {ARCHIVE} ({URL}) in {root}"
        )


def _join(folder: str, *names: str) -> list[str]:
    return [os.path.join(folder, name) for name in names]
