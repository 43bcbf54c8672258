"""Data sets, augmentation, and batches that are functions of (seed, step)."""

from towers.data import cifar10, embedded, synthetic
from towers.data.sources import DataSet

DATASETS = {
    "cifar10": cifar10.load,
    "embedded": embedded.load,
    "synthetic": synthetic.load,
}


def load(name: str, data_dir: str = "") -> DataSet:
    """Loads a data set by its name.

    Args:
        name: a key of DATASETS.
        data_dir: where the user keeps it; empty for the usual places.

    Raises:
        DataError: it is not there, or not what it should be.
    """
    return DATASETS[name](data_dir)
