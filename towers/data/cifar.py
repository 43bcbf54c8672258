"""The layouts of CIFAR-10 and CIFAR-100 (Krizhevsky, 2009).

The binary layout is read from a folder or from the official archive. The pickled layout
is refused, because unpickling runs the code that the file holds.
"""

import dataclasses
import hashlib
import os
import tarfile
import zlib
from collections.abc import Mapping

import numpy as np

from towers.data import official
from towers.data.files import open_data_file, read_data_file
from towers.data.official import Official
from towers.data.paths import reason
from towers.data.records import (
    IMAGE_SHAPE,
    Examples,
    check_size,
    decode_records,
    read_records,
    record_dtype,
)
from towers.data.sources import DataSet
from towers.errors import DataError

# Of both archives.
ADDRESS = "https://www.cs.toronto.edu/~kriz/"

# Of the file of the class names, which has fewer than 1,000.
MOST_NAMES_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Cifar:
    """One of the two data sets.

    Attributes:
        name, title, class_names: see `Official`.
        folder: in the archive.
        train_files: name -> number of records, in the official order.
        test_file: name, number of records.
        names_file: of the class names, one a line.
        label_counts: see `read_records`.
        archive, archive_bytes, archive_sha256: the official archive.
        pickled_folder, pickled_files: of the pickled layout; recognized by these
            names, never opened.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    folder: str
    train_files: Mapping[str, int]
    test_file: tuple[str, int]
    names_file: str
    label_counts: Mapping[str, int]
    archive: str
    archive_bytes: int
    archive_sha256: str
    pickled_folder: str
    pickled_files: tuple[str, ...]

    @property
    def files(self) -> dict[str, int]:
        """Name -> number of records; the test file last."""
        return dict([*self.train_files.items(), self.test_file])

    @property
    def url(self) -> str:
        return ADDRESS + self.archive

    @property
    def official(self) -> Official:
        return Official(
            name=self.name,
            title=self.title,
            image_shape=IMAGE_SHAPE,
            class_names=self.class_names,
            url=self.url,
            official_files=f"{self.folder}, {next(iter(self.files))}, {self.archive}",
            download_from=self.url,
        )


def load(cifar: Cifar, data_dir: str) -> DataSet:
    """Finds and reads one of the two; see `official.load`."""
    return official.load(
        cifar.official,
        data_dir,
        read_files=lambda root: _read_files(cifar, root),
        refuse=lambda root: _refuse_pickled(cifar, root),
    )


def _read_files(cifar: Cifar, root: str) -> DataSet | None:
    for folder in (os.path.join(root, cifar.folder), root):
        # One file is enough; an error then names those that are missing.
        if any(os.path.exists(os.path.join(folder, name)) for name in cifar.files):
            return _read_folder(cifar, folder)
    archive = os.path.join(root, cifar.archive)
    return _read_archive(cifar, archive) if os.path.exists(archive) else None


def _read_folder(cifar: Cifar, folder: str) -> DataSet:
    _check_names(cifar, os.path.join(folder, cifar.names_file))
    examples = [
        read_records(os.path.join(folder, name), num_records, cifar.label_counts)
        for name, num_records in cifar.files.items()
    ]
    return _data_set(cifar, examples, f"{folder} (official binary layout)")


def _data_set(cifar: Cifar, examples: list[Examples], origin: str) -> DataSet:
    *train, test = examples
    images = np.concatenate([images for images, _ in train])
    labels = np.concatenate([labels for _, labels in train])
    return official.from_arrays(cifar.official, (images, labels), test, origin)


def _check_names(cifar: Cifar, path: str) -> None:
    """Refuses a file of other class names or another order; it may be missing."""
    try:
        content = read_data_file(path, MOST_NAMES_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    lines = content.decode("utf-8", "replace").splitlines()
    names = tuple(line.strip() for line in lines if line.strip())
    official.compare_names(cifar.official, path, names)


def _read_archive(cifar: Cifar, path: str) -> DataSet:
    """Reads the members out of the checked archive; nothing is written anywhere."""
    members = {f"{cifar.folder}/{name}": name for name in cifar.files}
    dtype = record_dtype(cifar.label_counts)
    examples = {}
    try:
        # What was checked is what is read: both through one open file.
        with open_data_file(path) as file:
            _check_archive(cifar, path, file)
            with tarfile.open(fileobj=file, mode="r|gz") as archive:
                for member in archive:
                    name = members.get(member.name)
                    if name and member.isreg():
                        place, num_records = f"{path}: {member.name}", cifar.files[name]
                        check_size(place, member.size, num_records, dtype.itemsize)
                        raw = archive.extractfile(member).read()
                        raw = raw[: len(raw) // dtype.itemsize * dtype.itemsize]
                        examples[name] = decode_records(
                            place,
                            np.frombuffer(raw, dtype),
                            num_records,
                            cifar.label_counts,
                        )
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error
    for member, name in members.items():
        if name not in examples:
            raise DataError(f"{path}: {member} is missing")
    return _data_set(
        cifar,
        [examples[name] for name in cifar.files],
        f"{path} (official archive, checked)",
    )


def _check_archive(cifar: Cifar, path: str, file) -> None:
    advice = f"it may be a partial download: delete it and fetch {cifar.url} again"
    size = os.fstat(file.fileno()).st_size
    if size != cifar.archive_bytes:
        raise DataError(
            f"{path}: expected {cifar.archive_bytes} bytes, found {size}; {advice}"
        )
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != cifar.archive_sha256:
        raise DataError(
            f"{path}: expected sha256 {cifar.archive_sha256}, found {sha256}; {advice}"
        )
    file.seek(0)


def _refuse_pickled(cifar: Cifar, root: str) -> None:
    files = [
        os.path.join(folder, name)
        for folder in (root, os.path.join(root, cifar.folder))
        for name in cifar.pickled_files
    ]
    pickled = [path for path in files if os.path.isfile(path)]
    folder = os.path.join(root, cifar.pickled_folder)
    if os.path.isdir(folder):
        pickled.insert(0, folder)
    if pickled:
        raise DataError(
            f"{pickled[0]} is the pickled layout of {cifar.title}, which is not read "
            "because unpickling runs code out of the file; the binary layout is "
            f"expected: {cifar.folder}/*.bin or {cifar.archive} ({cifar.url}) in {root}"
        )
