"""CIFAR-10: 60,000 color images of 32x32 pixels in ten classes.

Read from the official binary layout, from the official archive of it, or through
tensorflow-datasets; all three give the same arrays in the same order.
"""

from towers.data import cifar
from towers.data.sources import DataSet

CIFAR10 = cifar.Cifar(
    name="cifar10",
    title="CIFAR-10",
    class_names=(
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
    ),
    folder="cifar-10-batches-bin",
    train_files={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
    test_file=("test_batch.bin", 10_000),
    names_file="batches.meta.txt",
    label_counts={"label": 10},
    # As tensorflow-datasets has them in url_checksums/cifar10.txt.
    archive="cifar-10-binary.tar.gz",
    archive_bytes=170_052_171,
    archive_sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    pickled_folder="cifar-10-batches-py",
    pickled_files=("cifar-10-python.tar.gz", "data_batch_1", "test_batch"),
)


def load(data_dir: str = "") -> DataSet:
    """Finds and reads CIFAR-10; the network is used only when no folder has it.

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
    return cifar.load(CIFAR10, data_dir)
