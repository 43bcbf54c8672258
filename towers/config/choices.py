"""The choices of a run by name: networks, data sets, optimizers and so on.

The tables are the only place where a choice is listed. Flags, their help, messages and
tests read them; a target is imported when it is built, so reading a table needs no
TensorFlow. Instead of a name the open tables also take FILE.py:FUNCTION, a function in
a Python file of the user. `towers.config.factories` imports and calls the targets.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from towers.errors import ConfigError, nearest

# Ends the name of a family of choices: tfds:NAME takes any name after "tfds:".
FAMILY = "NAME"
IN_A_FILE = "FILE.py:FUNCTION"


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of a table.

    Attributes:
        target: "module:function", or "path/to/file.py:function".
        help: one line, without a full stop.
        options: keyword arguments that the row fixes.
        traits: facts that are needed before the target is imported.
    """

    target: str
    help: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    traits: frozenset[str] = frozenset()

    @property
    def is_in_a_file(self) -> bool:
        return re.fullmatch(r".+\.py:\w+", self.target) is not None


DATASETS = {
    "cifar10": Choice(
        "towers.data.published:load",
        "60,000 color images, 10 classes",
        {"name": "cifar10"},
    ),
    "cifar100": Choice(
        "towers.data.published:load", "the same, 100 classes", {"name": "cifar100"}
    ),
    "mnist": Choice(
        "towers.data.published:load", "70,000 gray digits", {"name": "mnist"}
    ),
    "fashion_mnist": Choice(
        "towers.data.published:load", "70,000 gray clothes", {"name": "fashion_mnist"}
    ),
    "image_folder": Choice(
        "towers.data.image_folder:load",
        "a folder of image files per class",
    ),
    "embedded": Choice(
        "towers.data.embedded:load",
        "12,000 drawn images, 10,000 for training",
        {"seed": 0},
    ),
    "synthetic": Choice("towers.data.synthetic:load", "noise, for timing"),
    "tfds:NAME": Choice(
        "towers.data.tfds:load",
        "any that tensorflow-datasets has prepared",
    ),
}

# Trait "by_image": each image is standardized by itself.
AUGMENTS = {
    "none": Choice("towers.data.augment:none", "standardized by the training set only"),
    "tutorial": Choice(
        "towers.data.augment:tutorial",
        "random 24x24 crop, flip, brightness, contrast, standardized per image",
        traits=frozenset({"by_image"}),
    ),
    "pad_crop_flip": Choice(
        "towers.data.augment:pad_crop_flip", "pad by 4 pixels, crop, flip"
    ),
    "translate_flip": Choice(
        "towers.data.augment:translate_flip",
        "2 pixels, mirrored edges, alternating flips",
        {"pixels": 2},
    ),
    "translate_4_flip": Choice(
        "towers.data.augment:translate_flip", "the same by 4 pixels", {"pixels": 4}
    ),
    "random_resized_crop": Choice(
        "towers.data.crops:random_resized_crop",
        "crop of random size and shape, resized; flip",
    ),
    "rand_augment": Choice(
        "towers.data.rand_augment:rand_augment",
        "the same, then two random operations on colors or places of pixels",
    ),
}

# Trait "own_moments": its images are standardized by its own mean and deviation.
MODELS = {
    "cnn": Choice("towers.models.cnn:create_model", "the CIFAR-10 tutorial's network"),
    "lenet": Choice("towers.models.lenet:create_model", "LeNet with rectifiers"),
    "alexnet": Choice(
        "towers.models.alexnet:create_model", "AlexNet in one column", {"columns": 1}
    ),
    "alexnet_two_columns": Choice(
        "towers.models.alexnet:create_model", "AlexNet as published", {"columns": 2}
    ),
    "resnet18": Choice(
        "towers.models.resnet:create_resnet18", "18 layers, stem for small images"
    ),
    "resnet50": Choice(
        "towers.models.resnet:create_imagenet_resnet",
        "50 layers with bottlenecks, for large images",
        {"blocks": (3, 4, 6, 3)},
    ),
    "resnet20": Choice(
        "towers.models.resnet:create_cifar_resnet", "CIFAR ResNet", {"depth": 20}
    ),
    "resnet32": Choice(
        "towers.models.resnet:create_cifar_resnet", "32 layers", {"depth": 32}
    ),
    "resnet44": Choice(
        "towers.models.resnet:create_cifar_resnet", "44 layers", {"depth": 44}
    ),
    "resnet56": Choice(
        "towers.models.resnet:create_cifar_resnet", "56 layers", {"depth": 56}
    ),
    "resnet110": Choice(
        "towers.models.resnet:create_cifar_resnet", "110 layers", {"depth": 110}
    ),
    "wide_resnet_28_10": Choice(
        "towers.models.wide_resnet:create_model",
        "WRN-28-10",
        {"depth": 28, "widening": 10},
    ),
    "convmixer_256_8": Choice(
        "towers.models.convmixer:create_model",
        "ConvMixer-256/8",
        {"channels": 256, "depth": 8},
    ),
    "speedrun": Choice(
        "towers.models.speedrun:create_model",
        "trained to 94 % on CIFAR-10 in seconds on a GPU",
        {"widths": (64, 256, 256), "depth": 2, "momentum": 0.6},
    ),
    "speedrun_deep": Choice(
        "towers.models.speedrun:create_model",
        "its larger form, to 96 %",
        {"widths": (128, 384, 512), "depth": 3, "momentum": 0.9},
    ),
    "keras:NAME": Choice(
        "towers.models.applications:create_model",
        "any of keras.applications, such as keras:ResNet50",
        traits=frozenset({"own_moments"}),
    ),
}

# Trait "scale_free": a step is as long, however long the gradients are.
# Trait "whole_parameters": an update needs every element of a parameter.
OPTIMIZERS = {
    "sgd": Choice(
        "towers.optim.optimizers:sgd", "gradient descent, with --momentum a heavy ball"
    ),
    "nesterov": Choice("towers.optim.optimizers:nesterov", "Nesterov's momentum"),
    "rmsprop": Choice(
        "towers.optim.optimizers:rmsprop",
        "over the root mean square of the gradients",
        traits=frozenset({"scale_free"}),
    ),
    "adamw": Choice(
        "towers.optim.optimizers:adamw",
        "Adam with decoupled weight decay",
        traits=frozenset({"scale_free"}),
    ),
    "lars": Choice(
        "towers.optim.optimizers:lars",
        "layer-wise rates, for large batches",
        traits=frozenset({"scale_free", "sums"}),
    ),
    "muon": Choice(
        "towers.optim.optimizers:muon",
        "orthogonalized momentum for convolutions, nesterov for the rest",
        traits=frozenset({"scale_free", "sums", "whole_parameters"}),
    ),
}

# Trait "by_length": the shape depends on --num_epochs.
SCHEDULES = {
    "constant": Choice("towers.optim.schedules:constant", "the same rate throughout"),
    "exponential": Choice("towers.optim.schedules:exponential", "a falling staircase"),
    "smooth_exponential": Choice(
        "towers.optim.schedules:smooth_exponential", "its smooth form"
    ),
    "piecewise": Choice("towers.optim.schedules:piecewise", "by --epoch_factors"),
    "cosine": Choice(
        "towers.optim.schedules:cosine",
        "half a cosine to zero at --num_epochs",
        traits=frozenset({"by_length"}),
    ),
    "linear": Choice(
        "towers.optim.schedules:linear",
        "a line to zero at --num_epochs",
        traits=frozenset({"by_length"}),
    ),
    "one_cycle": Choice(
        "towers.optim.schedules:one_cycle",
        "a line up and a line down to zero at --num_epochs",
        traits=frozenset({"by_length"}),
    ),
}

# Trait "asynchronous": each tower applies its own gradients at once.
# Trait "sharded": no device holds a whole kernel.
# Trait "processes": several processes may train together.
STRATEGIES = {
    "towers": Choice(
        "towers.parallel.strategies:towers",
        "one set of variables, which all towers fetch",
    ),
    "async_towers": Choice(
        "towers.parallel.strategies:towers",
        "the same variables, updated by each tower at once",
        traits=frozenset({"asynchronous"}),
    ),
    "replicated": Choice(
        "towers.parallel.strategies:replicated",
        "a copy per device, gradients all-reduced",
    ),
    "multi_worker": Choice(
        "towers.parallel.strategies:multi_worker",
        "the same on several machines, one process or more on each",
        traits=frozenset({"processes"}),
    ),
    "model_parallel": Choice(
        "towers.parallel.strategies:model_parallel",
        "channels split over a group of devices",
        traits=frozenset({"sharded"}),
    ),
}

TTA = {
    "none": Choice("towers.data.tta:none", "the images alone"),
    "mirror": Choice("towers.data.tta:mirror", "with the mirrored image"),
    "translate": Choice(
        "towers.data.tta:translate", "with images moved by a pixel as well"
    ),
    "translate_unsure": Choice(
        "towers.data.tta:translate_unsure",
        "so for the least confident quarter of each evaluation batch",
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
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "strategy": STRATEGIES,
    "tta": TTA,
}
CLOSED = ("tta",)


def find(option: str, name: str) -> Choice:
    """The choice of a name in the table of an option.

    Raises:
        ConfigError: there is none.
    """
    table = TABLES[option]
    if name in table and not name.endswith(f":{FAMILY}"):
        return table[name]
    in_a_file = Choice(name, "")
    if option not in CLOSED and in_a_file.is_in_a_file:
        return in_a_file
    family, colon, member = name.partition(":")
    row = table.get(f"{family}:{FAMILY}") if colon and member else None
    if row:
        return dataclasses.replace(row, options={**row.options, "name": member})
    raise ConfigError(
        f"{option}={name!r}: {nearest(name, table)}must be one of {listed(option)}"
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
