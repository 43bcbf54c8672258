"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): 70,000 gray images
of 28x28 pixels in ten classes.

Both are published as four IDX files of the same names, which are read packed or
unpacked.
"""

import dataclasses
import os

import numpy as np

from towers.data import official
from towers.data.idx import read_idx
from towers.data.official import Official
from towers.data.records import check_labels
from towers.data.sources import DataSet
from towers.errors import DataError

SIZE = 28
# Split -> its name in the files, number of records.
SPLITS = {"train": ("train", 60_000), "test": ("t10k", 10_000)}
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


@dataclasses.dataclass(frozen=True)
class Mnist:
    """One of the two.

    Attributes:
        official: see there.
        folders: in --data_dir, searched before the folder itself.
        first_labels: of the training images. They tell the two data sets apart.
    """

    official: Official
    folders: tuple[str, ...]
    first_labels: tuple[int, ...]


def _official(name: str, title: str, class_names: tuple[str, ...], address: str):
    first = f"train-{IMAGES}"
    return Official(
        name=name,
        title=title,
        image_shape=(SIZE, SIZE, 1),
        class_names=class_names,
        url=f"{address}{first}.gz",
        official_files=f"{first}, {first}.gz",
        download_from=f"train-*-ubyte.gz and t10k-*-ubyte.gz from {address}",
    )


# The addresses are those of tensorflow-datasets' url_checksums/.
MNIST = Mnist(
    _official(
        "mnist",
        "MNIST",
        tuple("0123456789"),
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    # The second one as torchvision lays it out.
    folders=("mnist", "MNIST/raw"),
    first_labels=(5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
)
FASHION_MNIST = Mnist(
    _official(
        "fashion_mnist",
        "Fashion-MNIST",
        (
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
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    folders=("fashion_mnist", "fashion-mnist", "FashionMNIST/raw"),
    first_labels=(9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
)


def load(data_dir: str = "") -> DataSet:
    """Finds and reads MNIST; the network is used only when no folder has it.

    Args:
        data_dir: folder that holds the four files, or `mnist/` or `MNIST/raw/` with
            them, or what tensorflow-datasets prepared; empty means `data`. The default
            folder of tensorflow-datasets comes next, and a download with it last.

    Returns:
        60,000 training and 10,000 test images, uint8 [n, 28, 28, 1], in the official
        order. What tensorflow-datasets prepared keeps the numbers it was prepared with.

    Raises:
        DataError: nothing was found and nothing can be downloaded, or what was found is
            not what it should be.
    """
    return _load(MNIST, data_dir)


def load_fashion(data_dir: str = "") -> DataSet:
    """Finds and reads Fashion-MNIST, as `load` does MNIST, from `fashion_mnist/`,
    `fashion-mnist/`, `FashionMNIST/raw/` or the folder itself."""
    return _load(FASHION_MNIST, data_dir)


def _load(mnist: Mnist, data_dir: str) -> DataSet:
    return official.load(
        mnist.official, data_dir, lambda root: _read_files(mnist, root)
    )


def _read_files(mnist: Mnist, root: str) -> DataSet | None:
    for folder in (*(os.path.join(root, name) for name in mnist.folders), root):
        # One file is enough; an error then names those that are missing.
        if any(
            _find(folder, f"{stem}-{kind}")
            for stem, _ in SPLITS.values()
            for kind in (IMAGES, LABELS)
        ):
            train, test = (_read_split(folder, *split) for split in SPLITS.values())
            _check_first_labels(mnist, folder, train[1])
            origin = f"{folder} (official IDX files)"
            return official.from_arrays(mnist.official, train, test, origin)
    return None


def _find(folder: str, name: str) -> str | None:
    for path in (os.path.join(folder, name), os.path.join(folder, f"{name}.gz")):
        if os.path.exists(path):
            return path
    return None


def _read_split(
    folder: str, stem: str, num_records: int
) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [num_records, 28, 28, 1] and labels [num_records]."""
    paths = []
    for kind in (IMAGES, LABELS):
        path = _find(folder, f"{stem}-{kind}")
        if path is None:
            raise DataError(f"{folder}: {stem}-{kind}, or that with .gz, is missing")
        paths.append(path)
    images = read_idx(paths[0], (num_records, SIZE, SIZE))
    labels = read_idx(paths[1], (num_records,))
    check_labels(paths[1], labels, num_classes=10)
    return images[..., None], labels


def _check_first_labels(mnist: Mnist, folder: str, labels: np.ndarray) -> None:
    """Refuses the files of the other data set, which have the same names and form."""
    for other in (MNIST, FASHION_MNIST):
        first = tuple(labels[: len(other.first_labels)].tolist())
        if other is not mnist and first == other.first_labels:
            raise DataError(
                f"{folder}: these are the files of {other.official.title}, as the "
                f"first labels say; --dataset={other.official.name} reads them"
            )
