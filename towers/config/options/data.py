"""Options of the data: where the images are, their size, input and augmentation."""

import dataclasses

from towers.config import choices
from towers.config.options import option


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Data set, input, augmentation and seed."""

    dataset: str = option(
        "cifar10",
        f"Data set: {choices.explained('dataset')}.",
        table="dataset",
    )
    data_dir: str = option(
        "",
        "Folder that holds the data set; empty looks in data/ and in the default "
        "folder of tensorflow-datasets.",
        read_by="dataset",
        free=True,
    )
    image_size: int = option(
        0,
        "Pixels of height and width to which the images of image_folder and tfds:NAME "
        "are resized and cropped; 0 takes them as they are, or at 64 if they differ.",
        read_by="dataset",
        at_least=0,
    )
    early_sizes: str = option(
        "",
        "Pixels of height and width to which images are shrunk in the first part of "
        "--num_epochs, such as 24:0.5 in the first half; several by commas, growing: "
        "16:0.2,24:0.5.",
    )
    input: str = option(
        "auto",
        "Batches are read ahead (stream; for GPUs also copied ahead), or made from "
        "images that lie on the towers' devices (resident); auto: resident on "
        "GPUs where the data lies in memory.",
        choices=("auto", "stream", "resident"),
        free=True,
    )
    image_cache_mb: float = option(
        2000.0,
        "Megabytes of decoded images of image_folder and tfds:NAME that are kept in "
        "memory; 0 decodes them in every epoch.",
        read_by="dataset",
        at_least=0,
        free=True,
    )
    max_image_pixels: int = option(
        choices.MAX_IMAGE_PIXELS,
        "Most pixels of an image file of image_folder and tfds:NAME, all frames of an "
        "animation together; a larger one is refused before it is decoded.",
        read_by="dataset",
        at_least=1,
        free=True,
    )
    bad_images: str = option(
        "stop",
        "Image files of image_folder and tfds:NAME that cannot be used end the run "
        "(stop), or all files are read at the start and those left out (skip).",
        choices=("stop", "skip"),
        read_by="dataset",
        free=True,
    )
    validation_fraction: float = option(
        0.0,
        "Fraction of the images of each class, the same for every seed, that is held "
        "out; the evaluations during training then use it, and the best step is kept.",
        at_least=0,
        below=1,
    )
    augment: str = option(
        "tutorial",
        f"Augmentation: {choices.explained('augment')}.",
        table="augment",
    )
    color_jitter: float = option(
        0.0,
        "Strength s of random brightness, contrast and saturation, by factors from "
        "max(0, 1 - s) to 1 + s; 0 for none.",
        at_least=0,
    )
    random_erasing: float = option(
        0.0,
        "Probability that a random rectangle of an image is erased.",
        at_least=0,
        at_most=1,
    )
    cutout_size: int = option(
        0,
        "Side of the square that is cut out of every image, in pixels; 0 for none.",
        at_least=0,
    )
    mixup: float = option(
        0.0,
        "Mix each image and its label with another one's by shares from Beta(x, x), x "
        "being this; 0 for none.",
        at_least=0,
    )
    cutmix: float = option(
        0.0,
        "Paste into each image a rectangle of another one, its share of the area and "
        "of the label from Beta(x, x); 0 for none. With --mixup, one of the two at "
        "random.",
        at_least=0,
    )
    seed: int = option(
        0,
        "Seed of the parameters, the order and the augmentation.",
        at_least=0,
        below=2**63,
    )
