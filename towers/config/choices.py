"""The choices of a run by name: networks, data sets, optimizers and so on.

The tables are the only place where a choice is listed. Flags, their help, messages and
tests read them; a target is imported when it is built, so reading a table needs no
TensorFlow. Instead of a name the open tables also take FILE.py:FUNCTION, a function in
a Python file of the user. `towers.config.factories` imports and calls the targets.
"""

import dataclasses
import re
from collections.abc import Mapping

from towers.config.networks import MODELS
from towers.config.rows import (
    AugmentRow,
    Choice,
    OptimizerRow,
    ScheduleRow,
    StrategyRow,
)
from towers.config.synonyms import suggestion
from towers.errors import ConfigError

# Ends the name of a family of choices: tfds:NAME takes any name after "tfds:".
FAMILY = "NAME"
IN_A_FILE = "FILE.py:FUNCTION"

DATASETS = {
    "cifar10": Choice(
        "data.sets.published:load",
        "60,000 color images, 10 classes",
        {"name": "cifar10"},
    ),
    "cifar100": Choice(
        "data.sets.published:load", "the same, 100 classes", {"name": "cifar100"}
    ),
    "mnist": Choice(
        "data.sets.published:load", "70,000 gray digits", {"name": "mnist"}
    ),
    "fashion_mnist": Choice(
        "data.sets.published:load", "70,000 gray clothes", {"name": "fashion_mnist"}
    ),
    "image_folder": Choice(
        "data.files.image_folder:load", "a folder of image files per class"
    ),
    "table": Choice(
        "data.files.containers:load",
        "a table of image files and labels: CSV, TSV, JSON Lines, Parquet",
        {"container": "table"},
    ),
    "parquet": Choice(
        "data.files.containers:load",
        "Parquet files with images, of Hugging Face",
        {"container": "parquet"},
    ),
    "webdataset": Choice(
        "data.files.containers:load",
        "tar files of images and labels",
        {"container": "webdataset"},
    ),
    "tfrecord": Choice(
        "data.files.containers:load",
        "TFRecord files of tf.train.Example",
        {"container": "tfrecord"},
    ),
    "shapes": Choice(
        "data.sets.shapes:load", "12,000 drawn images, 10,000 for training", {"seed": 0}
    ),
    "synthetic": Choice("data.sets.synthetic:load", "noise, for timing"),
    "tfds:NAME": Choice(
        "data.sets.tfds:load", "any that tensorflow-datasets has prepared"
    ),
}

AUGMENTS = {
    "auto": AugmentRow(
        "data.augment.crops:by_size",
        "pad_crop_flip of images below 64x64, otherwise random_resized_crop",
    ),
    "none": AugmentRow(
        "data.augment.augmentation:none", "standardized by the training set only"
    ),
    "tutorial": AugmentRow(
        "data.augment.augmentation:tutorial",
        "random 24x24 crop, flip, brightness, contrast, standardized per image",
        standardizes_images=True,
    ),
    "pad_crop_flip": AugmentRow(
        "data.augment.augmentation:pad_crop_flip", "pad by 4 pixels, crop, flip"
    ),
    "translate_flip": AugmentRow(
        "data.augment.augmentation:translate_flip",
        "2 pixels, mirrored edges, alternating flips",
        {"pixels": 2},
    ),
    "translate_4_flip": AugmentRow(
        "data.augment.augmentation:translate_flip",
        "the same by 4 pixels",
        {"pixels": 4},
    ),
    "random_resized_crop": AugmentRow(
        "data.augment.crops:random_resized_crop",
        "crop of random size and shape, resized; flip",
    ),
    "rand_augment": AugmentRow(
        "data.augment.policies:crop_rand_augment",
        "the same, then two random operations on colors or places of pixels",
    ),
}

POLICIES = {
    "none": Choice("data.augment.policies:none", "no more"),
    "rand_augment": Choice(
        "data.augment.policies:rand_augment", "random operations at a fixed magnitude"
    ),
    "trivial_augment": Choice(
        "data.augment.policies:trivial_augment", "one operation at a random magnitude"
    ),
    "auto_augment_cifar10": Choice(
        "data.augment.policies:auto_augment",
        "one of 25 pairs of operations, learned on CIFAR-10",
        {"learned_on": "cifar10"},
    ),
    "auto_augment_imagenet": Choice(
        "data.augment.policies:auto_augment",
        "the same, learned on ImageNet",
        {"learned_on": "imagenet"},
    ),
    "augmix": Choice(
        "data.augment.policies:augmix", "three chains of operations, mixed"
    ),
    "three_augment": Choice(
        "data.augment.policies:three_augment",
        "gray, solarized or blurred, then color jitter, as DeiT III",
    ),
}

OPTIMIZERS = {
    "sgd": OptimizerRow(
        "optim.optimizers:sgd", "gradient descent, with --momentum a heavy ball"
    ),
    "nesterov": OptimizerRow("optim.optimizers:nesterov", "Nesterov's momentum"),
    "rmsprop": OptimizerRow(
        "optim.optimizers:rmsprop",
        "over the root mean square of the gradients",
        scale_free=True,
    ),
    "adam": OptimizerRow(
        "optim.optimizers:adam", "Adam, weight decay in the loss", scale_free=True
    ),
    "adamw": OptimizerRow(
        "optim.optimizers:adamw", "Adam with decoupled weight decay", scale_free=True
    ),
    "lars": OptimizerRow(
        "optim.optimizers:lars",
        "layer-wise rates, for large batches",
        scale_free=True,
        sums=True,
    ),
    "lamb": OptimizerRow(
        "optim.optimizers:lamb",
        "layer-wise rates for Adam, for large batches",
        scale_free=True,
        sums=True,
    ),
    "lion": OptimizerRow(
        "optim.optimizers:lion", "signs of a momentum", scale_free=True
    ),
    "muon": OptimizerRow(
        "optim.optimizers:muon",
        "orthogonalized momentum for convolutions, nesterov for the rest",
        scale_free=True,
        sums=True,
        whole_parameters=True,
    ),
}

LOSSES = {
    "cross_entropy": Choice(
        "optim.losses:cross_entropy",
        "of the softmax; of images with several labels binary_cross_entropy",
    ),
    "focal": Choice("optim.losses:focal", "less of images that are classified well"),
    "binary_cross_entropy": Choice(
        "optim.losses:binary_cross_entropy", "of a sigmoid per class, their mean"
    ),
}

SCHEDULES = {
    "constant": ScheduleRow("optim.schedules:constant", "the same rate throughout"),
    "exponential": ScheduleRow("optim.schedules:exponential", "a falling staircase"),
    "smooth_exponential": ScheduleRow(
        "optim.schedules:exponential", "its smooth form", {"is_smooth": True}
    ),
    "piecewise": ScheduleRow("optim.schedules:piecewise", "by --epoch_factors"),
    "cosine": ScheduleRow(
        "optim.schedules:cosine",
        "half a cosine to zero at --num_epochs",
        by_length=True,
        warms_up=True,
    ),
    "linear": ScheduleRow(
        "optim.schedules:linear",
        "a line to zero at --num_epochs",
        by_length=True,
        warms_up=True,
    ),
    "one_cycle": ScheduleRow(
        "optim.schedules:one_cycle",
        "a line up and a line down to zero at --num_epochs",
        by_length=True,
    ),
    "plateau": ScheduleRow(
        "optim.schedules:plateau",
        "lowered where evaluations on held-out images are no longer better",
        by_accuracy=True,
    ),
}

STRATEGIES = {
    "auto": StrategyRow(
        "parallel.strategies:auto", "replicated on several GPUs, otherwise towers"
    ),
    "towers": StrategyRow(
        "parallel.strategies:towers", "one set of variables, which all towers fetch"
    ),
    "async_towers": StrategyRow(
        "parallel.strategies:towers",
        "the same variables, updated by each tower at once",
        asynchronous=True,
        trainer_options=("async_scale_gradients", "max_staleness"),
    ),
    "replicated": StrategyRow(
        "parallel.strategies:replicated", "a copy per device, gradients all-reduced"
    ),
    "multi_worker": StrategyRow(
        "parallel.strategies:multi_worker",
        "the same on several machines, one process or more on each",
        processes=True,
    ),
    "model_parallel": StrategyRow(
        "parallel.strategies:model_parallel",
        "channels split over a group of devices",
        sharded=True,
    ),
}

METRICS = {
    "auto": Choice("evaluation.metrics:accuracy", "accuracy, of label sets map"),
    "accuracy": Choice("evaluation.metrics:accuracy", "correct predictions"),
    "loss": Choice("evaluation.metrics:negative_loss", "the lowest loss"),
    "macro_f1": Choice("evaluation.metrics:macro_f1", "mean F1 of the classes"),
    "balanced_accuracy": Choice(
        "evaluation.figures:balanced_accuracy", "mean recall of the classes"
    ),
    "map": Choice(
        "evaluation.label_sets:mean_average_precision",
        "mean average precision of label sets",
    ),
}

TTA = {
    "none": Choice("data.augment.tta:none", "the images alone"),
    "mirror": Choice("data.augment.tta:mirror", "with the mirrored image"),
    "translate": Choice(
        "data.augment.tta:translate", "with images moved by a pixel as well"
    ),
}

# Of the option precision.
PRECISIONS = ("float32", "bfloat16", "float16")

# The default of max_image_pixels.
MAX_IMAGE_PIXELS = 50_000_000

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
    "best_by": METRICS,
    "tta": TTA,
}
CLOSED = ("policy", "tta")

# Assumed of a function in a file, which is not read yet.
_OF_A_FILE = {"optimizer": {"sums": True}, "schedule": {"by_length": True}}

# Options whose value may be an object of a Python program, by the name "given:CRC".
GIVEN = ("dataset", "model")


def find(option: str, name: str) -> Choice:
    """The choice of a name in the table of an option: a row of the table's type."""
    table = TABLES[option]
    if name in table and not name.endswith(f":{FAMILY}"):
        return table[name]
    kind = type(next(iter(table.values())))
    in_a_file = kind(name, "", **_OF_A_FILE.get(option, {}))
    if option not in CLOSED and in_a_file.is_in_a_file:
        return in_a_file
    if option in GIVEN and re.fullmatch("given:[0-9a-f]{8}", name):
        return kind(name, "", is_given=True)
    family, colon, member = name.partition(":")
    row = table.get(f"{family}:{FAMILY}") if colon and member else None
    if row:
        return dataclasses.replace(row, options={**row.options, "name": member})
    raise ConfigError(
        f"{option}={name!r}: {suggestion(name, table)}must be one of {listed(option)}"
    )


def listed(option: str) -> str:
    """The names of an option's choices, for a message."""
    names = list(TABLES[option])
    if option in CLOSED:
        return ", ".join(names)
    return f"{', '.join(names)} or {IN_A_FILE}"


def explained(option: str) -> str:
    """Each name of an option's choices with its help, for --help."""
    rows = [f"{name} ({row.help})" for name, row in TABLES[option].items()]
    if option in CLOSED:
        return ", ".join(rows)
    return f"{', '.join(rows)}, or {IN_A_FILE} for one of your own"
