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
import math
import os
import tarfile
import zlib
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np

from towers.data import tfds
from towers.data.download import fetch, unreachable
from towers.data.files import open_data_file, open_lock_file, read_data_file
from towers.data.paths import data_folder, reason, shown
from towers.data.sources import ArraySource, DataSet, channel_moments
from towers.errors import DataError

# Of an archive, and of a file of class names.
MOST_ARCHIVE_BYTES = 2**28
MOST_NAMES_BYTES = 2**16
# Of a packed IDX file besides twice its content.
PACKING_BYTES = 2**20

# Of IDX files: unsigned bytes.
UNSIGNED_BYTE = 0x08
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"

# uint8 images [n, height, width, channels] and integer labels [n].
Examples = tuple[np.ndarray, np.ndarray]


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
        reader: (data set, folder) -> training and test examples and their origin; None
            where the folder has none of its files.
        label_counts: label in a record -> number of its classes; the last one counts.
        names_file: of the class names, one a line; may be missing.
        pickled: names of the pickled layout, that of its folder first; recognized by
            these, never opened.
        first_labels: of the training images, which tell data sets apart whose files
            have the same names.
    """

    title: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    address: str
    archives: Mapping[str, str]
    folders: tuple[str, ...]
    files: Mapping[str, Mapping[str, int]]
    reader: Callable[["Published", str], tuple[Examples, Examples, str] | None]
    label_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    names_file: str = ""
    pickled: tuple[str, ...] = ()
    first_labels: tuple[int, ...] = ()

    def url(self, archive: str) -> str:
        return self.address + os.path.basename(archive)

    @property
    def how_to_get_it(self) -> str:
        names = ", ".join(map(os.path.basename, self.archives))
        return (
            f"to get it, fetch {names} from {self.address} on a machine with a network "
            "and put it, packed or unpacked, into a folder that --data_dir names; "
            "--dataset=embedded needs no data"
        )


def load(name: str, data_dir: str = "") -> DataSet:
    """Finds and reads a published data set.

    Args:
        name: in `PUBLISHED`.
        data_dir: folder that holds the official files, or what tensorflow-datasets
            prepared; empty means `data`. The folder of Keras' downloads and that of
            tensorflow-datasets come next, and a download last: into `data_dir`, or
            without one into the folder of Keras' downloads.

    Returns:
        Sources in memory, in the official order. What tensorflow-datasets prepared
        keeps the numbers it was prepared with.

    Raises:
        DataError: nothing was found and nothing can be downloaded (within 2 s where
            there is no network), or what was found is not what it should be.
    """
    published, root = PUBLISHED[name], data_folder(data_dir)
    downloads, shared = downloads_folder(), tfds.default_dir()
    data_set = _read(name, root)
    if data_set is None:
        _refuse_pickled(published, root)
        data_set = _read(name, downloads) or _read(name, shared)
    if data_set is not None:
        return data_set
    address = published.url(next(iter(published.archives)))
    why = unreachable(address)
    if why:
        missing = "" if os.path.isdir(root) else " (no such folder)"
        raise DataError(
            f"{published.title} was not found: no {published.folders[0]}, "
            f"{next(iter(published.archives))} or {name}/VERSION in {root}{missing}, "
            f"{downloads} or {shared}; no download: {why}; {published.how_to_get_it}"
        )
    folder = root if data_dir else downloads
    download(published, folder)
    return _read(name, folder)


def downloads_folder() -> str:
    """The folder of Keras' downloads."""
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    return os.path.abspath(os.path.join(os.path.expanduser(home), "datasets"))


def _read(name: str, root: str) -> DataSet | None:
    """The data set from a folder, which may be missing; None where it is not there."""
    published = PUBLISHED[name]
    found = published.reader(published, root)
    if found is None:
        folder = tfds.find_prepared(name, root)
        if folder is None:
            return None
        *found, names = tfds.read_arrays(folder, published.image_shape)
        _compare_names(published, folder, names)
    train, test, origin = found
    mean, deviation = channel_moments(train[0])
    return DataSet(
        name=name,
        train=ArraySource(*train),
        test=ArraySource(*test),
        class_names=published.class_names,
        mean=mean,
        deviation=deviation,
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
            f"{shown(' '.join(published.class_names), 100)}, found "
            f"{shown(' '.join(names[:20]), 100) or 'none'}"
        )


def _refuse_pickled(published, root):
    for folder in (root, *(os.path.join(root, x) for x in published.folders)):
        for name in published.pickled:
            path, is_folder = os.path.join(folder, name), name == published.pickled[0]
            if os.path.isdir(path) if is_folder else os.path.isfile(path):
                archive = next(iter(published.archives))
                raise DataError(
                    f"{path} is the pickled layout of {published.title}, which is not "
                    "read because unpickling runs code out of the file; the binary "
                    f"layout is expected: {published.folders[0]}/*.bin or {archive} "
                    f"({published.url(archive)}) in {root}"
                )


# The binary layout of CIFAR (Krizhevsky, 2009): per record a byte for each label, then
# the red, green and blue planes of the image, row by row.


def read_cifar(
    published: Published, root: str
) -> tuple[Examples, Examples, str] | None:
    """Reads the files of a folder, or out of the checked archive without unpacking it.

    Raises:
        DataError: a file is missing or is not what it should be; names the record.
    """
    files = [name for of_split in published.files.values() for name in of_split]
    for folder in (*(os.path.join(root, name) for name in published.folders), root):
        # One file is enough; an error then names those that are missing.
        if any(os.path.exists(os.path.join(folder, name)) for name in files):
            _check_names_file(published, os.path.join(folder, published.names_file))
            examples, origin = {}, f"{folder} (official binary layout)"
            for name in files:
                path = os.path.join(folder, name)
                with _reading(path), open_data_file(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    examples[name] = read_records(published, name, path, file, size)
            break
    else:
        [path] = (os.path.join(root, name) for name in published.archives)
        if not os.path.exists(path):
            return None
        examples = _read_archive(published, path, files)
        origin = f"{path} (official archive, checked)"
    train, test = (
        tuple(map(np.concatenate, zip(*(examples[x] for x in of_split), strict=True)))
        for of_split in published.files.values()
    )
    return train, test, origin


def read_records(
    published: Published, name: str, place: str, file: BinaryIO, size: int
) -> Examples:
    """Reads one file of records.

    Args:
        published: the data set.
        name: of the file.
        place: of the file, for messages.
        file: open for reading.
        size: of the file in bytes.

    Raises:
        DataError: it has another size, or a label is too high.
    """
    height, width, channels = published.image_shape
    kinds = [(kind, np.uint8) for kind in published.label_counts]
    dtype = np.dtype([*kinds, ("planes", np.uint8, (channels, height, width))])
    num_records = {k: n for x in published.files.values() for k, n in x.items()}[name]
    expected, record = num_records * dtype.itemsize, dtype.itemsize
    content = b""
    if size == expected:
        content = file.read(size)
        size = len(content)
    if size != expected:
        whole, rest = divmod(size, record)
        where = f"record {whole} and those after it are missing"
        if size > expected:
            where = f"it goes on after record {num_records - 1}, the last"
        elif rest:
            where = f"it breaks off in record {whole}, after {rest} of its bytes"
        raise DataError(
            f"{place}: expected {expected} bytes ({num_records} records of {record}), "
            f"found {size}: {where} (records are counted from 0)"
        )
    records = np.frombuffer(content, dtype)
    for kind, num_classes in published.label_counts.items():
        _check_labels(place, records[kind], num_classes, kind)
    images = np.empty((num_records, *published.image_shape), np.uint8)
    for channel in range(channels):  # Three times as fast as one transposition.
        images[..., channel] = records["planes"][:, channel]
    return images, records[kind].astype(np.int32)


def _check_labels(place, labels, num_classes, kind="label"):
    """Names the first record whose label is out of range."""
    wrong = np.flatnonzero(labels >= num_classes)
    if wrong.size:
        raise DataError(
            f"{place}: record {wrong[0]} (counted from 0) has the {kind} "
            f"{labels[wrong[0]]}, expected 0 to {num_classes - 1}"
            + (f"; {wrong.size - 1} more are wrong" if wrong.size > 1 else "")
        )


def _check_names_file(published, path):
    """Refuses a file of other class names or another order; it may be missing."""
    if not os.path.exists(path):
        return
    with _reading(path):
        content = read_data_file(path, MOST_NAMES_BYTES)
    lines = content.decode("utf-8", "replace").splitlines()
    names = tuple(line.strip() for line in lines if line.strip())
    _compare_names(published, path, names)


def _read_archive(published, path, files):
    """File -> its examples, out of the archive; nothing is written anywhere."""
    members = {f"{published.folders[0]}/{name}": name for name in files}
    [sha256] = published.archives.values()
    examples = {}
    # What is checked is what is read: both through one open file.
    with _reading(path), open_data_file(path, MOST_ARCHIVE_BYTES) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise DataError(
                f"{path}: expected sha256 {sha256}, found {found}; it may be a partial "
                f"download: delete it and fetch {published.url(path)} again"
            )
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r|gz") as archive:
            for member in archive:
                name = members.get(member.name)
                if name and member.isreg():
                    place, content = f"{path}: {name}", archive.extractfile(member)
                    examples[name] = read_records(
                        published, name, place, content, member.size
                    )
    for name in files:
        if name not in examples:
            raise DataError(f"{path}: {name} is missing")
    return examples


# IDX files (yann.lecun.com/exdb/mnist, "File formats"): two zero bytes, the type of
# the values, the number of dimensions, each dimension as four bytes, the highest first;
# then the values in row-major order.


def read_mnist(
    published: Published, root: str
) -> tuple[Examples, Examples, str] | None:
    """Reads the four IDX files of a folder, packed or not.

    Raises:
        DataError: one is missing or is not what it should be; names the record.
    """
    stems = {k: n for of_split in published.files.values() for k, n in of_split.items()}
    for folder in (*(os.path.join(root, name) for name in published.folders), root):
        paths = {
            f"{stem}-{kind}": _find(folder, f"{stem}-{kind}")
            for stem in stems
            for kind in (IMAGES, LABELS)
        }
        if any(paths.values()):
            break
    else:
        return None
    for name, path in paths.items():
        if path is None:
            raise DataError(f"{folder}: {name}, or that with .gz, is missing")
    height, width, _ = published.image_shape
    splits = []
    for stem, count in stems.items():
        images = read_idx(paths[f"{stem}-{IMAGES}"], (count, height, width))
        labels = read_idx(paths[f"{stem}-{LABELS}"], (count,))
        _check_labels(paths[f"{stem}-{LABELS}"], labels, len(published.class_names))
        splits.append((images[..., None], labels))
    for name, other in PUBLISHED.items():
        first = other.first_labels
        is_other = first and first != published.first_labels
        if is_other and tuple(splits[0][1][: len(first)].tolist()) == first:
            raise DataError(
                f"{folder}: these are the files of {other.title}, as the first labels "
                f"say; --dataset={name} reads them"
            )
    return *splits, f"{folder} (official IDX files)"


def _find(folder, name):
    for path in (os.path.join(folder, name), os.path.join(folder, f"{name}.gz")):
        if os.path.exists(path):
            return path
    return None


def read_idx(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Reads one file, packed where its name ends with `.gz`.

    Args:
        path: of the file.
        shape: that it must have; the first dimension counts the records.

    Returns:
        uint8 [*shape].

    Raises:
        DataError: it is missing, not such a file, of another shape, or cut short.
    """
    header = bytes([0, 0, UNSIGNED_BYTE, len(shape)])
    header += b"".join(size.to_bytes(4, "big") for size in shape)
    num_bytes, is_packed = math.prod(shape), path.endswith(".gz")
    # Behind its content a packed file may go on with zeros, which would all be read.
    most_bytes = 2 * num_bytes + PACKING_BYTES if is_packed else None
    with _reading(path), contextlib.ExitStack() as stack:
        file = stack.enter_context(open_data_file(path, most_bytes))
        if is_packed:
            file = stack.enter_context(gzip.open(file))
        actual = file.read(len(header))
        # One byte more than expected reveals a file that is too long.
        content = file.read(num_bytes + 1)
    if actual[:4] != header[:4]:
        raise DataError(
            f"{path}: is not an IDX file of bytes with {len(shape)} dimension(s): its "
            f"magic number is 0x{actual[:4].hex()}, expected 0x{header[:4].hex()}"
        )
    if len(actual) < len(header):
        raise DataError(f"{path}: breaks off in its header, after {len(actual)} bytes")
    if actual != header:
        sizes = np.frombuffer(actual, ">u4")[1:]
        raise DataError(
            f"{path}: holds {'x'.join(map(str, sizes))} (records, then height and "
            f"width), expected {'x'.join(map(str, shape))}"
        )
    if len(content) != num_bytes:
        record_bytes = num_bytes // shape[0]
        where = f"it breaks off in record {len(content) // record_bytes}"
        if len(content) > num_bytes:
            where = f"it goes on after record {shape[0] - 1}, the last"
        raise DataError(
            f"{path}: expected {num_bytes} bytes after the header ({shape[0]} records "
            f"of {record_bytes}): {where} (records are counted from 0)"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


# Downloads.


def download(published: Published, folder: str) -> None:
    """Downloads the archives into a folder, one process at a time.

    Raises:
        DataError: an archive cannot be fetched or written, has another checksum, or
            nothing of it came for STALL_SECS; nothing is left of it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with open_lock_file(os.path.join(folder, ".towers-download.lock")) as lock:
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
        reader=read_cifar,
        label_counts={"label": 10},
        names_file="batches.meta.txt",
        pickled=(
            "cifar-10-batches-py",
            "cifar-10-python.tar.gz",
            "data_batch_1",
            "test_batch",
        ),
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
        reader=read_cifar,
        label_counts={"coarse label": 20, "fine label": 100},
        names_file="fine_label_names.txt",
        pickled=("cifar-100-python", "cifar-100-python.tar.gz", "train", "test"),
    ),
    # LeCun et al., 1998. The second folder is that of torchvision.
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
        reader=read_mnist,
        first_labels=(5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
    ),
    # Xiao et al., 2017. The second folder is that of Keras, the third of torchvision.
    "fashion_mnist": Published(
        title="Fashion-MNIST",
        class_names=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
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
        reader=read_mnist,
        first_labels=(9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
    ),
}
