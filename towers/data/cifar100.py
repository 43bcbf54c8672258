"""CIFAR-100: 60,000 color images of 32x32 pixels in a hundred classes.

Read like CIFAR-10. The labels are the fine ones; the 20 coarse ones stand in the same
records and are only checked to be in range.
"""

from towers.data import cifar
from towers.data.sources import DataSet

FINE_LABEL_NAMES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle
    bowl boy bridge bus butterfly camel can castle caterpillar cattle
    chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket
    rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()
)

CIFAR100 = cifar.Cifar(
    name="cifar100",
    title="CIFAR-100",
    class_names=FINE_LABEL_NAMES,
    folder="cifar-100-binary",
    train_files={"train.bin": 50_000},
    test_file=("test.bin", 10_000),
    names_file="fine_label_names.txt",
    label_counts={"coarse label": 20, "fine label": 100},
    # As tensorflow-datasets has them in url_checksums/cifar100.txt. The archive's page
    # gives its md5 as 03b5dce01913d631647c71ecec9e9cb8.
    archive="cifar-100-binary.tar.gz",
    archive_bytes=168_513_733,
    archive_sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    pickled_folder="cifar-100-python",
    pickled_files=("cifar-100-python.tar.gz", "train", "test"),
)


def load(data_dir: str = "") -> DataSet:
    """Finds and reads CIFAR-100; the network is used only when no folder has it.

    Args:
        data_dir: folder that holds `cifar-100-binary/*.bin`, the `.bin` files
            themselves, `cifar-100-binary.tar.gz`, or what tensorflow-datasets prepared;
            empty means `data`. The default folder of tensorflow-datasets comes next,
            and a download with it last.

    Returns:
        50,000 training and 10,000 test images, uint8 [n, 32, 32, 3], labels 0 to 99, in
        the official order.

    Raises:
        DataError: as for CIFAR-10.
    """
    return cifar.load(CIFAR100, data_dir)
