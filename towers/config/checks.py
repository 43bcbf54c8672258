"""Checks of a Config: contradictions, options without effect, and the environment."""

import math
import os
import re
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from towers.config import factories
from towers.config.choices import TABLES
from towers.config.list_options import height_and_width
from towers.config.metrics import METRICS, metrics_of
from towers.config.preprocessing import parse_standardization, parse_value_range
from towers.config.pretrained import IMAGENET
from towers.errors import ConfigError

if TYPE_CHECKING:
    from towers.config.config import Config

# Option -> the field, or property, of Config without which it has no effect.
_NEEDED = {
    "linear_probe": "init_from",
    "warmup_start_factor": "num_warmup_epochs",
    "distillation_temperature": "teacher",
    "distillation_weight": "teacher",
}

_WEIGHTS = ("class_weights", "pos_weights")

# Options of a data set that are not fields of `ImageOptions`.
_OTHERS = "data_dir columns image_dir fold class_level label_separator".split()


def check_together(config: "Config") -> None:
    """Raise ConfigError for options that contradict each other, with their values."""
    parse_standardization(config.standardize)
    parse_value_range(config.value_range)
    for names, reason in _contradictions(config):
        values = [f"{name}={getattr(config, name)}" for name in names.split()]
        raise ConfigError(f"{' with '.join(values)}: {reason}")


def validate_without_validation(config: "Config") -> None:
    """Raise ConfigError if an option needs held-out images, and there are none."""
    for name in _read_evaluations(config):
        way = "set --validation_fraction, or add a folder val/ to the data"
        raise ConfigError(f"{name}={getattr(config, name)}: no held-out images; {way}")


def validate_metric(config: "Config", multi_label: bool) -> None:
    """Raise ConfigError if `best_by` does not fit the number of labels an image."""
    if config.best_by in METRICS and config.best_by not in metrics_of(multi_label):
        both = ("several labels", "one") if multi_label else ("one label", "several")
        why = "each image has {}, and the metric is of {}".format(*both)
        raise ConfigError(f"best_by={config.best_by}: {why}; set --best_by=macro_f1")


def _read_evaluations(config):
    """Return the options that need evaluations on held-out images."""
    needs = {
        "patience": config.patience,
        "best_by": config.best_by not in ("auto", "accuracy"),
        "schedule": config.choice_of("schedule").by_accuracy,
    }
    return [name for name, is_needed in needs.items() if is_needed]


def _contradictions(config: "Config") -> Iterator[tuple[str, str]]:
    """Yield names of options that contradict each other, and why, with the way out."""
    lists, strategy = config.lists, config.choice_of("strategy")
    optimizer, model = config.choice_of("optimizer"), config.choice_of("model")
    if config.validation_fold:
        numbers = re.fullmatch(r"(\d{1,6})/([1-9]\d{0,5})", config.validation_fold)
        if not numbers or int(numbers[1]) >= int(numbers[2]) or numbers[2] == "1":
            yield "validation_fold", "expected FOLD/FOLDS, such as 0/5 to 4/5"
        if config.validation_fraction:
            yield "validation_fold validation_fraction", "drop one of the two"
    if config.optimizer == "nesterov" and config.momentum == 0:
        yield "optimizer momentum", "set --momentum=0.9 or --optimizer=sgd"
    if optimizer.whole_parameters and strategy.sharded:
        yield "optimizer strategy", "no device holds whole kernels; change one of them"
    for name in lists["optimizer_options"].keys() & config.options_of("optimizer"):
        yield "optimizer_options", f"{name} has a flag of its own; set --{name}"
    if config.schedule == "piecewise" and not lists["epoch_factors"]:
        yield "schedule epoch_factors", "set --epoch_factors, such as 30:0.1,60:0.01"
    if config.warmup_epochs > config.num_epochs:
        yield "warmup_epochs num_epochs", "the warm-up is longer than the run"
    for name in ("warmup_epochs", "all_reduce_pack_mb"):
        if -1 < getattr(config, name) < 0:
            yield name, "must be -1 or at least 0"
    for name in _read_evaluations(config):
        if not config.eval_every_epochs:
            yield f"{name} eval_every_epochs", "set --eval_every_epochs=1"
    by_accuracy = config.choice_of("schedule").by_accuracy
    if by_accuracy and 0 < config.patience <= config.plateau_patience:
        why = "the run ends before a lower rate could help; raise --patience"
        yield "patience plateau_patience", why

    # Devices.
    group_size = config.devices_per_network
    if config.num_towers > config.batch_size * group_size:
        why = "every tower, or group, needs an image; raise the one or lower the other"
        yield "batch_size num_towers", why
    if config.num_towers % group_size:
        why = "the groups do not divide the towers; set --num_towers to a multiple of "
        yield "num_towers group_size", f"{why}{group_size}"
    if config.device == "cpu" and config.parameter_device == "gpu":
        why = "towers on the CPU have no variables on a GPU; drop one of the two"
        yield "parameter_device device", why
    if config.compile == "xla":
        why = "the compiled part must not cross devices; drop one of the two"
        if strategy.sharded:
            yield "compile strategy", why
        if config.batch_norm == "sync":
            yield "compile batch_norm", why

    # Images.
    num_pixels = math.prod(height_and_width(config.image_size))
    if num_pixels > config.max_image_pixels:
        why = f"the images have {num_pixels:,} pixels; lower the one or raise the other"
        yield "image_size max_image_pixels", why
    if 0 < config.center_crop < 1 and not config.image_size:
        why = "images that keep their size are not cropped; set --image_size=N"
        yield "center_crop image_size", why
    if config.fit in ("pad", "stretch") and config.center_crop not in (0, 1):
        why = "the center crop cuts off what the fit keeps; drop one of the two"
        yield "fit center_crop", why
    is_known = model.has_standardization or model.pretrained
    if config.init_from == IMAGENET and not is_known:
        why = "no trained weights of this network are known; give a file or a run, or "
        yield "init_from model", f"{why}--model=tf_efficientnet_lite0, keras:NAME"
    if config.choice_of("augment").standardizes_images:
        why = "--augment standardizes each image by itself; set --augment=pad_crop_flip"
        if model.has_standardization:
            yield "augment model", why
        if config.standardize not in ("auto", "data"):
            yield "augment standardize", why
        if config.policy != "none":
            yield "augment policy", why
    if config.repeats > config.images_per_step:
        why = f"a step has {config.images_per_step} images; lower --repeats"
        yield "repeats batch_size", why

    if not strategy.asynchronous:
        return
    way = "or choose a synchronous strategy"
    if config.accumulate_steps > 1:
        why = "each tower applies its gradients at once; raise --batch_size"
        yield "accumulate_steps strategy", f"{why} {way}"
    if config.batch_norm == "sync":
        why = "its towers do not share moments; set --batch_norm=local"
        yield "batch_norm strategy", f"{why} {way}"
    if config.precision == "float16":
        why = "its towers cannot skip a step together; set --precision=bfloat16"
        yield "precision strategy", f"{why} {way}"
    if config.input == "resident":
        why = "its towers draw their shares from one stream; set --input=stream"
        yield "input strategy", f"{why} {way}"
    if config.async_scale_gradients and optimizer.scale_free:
        why = "its steps are as long, however long the gradients are; set "
        way = "--noasync_scale_gradients, and --learning_rate for an update per tower"
        yield "optimizer async_scale_gradients", why + way


def ignored_options(config: "Config") -> list[str]:
    """Return a line on each option that has no effect, or compensates twice.

    Targets are imported, with TensorFlow, for the options that their signatures name.
    """
    lines = []
    for option in TABLES:
        choice = getattr(config, option)
        names = factories.argument_names(factories.resolve(option, choice))
        if names is None:  # it gets all
            continue
        if option == "strategy":
            names += config.choice_of(option).trainer_options
        if "build" in names:  # a `Builder`
            names += ("width",)
        for name in config.options_of(option):
            if "image_options" in names and name not in _OTHERS:
                continue
            value = getattr(config, name)
            is_default = value == getattr(type(config), name)
            turns_off = value == 0 and value is not False and name != "fold"
            if name not in names and not (is_default or turns_off):
                lines.append(f"{name}={value} has no effect with {option}={choice}")
    for name, needed in _NEEDED.items():
        value = getattr(config, name)
        if value != getattr(type(config), name) and not getattr(config, needed):
            option = needed.removeprefix("num_")
            lines.append(f"{name}={value} has no effect without {option}")
    by_accuracy = config.choice_of("schedule").by_accuracy
    if config.min_delta and not (config.patience or by_accuracy):
        way = "patience or schedule=plateau"
        lines.append(f"min_delta={config.min_delta} has no effect without {way}")
    weights = [x for x in _WEIGHTS if getattr(config, x) == "balanced"]
    others = ["sampler"] if config.sampler == "balanced" else []
    others += ["logit_adjustment"] if config.logit_adjustment else []
    if weights and others:
        both = ", ".join(f"{x}={getattr(config, x)}" for x in (*weights, *others))
        way = f"set --{weights[0]}= or drop the others"
        lines.append(f"{both}: each makes up for rare classes, too much; {way}")
    if config.choice_of("strategy").sharded and config.group_size == 1:
        why = "with group_size=1 splits no network; set --group_size"
        lines.append(f"strategy={config.strategy} {why}")
    return lines


def check_environment() -> None:
    """Refuse settings of Keras that are not TensorFlow's, and unwritable TMPDIR."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        message = f"KERAS_BACKEND={backend}: towers trains with TensorFlow; unset it, "
        raise ConfigError(f"{message}or set it to tensorflow")
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise ConfigError("TF_USE_LEGACY_KERAS is set: towers needs Keras 3; unset it")
    try:
        tempfile.gettempdir()
    except OSError:
        why = "no folder for temporary files can be written; set TMPDIR to one that can"
        raise ConfigError(f"{why}, and see that ulimit -f is unlimited") from None
