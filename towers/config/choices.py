"""The choices of a run by name: networks, data sets, optimizers and so on.

The tables are the only place where a choice is listed. Flags, help, messages and tests
read the tables, which needs no TensorFlow: a target is imported when it is built. The
open tables also take FILE.py:FUNCTION of the user. `towers.config.factories` imports
and calls the targets. docs/extending.md lists the code, tests and pages of a new row.
"""

import dataclasses
import re
from collections.abc import Mapping

from towers.config.metrics import METRICS
from towers.config.networks import MODELS
from towers.config.rows import Choice
from towers.config.synonyms import suggestion
from towers.errors import ConfigError

# Ends the name of a family of choices: tfds:NAME takes any name after "tfds:".
FAMILY = "NAME"
IN_A_FILE = "FILE.py:FUNCTION"

_PUBLISHED = "data.sets.published:load"
DATASETS = {
    "cifar10": Choice(
        "60,000 color images, 10 classes", {"name": "cifar10"}, _PUBLISHED
    ),
    "cifar100": Choice("the same, 100 classes", {"name": "cifar100"}, _PUBLISHED),
    "mnist": Choice("70,000 gray digits", {"name": "mnist"}, _PUBLISHED),
    "fashion_mnist": Choice(
        "70,000 gray clothes", {"name": "fashion_mnist"}, _PUBLISHED
    ),
    "image_folder": Choice(
        "a folder of image files per class", target="data.files.image_folder:load"
    ),
    # A file with an ending of two containers is the first one's.
    "parquet": Choice(
        "Parquet files with images, of Hugging Face",
        target="data.files.parquet:load",
        endings=(".parquet",),
    ),
    "table": Choice(
        "a table of image files and labels: CSV, TSV, text, JSON, Parquet",
        target="data.files.tables:load",
        endings=(".csv", ".tsv", ".lst", ".jsonl", ".ndjson", ".parquet"),
        if_named=(".json", ".txt"),
    ),
    "webdataset": Choice(
        "tar files of images and labels",
        target="data.files.tar_shards:load",
        endings=(".tar", ".tar.gz", ".tgz"),
    ),
    "tfrecord": Choice(
        "TFRecord files of tf.train.Example",
        target="data.files.tf_records:load",
        endings=(".tfrecord", ".tfrecords", ".tfrec"),
        numbered=r"-[\d?*]+-of-[\d?*]+$",
    ),
    "npz": Choice(
        "a NumPy file of arrays, as MedMNIST and Keras store them",
        target="data.sets.npz:load",
        endings=(".npz",),
    ),
    "shapes": Choice(
        "12,000 drawn images, 10,000 for training", {"seed": 0}, "data.sets.shapes:load"
    ),
    "synthetic": Choice("noise, for timing", target="data.sets.synthetic:load"),
    "tfds:NAME": Choice(
        "any that tensorflow-datasets has prepared", target="data.sets.tfds:load"
    ),
}
CONTAINERS = {k: row for k, row in DATASETS.items() if row.endings}

AUGMENTS = {
    "auto": Choice(
        "pad_crop_flip of images below 64x64, otherwise random_resized_crop",
        target="data.augment.crops:by_size",
    ),
    "none": Choice("standardized by the training set only"),
    "tutorial": Choice(
        "random 24x24 crop, flip, brightness, contrast, standardized per image",
        standardizes_images=True,
    ),
    "pad_crop_flip": Choice("pad by 4 pixels, crop, flip"),
    "translate_flip": Choice(
        "2 pixels, mirrored edges, alternating flips", {"pixels": 2}
    ),
    "translate_4_flip": Choice(
        "the same by 4 pixels", {"pixels": 4}, target="translate_flip"
    ),
    "random_resized_crop": Choice(
        "crop of random size and shape, resized; flip",
        target="data.augment.crops:random_resized_crop",
    ),
    "rand_augment": Choice(
        "the same, then two random operations on colors or places of pixels",
        target="data.augment.policies:crop_rand_augment",
    ),
}

POLICIES = {
    "none": Choice("no more"),
    "rand_augment": Choice("random operations at a fixed magnitude"),
    "trivial_augment": Choice("one operation at a random magnitude"),
    "auto_augment_cifar10": Choice(
        "one of 25 pairs of operations, learned on CIFAR-10",
        {"learned_on": "cifar10"},
        "auto_augment",
    ),
    "auto_augment_imagenet": Choice(
        "the same, learned on ImageNet", {"learned_on": "imagenet"}, "auto_augment"
    ),
    "augmix": Choice("three chains of operations, mixed"),
    "three_augment": Choice("gray, solarized or blurred, then jittered, as DeiT III"),
}

OPTIMIZERS = {
    "sgd": Choice("gradient descent, with --momentum a heavy ball"),
    "nesterov": Choice("Nesterov's momentum"),
    "rmsprop": Choice("over the gradients' root mean square", scale_free=True),
    "adam": Choice("Adam, weight decay in the loss", scale_free=True),
    "adamw": Choice("Adam with decoupled weight decay", scale_free=True),
    "lars": Choice("layer-wise rates, for large batches", scale_free=True, sums=True),
    "lamb": Choice("Adam with layer-wise rates", scale_free=True, sums=True),
    "lion": Choice("signs of a momentum", scale_free=True),
    "muon": Choice(
        "orthogonalized momentum for convolutions, nesterov for the rest",
        scale_free=True,
        sums=True,
        whole_parameters=True,
    ),
}

LOSSES = {
    "cross_entropy": Choice("of the softmax; of label sets binary_cross_entropy"),
    "focal": Choice("less of images that are classified well"),
    "binary_cross_entropy": Choice("of a sigmoid per class, their mean"),
}

SCHEDULES = {
    "constant": Choice("the same rate throughout"),
    "exponential": Choice("a falling staircase"),
    "smooth_exponential": Choice("its smooth form", {"is_smooth": True}, "exponential"),
    "piecewise": Choice("by --epoch_factors"),
    "cosine": Choice("half a cosine to zero at the end", by_length=True, warms_up=True),
    "linear": Choice("a line to zero at the end", by_length=True, warms_up=True),
    "one_cycle": Choice("a line up and a line down to zero at the end", by_length=True),
    "plateau": Choice("lowered if evaluations are no longer better", by_accuracy=True),
}

STRATEGIES = {
    "auto": Choice("replicated on several GPUs, otherwise towers"),
    "towers": Choice("one set of variables, which all towers fetch"),
    "async_towers": Choice(
        "the same variables, updated by each tower at once",
        target="towers",
        asynchronous=True,
        trainer_options=("async_scale_gradients", "max_staleness"),
    ),
    "replicated": Choice("a copy per device, gradients all-reduced"),
    "multi_worker": Choice(
        "the same on several machines, one process or more on each", processes=True
    ),
    "model_parallel": Choice("channels split over a group of devices", sharded=True),
}

# The choices of --best_by.
BEST_BY = {
    "auto": Choice("accuracy, of label sets map", target="accuracy"),
    **{name: row for name, row in METRICS.items() if row.selects},
}

TTA = {
    "none": Choice("the images alone"),
    "mirror": Choice("with the mirrored image"),
    "translate": Choice("with images moved by a pixel as well"),
}

PRECISIONS = ("float32", "bfloat16", "float16")  # values of the option precision
MAX_IMAGE_PIXELS = 50_000_000  # the default of max_image_pixels

# Option -> its table. The open ones also take FILE.py:FUNCTION.
TABLES: dict[str, Mapping[str, Choice]] = {
    "dataset": DATASETS,
    "augment": AUGMENTS,
    "policy": POLICIES,
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "loss": LOSSES,
    "schedule": SCHEDULES,
    "strategy": STRATEGIES,
    "best_by": BEST_BY,
    "tta": TTA,
}
CLOSED = ("policy", "tta")

# Option -> the module in towers of the functions of its choices, or "{}" for one of the
# function's name, see `target_of`.
_MODULES = {
    "augment": "data.augment.augmentation",
    "policy": "data.augment.policies",
    "optimizer": "optim.optimizers",
    "loss": "optim.losses",
    "schedule": "optim.schedules",
    "strategy": "parallel.strategies.{}",
    "best_by": "metrics.metrics",
    "tta": "data.augment.tta",
}

# Options whose value may be an object of a Python program, by the name "given:CRC".
GIVEN = ("dataset", "model")


def find(option: str, name: str) -> Choice:
    """Return the row of a name in the table of an option."""
    table = TABLES[option]
    if name in table and not name.endswith(f":{FAMILY}"):
        return table[name]
    # What a function in a file needs is not known before it is read.
    in_a_file = Choice(
        "", target=name, sums=option == "optimizer", by_length=option == "schedule"
    )
    if option not in CLOSED and in_a_file.is_in_a_file:
        return in_a_file
    if option in GIVEN and re.fullmatch("given:[0-9a-f]{8}", name):
        return Choice("", is_given=True)
    family, colon, member = name.partition(":")
    row = table.get(f"{family}:{FAMILY}") if colon and member else None
    if row:
        return dataclasses.replace(row, options={**row.options, "name": member})
    way = f"{suggestion(name, table)}must be one of {listed(option)}"
    raise ConfigError(f"{option}={name!r}: {way}")


def target_of(option: str, name: str) -> str:
    """Return the target of a choice, as "module:function" in towers, or in a file."""
    target = find(option, name).target or name
    return target if ":" in target else f"{_MODULES[option].format(target)}:{target}"


def listed(option: str) -> str:
    """Return the names of an option's choices, for a message."""
    names = ", ".join(TABLES[option])
    return names if option in CLOSED else f"{names} or {IN_A_FILE}"
