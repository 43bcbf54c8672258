"""Published data sets: CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST.

Their official files are read from a folder, packed or not, or what tensorflow-datasets
prepared of them; all give the same arrays in the same order. The network is used only
where no folder has the data set. Pickled files are refused, because unpickling runs the
code that a file holds.
"""

import contextlib
import dataclasses
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
from towers.data.files.paths import data_folder, is_image_name, reason, shown
from towers.data.files.reading import open_data_file, open_lock_file
from towers.data.sets import tfds
from towers.data.sets.download import fetch, unreachable
from towers.data.sources import ArraySource, DataSet, channel_moments
from towers.errors import DataError

# Of an archive.
MOST_ARCHIVE_BYTES = 2**28
# Of a packed file besides twice its content.
PACKING_BYTES = 2**20

DOWNLOAD_LOCK = ".towers-download.lock"

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file of equal records behind a header.

    Attributes:
        name: of the file; packed it ends with .gz.
        num_records: in the file.
        dtype: of a record: a byte for each label, then the planes of an image, row by
            row.
        header: of the file.
    """

    name: str
    num_records: int
    dtype: np.dtype
    header: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.num_records * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Published:
    """One of the data sets.

    Attributes:
        title: for messages.
        class_names: in the order of the labels.
        image_shape: height, width, channels.
        address: that the archives are at.
        archives: path in --data_dir -> SHA-256; as tensorflow-datasets has them.
        folders: in --data_dir, searched before the folder itself.
        files: split -> file -> number of records, in the official order; of IDX files
            what their names begin with.
        label_counts: label in a record -> number of its classes; the last one counts.
        pickled: folder and archive of the pickled layout, which are never opened.
        first_labels: of the training images, which tell data sets apart whose files
            have the same names; such are IDX files.
    """

    title: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    address: str
    archives: Mapping[str, str]
    folders: tuple[str, ...]
    files: Mapping[str, Mapping[str, int]]
    label_counts: Mapping[str, int]
    pickled: tuple[str, ...] = ()
    first_labels: tuple[int, ...] = ()

    def url(self, archive: str) -> str:
        return self.address + os.path.basename(archive)

    def record_files(self, split: str) -> list[RecordFile]:
        """The files of a split: the binary layout of CIFAR (Krizhevsky, 2009), or IDX
        files (yann.lecun.com/exdb/mnist), whose header is two zero bytes, the type of
        the values, the number of dimensions, and each of these in four bytes."""
        height, width, channels = self.image_shape
        labels = np.dtype([(name, np.uint8) for name in self.label_counts])
        planes = np.dtype([("planes", np.uint8, (channels, height, width))])
        files = []
        for stem, count in self.files[split].items():
            if not self.first_labels:
                both = np.dtype(labels.descr + planes.descr)
                files.append(RecordFile(stem, count, both))
                continue
            for name, dims, dtype in (
                (IMAGES, (count, height, width), planes),
                (LABELS, (count,), labels),
            ):
                header = bytes([0, 0, 8, len(dims)]) + np.array(dims, ">u4").tobytes()
                files.append(RecordFile(f"{stem}-{name}", count, dtype, header))
        return files

    @property
    def how_to_get_it(self) -> str:
        names = ", ".join(map(os.path.basename, self.archives))
        return (
            f"to get it, fetch {names} from {self.address} on a machine with a network "
            "and put it, packed or unpacked, into a folder that --data_dir names; "
            "--dataset=shapes needs no data"
        )


def load(name: str, data_dir: str = "") -> DataSet:
    """Finds and reads a published data set.

    Args:
        name: in `PUBLISHED`.
        data_dir: folder that holds the official files, or what tensorflow-datasets
            prepared; empty means `data`. The folders of Keras' downloads and of
            tensorflow-datasets come next, and a download last: into `data_dir`, where
            nothing else is in it, or without one into the folder of Keras' downloads.

    Returns:
        Sources in memory, in the official order. What tensorflow-datasets prepared
        keeps the numbers it was prepared with.

    Raises:
        DataError: there are no files and nothing can be downloaded (within 2 s where
            there is no network), the files are not the expected ones, or `data_dir` has
            class folders of images.
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
    may be of MNIST or Fashion-MNIST it is the former; loading tells them apart."""
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
    where a download has not come to its end."""
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


def _compare_names(published, place, names):
    if names != published.class_names:
        raise DataError(
            f"{place}: these are not the classes of {published.title}: expected "
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
    archive without unpacking it.

    Returns:
        Training and test examples and their origin; None where the folder has none.

    Raises:
        DataError: a file is missing or is not what it should be; names the record.
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
    with _reading(path), open_data_file(path, MOST_ARCHIVE_BYTES) as file:
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
    wanted: RecordFile, file: BinaryIO, place: str, label_counts: Mapping[str, int]
) -> np.ndarray:
    """The records [num_records] of a file that is open for reading.

    Raises:
        DataError: it has another header or size, or a label is too high; begins with
            the place.
    """
    header = file.read(len(wanted.header))
    record = wanted.dtype.itemsize
    size = wanted.num_records * record
    # One byte more than expected reveals a file that is too long.
    content = file.read(size + 1)
    if header != wanted.header:
        raise DataError(
            f"{place}: begins with 0x{header.hex()}, expected 0x{wanted.header.hex()}: "
            "magic number of IDX files, number of records, height and width"
        )
    if len(content) != size:
        actual = "more" if len(content) > size else len(content)
        raise DataError(
            f"{place}: expected {size} bytes ({wanted.num_records} records of {record})"
            f", got {actual}"
        )
    records = np.frombuffer(content, wanted.dtype)
    for kind in (x for x in label_counts if x in wanted.dtype.names):
        labels, most = records[kind], label_counts[kind] - 1
        wrong = np.flatnonzero(labels > most)
        if wrong.size:
            raise DataError(
                f"{place}: record {wrong[0]} (counted from 0) has the {kind} "
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
    """Downloads the archives into a folder, one process at a time.

    Raises:
        DataError: an archive cannot be fetched or written, has another checksum, or
            nothing of it came for STALL_SECS; nothing is left of it.
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
        place = error.filename or folder
        raise DataError(f"{place}: cannot be written: {error.strerror}") from error
    except DataError as error:
        raise DataError(f"{error}; {published.how_to_get_it}") from error


# The table.

_KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz/"
_IDX_FILES = {"train": {"train": 60_000}, "test": {"t10k": 10_000}}


def _idx_archives(folder, *sums):
    names = (f"{stem}-{x}" for stem in ("t10k", "train") for x in (IMAGES, LABELS))
    return {f"{folder}/{n}.gz": x for n, x in zip(names, sums, strict=True)}


PUBLISHED: dict[str, Published] = {
    "cifar10": Published(
        title="CIFAR-10",
        class_names=tuple(
            "airplane automobile bird cat deer dog frog horse ship truck".split()
        ),
        image_shape=(32, 32, 3),
        address=_KRIZHEVSKY,
        archives={
            "cifar-10-binary.tar.gz": (
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
            )
        },
        folders=("cifar-10-batches-bin",),
        files={
            "train": {f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
            "test": {"test_batch.bin": 10_000},
        },
        label_counts={"label": 10},
        pickled=("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    ),
    # The labels are the fine ones.
    "cifar100": Published(
        title="CIFAR-100",
        class_names=tuple(
            """
            apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy
            bridge bus butterfly camel can castle caterpillar cattle chair chimpanzee
            clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
            flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
            leopard lion lizard lobster man maple_tree motorcycle mountain mouse
            mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
            plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
            seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
            sunflower sweet_pepper table tank telephone television tiger tractor train
            trout tulip turtle wardrobe whale willow_tree wolf woman worm
            """.split()
        ),
        image_shape=(32, 32, 3),
        address=_KRIZHEVSKY,
        archives={
            "cifar-100-binary.tar.gz": (
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
            )
        },
        folders=("cifar-100-binary",),
        files={"train": {"train.bin": 50_000}, "test": {"test.bin": 10_000}},
        label_counts={"coarse label": 20, "fine label": 100},
        pickled=("cifar-100-python", "cifar-100-python.tar.gz"),
    ),
    # LeCun et al., 1998. The second folder is torchvision's.
    "mnist": Published(
        title="MNIST",
        class_names=tuple("0123456789"),
        image_shape=(28, 28, 1),
        address="https://storage.googleapis.com/cvdf-datasets/mnist/",
        archives=_idx_archives(
            "mnist",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        folders=("mnist", "MNIST/raw"),
        files=_IDX_FILES,
        label_counts={"label": 10},
        first_labels=(5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
    ),
    # Xiao et al., 2017. The second folder is Keras', the third torchvision's.
    "fashion_mnist": Published(
        title="Fashion-MNIST",
        class_names=tuple(
            "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,"
            "Ankle boot".split(",")
        ),
        image_shape=(28, 28, 1),
        address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        archives=_idx_archives(
            "fashion_mnist",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        folders=("fashion_mnist", "fashion-mnist", "FashionMNIST/raw"),
        files=_IDX_FILES,
        label_counts={"label": 10},
        first_labels=(9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
    ),
}
