"""Names, sizes and checksums of the files of CIFAR, MNIST and Fashion-MNIST."""

import dataclasses
import os
from collections.abc import Mapping

import numpy as np

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file, perhaps packed with .gz, of equal records after a header."""

    name: str
    num_records: int
    dtype: np.dtype  # a byte for each label, then "planes" of the image, row by row
    header: bytes = b""


@dataclasses.dataclass(frozen=True)
class Published:
    """One of the data sets."""

    title: str  # for messages
    class_names: tuple[str, ...]  # in the order of the labels
    image_shape: tuple[int, int, int]  # height, width, channels
    address: str  # URL of the folder of the archives
    # Path in --data_dir -> SHA-256; as tensorflow-datasets has them.
    archives: Mapping[str, str]
    folders: tuple[str, ...]  # in --data_dir, searched before the folder itself
    # Split -> file, of IDX files the beginning of their names -> number of records, in
    # the official order.
    files: Mapping[str, Mapping[str, int]]
    # Label in a record -> number of its classes; the last one counts.
    label_counts: Mapping[str, int]
    # Folder and archive of the pickled layout, which are never opened.
    pickled: tuple[str, ...] = ()
    # Labels of the first training images, to tell data sets of IDX files apart, whose
    # files have the same names; empty for other files.
    first_labels: tuple[int, ...] = ()

    def url(self, archive: str) -> str:
        """Return the address of an archive."""
        return self.address + os.path.basename(archive)

    def record_files(self, split: str) -> list[RecordFile]:
        """Return the files of a split: CIFAR's binary layout, or IDX files."""
        height, width, channels = self.image_shape
        labels = [(name, np.uint8) for name in self.label_counts]
        planes = [("planes", np.uint8, (channels, height, width))]
        files = self.files[split].items()
        if not self.first_labels:
            record = np.dtype([*labels, *planes])
            return [RecordFile(name, count, record) for name, count in files]
        [(stem, n)] = files
        return [
            RecordFile(f"{stem}-{name}", n, np.dtype(record), _idx_header(n, *shape))
            for name, shape, record in (
                (IMAGES, (height, width), planes),
                (LABELS, (), labels),
            )
        ]

    @property
    def how_to_get_it(self) -> str:
        """The way out for messages."""
        names = ", ".join(map(os.path.basename, self.archives))
        return (
            f"to get it, fetch {names} from {self.address} on a machine with a network "
            "and put it, packed or unpacked, into a folder that --data_dir names; "
            "--dataset=shapes needs no data"
        )


_KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz/"
_CIFAR10 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_CIFAR100 = "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
_IDX_FILES = {"train": {"train": 60_000}, "test": {"t10k": 10_000}}


def _idx_header(*dims):
    # Two zero bytes, the code of uint8, the number of dimensions, and each dimension.
    return bytes([0, 0, 8, len(dims)]) + np.array(dims, ">u4").tobytes()


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
        archives={"cifar-10-binary.tar.gz": _CIFAR10},
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
        archives={"cifar-100-binary.tar.gz": _CIFAR100},
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
