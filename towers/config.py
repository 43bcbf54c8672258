"""What a run is: one frozen, flat dataclass, and the checks that need no TensorFlow.

The field's default is the lowest of three layers; a recipe in `configs/` overrides it,
and a flag overrides the recipe. Where a run happens (its folder, the addresses of a
cluster) is not part of it.
"""

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from towers.errors import ConfigError

# The names a user may choose from. The tables they stand for live on higher floors,
# which import TensorFlow; tests hold the two against each other.
DATASETS = (
    "cifar10",
    "cifar100",
    "mnist",
    "fashion_mnist",
    "image_folder",
    "embedded",
    "synthetic",
)
# Beside those, any data set that tensorflow-datasets has prepared: tfds:NAME.
TFDS = "tfds:"
AUGMENTS = ("none", "tutorial", "pad_crop_flip")
MODELS = ("cnn",)
OPTIMIZERS = ("sgd", "nesterov")
SCHEDULES = ("constant", "exponential", "cosine")
PRECISIONS = ("float32", "bfloat16")
STRATEGIES = ("towers", "async_towers", "replicated", "model_parallel")
ALL_REDUCES = ("star", "tree", "ring", "nccl")
DEVICES = ("auto", "cpu", "gpu")

# Schedules whose shape depends on the length of the run.
SCHEDULES_BY_LENGTH = ("cosine",)


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    or_prefix: str = "",
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    free: bool = False,
) -> Any:
    """A field: its default, help with unit, bounds, and whether a resumed run may
    change it freely because it does not touch the mathematics. Beside the choices it
    takes any name after the prefix."""
    metadata = {
        "help": help,
        "choices": choices,
        "or_prefix": or_prefix,
        "at_least": at_least,
        "above": above,
        "below": below,
        "free": free,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that says what a run is. The defaults are the tutorial's.

    Raises:
        ConfigError: a value has the wrong type, lies out of bounds, or contradicts
            another.
    """

    # Data.
    dataset: str = _option(
        "cifar10",
        f"Data set: {', '.join(DATASETS)}, or {TFDS}NAME for any that "
        "tensorflow-datasets has prepared.",
        choices=DATASETS,
        or_prefix=TFDS,
    )
    data_dir: str = _option(
        "",
        "Folder that holds the data set; empty looks in data/ and in the default "
        "folder of tensorflow-datasets.",
        free=True,
    )
    image_size: int = _option(
        0,
        "Pixels of height and width to which the images of image_folder and tfds:NAME "
        "are resized and cropped; 0 takes them as they are, which must be alike.",
        at_least=0,
    )
    image_cache_mb: float = _option(
        2000.0,
        "Megabytes of decoded images of image_folder and tfds:NAME that are kept in "
        "memory; 0 decodes them in every epoch.",
        at_least=0,
        free=True,
    )
    validation_fraction: float = _option(
        0.0,
        "Fraction of the training images, drawn from the seed, that is held out; the "
        "evaluations during training then use it, and the best step is kept.",
        at_least=0,
        below=1,
    )
    augment: str = _option(
        "tutorial",
        "Augmentation: none, tutorial (random 24x24 crop, flip, brightness, contrast, "
        "standardised per image), pad_crop_flip (pad 4, crop, flip).",
        choices=AUGMENTS,
    )
    seed: int = _option(
        0,
        "Seed of the parameters, the order and the augmentation.",
        at_least=0,
        below=2**63,
    )

    # Network.
    model: str = _option("cnn", "Network.", choices=MODELS)
    width: float = _option(1.0, "Factor on the channels of every layer.", above=0)
    precision: str = _option(
        "float32",
        "Arithmetic of the network; parameters, slots and sums stay float32.",
        choices=PRECISIONS,
    )

    # Optimisation.
    optimizer: str = _option(
        "sgd",
        "sgd (with --momentum, if any, as a heavy ball) or nesterov.",
        choices=OPTIMIZERS,
    )
    learning_rate: float = _option(0.1, "Initial, or highest, learning rate.", above=0)
    momentum: float = _option(0.0, "Momentum of the velocity.", at_least=0, below=1)
    weight_decay: float = _option(
        0.004,
        "Weight decay: this times half the sum of squares of the kernels that the "
        "network marks is added to the loss.",
        at_least=0,
    )
    label_smoothing: float = _option(
        0.0, "Probability spread evenly over all classes.", at_least=0, below=1
    )
    schedule: str = _option(
        "exponential",
        "Learning rate over the images seen: constant, exponential (a staircase) or "
        "cosine (to zero at --num_epochs).",
        choices=SCHEDULES,
    )
    decay_factor: float = _option(
        0.1, "Factor on the rate at each stair of the exponential schedule.", above=0
    )
    epochs_per_decay: float = _option(
        350.0, "Length of a stair of the exponential schedule, in epochs.", above=0
    )
    warmup_epochs: float = _option(
        0.0, "Epochs over which the rate first rises linearly from 0.", at_least=0
    )
    ema_decay: float = _option(
        0.9999,
        "Decay of the parameters' moving averages, ramped as min(decay, (1+n)/(10+n)) "
        "in step n; 0 keeps none.",
        at_least=0,
        below=1,
    )
    clip_norm: float = _option(
        0.0, "Largest global norm of the mean gradient; 0 does not clip.", at_least=0
    )

    # Parallelism.
    strategy: str = _option(
        "towers", "How towers share variables and meet.", choices=STRATEGIES, free=True
    )
    num_towers: int = _option(
        0, "Number of towers; 0 takes every GPU, or one CPU.", at_least=0, free=True
    )
    device: str = _option(
        "auto",
        "Where the towers run; cpu makes a logical device per tower.",
        choices=DEVICES,
        free=True,
    )
    parameter_device: str = _option(
        "cpu",
        "Where strategies towers and async_towers keep and update the variables.",
        choices=("cpu", "gpu"),
        free=True,
    )
    async_scale_gradients: bool = _option(
        True,
        "Whether strategy async_towers scales a tower's gradients by its share of the "
        "batch, so that an epoch moves the parameters as far as in the others.",
    )
    max_staleness: int = _option(
        0,
        "Most updates by others between fetch and update of a tower in strategy "
        "async_towers; 0 does not bound them.",
        at_least=0,
        free=True,
    )
    group_size: int = _option(
        1,
        "Devices that hold one network in strategy model_parallel; num_towers is a "
        "multiple of it.",
        at_least=1,
        free=True,
    )
    device_order: str = _option(
        "",
        "Order in which devices are taken, such as 0,1,4,5: neighbours make a group; "
        "empty for the driver's order.",
        free=True,
    )
    batch_norm: str = _option(
        "local",
        "Moments of batch normalisation: of each tower's images (local) or of the "
        "whole batch (sync).",
        choices=("local", "sync"),
    )
    all_reduce: str = _option(
        "star",
        "How strategy replicated adds up gradients: star (on one device), tree, ring, "
        "or nccl (two or more GPUs).",
        choices=ALL_REDUCES,
        free=True,
    )
    all_reduce_pack_mb: float = _option(
        8.0,
        "Megabytes of the buffers in which gradients are all-reduced; 0 packs none.",
        at_least=0,
        free=True,
    )
    all_reduce_dtype: str = _option(
        "float32",
        "What travels in the all-reduce; bfloat16 halves it and rounds the gradients.",
        choices=("float32", "bfloat16"),
    )
    batch_size: int = _option(
        128, "Images per step (and micro-batch) over all towers together.", at_least=1
    )
    accumulate_steps: int = _option(
        1,
        "Batches whose mean gradient makes one step of a synchronous strategy; a step "
        "then has batch_size x accumulate_steps images.",
        at_least=1,
    )
    deterministic: bool = _option(
        False, "Ask TensorFlow for kernels that repeat bit for bit (GPUs).", free=True
    )

    # Length and rhythm.
    num_epochs: float = _option(
        60.0, "Length of the run, in passes over the training images.", above=0
    )
    max_steps: int = _option(
        0,
        "Stop after this step; shapes nothing; 0 does not stop.",
        at_least=0,
        free=True,
    )
    steps_per_loop: int = _option(
        100,
        "Most steps in one compiled call; fewer where something is due, or where they "
        "would take more than about 2 s.",
        at_least=1,
        free=True,
    )
    log_every_steps: int = _option(
        100, "Steps between log lines and scalars.", at_least=1, free=True
    )
    summary_every_steps: int = _option(
        1000,
        "Steps between histograms and image grids in TensorBoard; 0 writes none.",
        at_least=0,
        free=True,
    )
    eval_every_epochs: float = _option(
        1.0, "Epochs between evaluations; 0 evaluates none.", at_least=0, free=True
    )
    checkpoint_every_secs: float = _option(
        600.0,
        "Seconds between checkpoints; 0 ignores the clock.",
        at_least=0,
        free=True,
    )
    checkpoint_every_steps: int = _option(
        0, "Steps between checkpoints; 0 ignores the steps.", at_least=0, free=True
    )
    keep_checkpoints: int = _option(
        3, "Newest checkpoints that are kept, beside the best.", at_least=1, free=True
    )
    stuck_after_secs: float = _option(
        600.0,
        "Seconds without a finished step after which the run is ended as stuck; "
        "0 waits for ever.",
        at_least=0,
        free=True,
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(
                self, field.name, _checked(field, getattr(self, field.name))
            )
        _check_together(self)

    @property
    def images_per_step(self) -> int:
        """Images of one update."""
        return self.batch_size * self.accumulate_steps


FIELDS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(Config)}


def _checked(field: dataclasses.Field, value: Any) -> Any:
    """The value in the field's own type, or a ConfigError that names the field."""
    kind, bounds = field.type, field.metadata
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(
            f"{field.name}={value!r}: must be {kind.__name__}, "
            f"is {type(value).__name__}"
        )
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{field.name}={value}: must be finite")
    choices, prefix = bounds["choices"], bounds["or_prefix"]
    is_prefixed = prefix and value.startswith(prefix) and value != prefix
    if choices and value not in choices and not is_prefixed:
        raise ConfigError(
            f"{field.name}={value!r}: {nearest(value, choices)}must be one of "
            + ", ".join(choices)
            + (f" or {prefix}NAME" if prefix else "")
        )
    for name, wrong in (
        ("at_least", lambda bound: value < bound),
        ("above", lambda bound: value <= bound),
        ("below", lambda bound: value >= bound),
    ):
        if bounds[name] is not None and wrong(bounds[name]):
            words = name.replace("_", " ")
            raise ConfigError(f"{field.name}={value}: must be {words} {bounds[name]}")
    return value


def _check_together(config: Config) -> None:
    """Refuses options that contradict each other, both values in the message."""
    if config.optimizer == "nesterov" and config.momentum == 0:
        raise ConfigError(
            "optimizer=nesterov with momentum=0.0: Nesterov's form needs a momentum; "
            "set --momentum=0.9 or --optimizer=sgd"
        )
    if config.num_towers > config.batch_size:
        raise ConfigError(
            f"batch_size={config.batch_size} with num_towers={config.num_towers}: "
            "every tower needs an image; raise --batch_size or lower --num_towers"
        )
    if config.num_towers and config.num_towers % config.group_size:
        raise ConfigError(
            f"num_towers={config.num_towers} with group_size={config.group_size}: the "
            "groups do not divide the towers"
        )
    if config.strategy == "async_towers" and config.accumulate_steps > 1:
        raise ConfigError(
            f"accumulate_steps={config.accumulate_steps} with strategy=async_towers: "
            "each tower applies its gradients at once; raise --batch_size or choose a "
            "synchronous strategy"
        )
    if config.strategy == "async_towers" and config.batch_norm == "sync":
        raise ConfigError(
            "batch_norm=sync with strategy=async_towers: its towers do not meet to "
            "share moments; set --batch_norm=local or choose a synchronous strategy"
        )
    if config.warmup_epochs > config.num_epochs:
        raise ConfigError(
            f"warmup_epochs={config.warmup_epochs} with "
            f"num_epochs={config.num_epochs}: the warm-up is longer than the run"
        )
    if config.device == "cpu" and config.parameter_device == "gpu":
        raise ConfigError(
            "parameter_device=gpu with device=cpu: the towers would run on the CPU and "
            "their variables on a GPU; drop one of the two"
        )


def ignored_options(config: Config) -> list[str]:
    """One line for each option that was set and has no effect in this configuration."""
    lines = []

    def ignore(because: str, *names: str) -> None:
        for name in names:
            if getattr(config, name) != FIELDS[name].default:
                value = getattr(config, name)
                lines.append(f"{name}={value} has no effect with {because}")

    if config.schedule != "exponential":
        ignore(f"schedule={config.schedule}", "decay_factor", "epochs_per_decay")
    if config.strategy not in ("towers", "async_towers"):
        ignore(f"strategy={config.strategy}", "parameter_device")
    if config.strategy != "async_towers":
        names = ("async_scale_gradients", "max_staleness")
        ignore(f"strategy={config.strategy}", *names)
    if config.strategy != "model_parallel":
        ignore(f"strategy={config.strategy}", "group_size")
    if config.strategy != "replicated":
        names = ("all_reduce", "all_reduce_pack_mb", "all_reduce_dtype")
        ignore(f"strategy={config.strategy}", *names)
    if config.dataset in ("embedded", "synthetic"):
        ignore(f"dataset={config.dataset}", "data_dir")
    if config.dataset != "image_folder" and not config.dataset.startswith(TFDS):
        ignore(f"dataset={config.dataset}", "image_size", "image_cache_mb")
    return lines


def changed_mathematics(stored: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Fields, with both values, whose change would make a resumed run another run."""
    changed = {}
    for name, field in FIELDS.items():
        before, after = getattr(stored, name), getattr(new, name)
        free = field.metadata["free"] or (
            name == "num_epochs" and new.schedule not in SCHEDULES_BY_LENGTH
        )
        if before != after and not free:
            changed[name] = (before, after)
    return changed


def nearest(name: str, names: tuple[str, ...] | list[str]) -> str:
    """'did you mean ...? ' for the nearest of some names, or nothing."""
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def replace(config: Config, changes: Mapping[str, Any]) -> Config:
    """`dataclasses.replace` whose error names the nearest field."""
    for name in changes:
        if name not in FIELDS:
            raise ConfigError(
                f"there is no option {name!r}: {nearest(name, list(FIELDS))}"
                "run_train.py --help lists them"
            )
    return dataclasses.replace(config, **changes)


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The Config of a stored `config.json`; fields that it lacks take their default."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not a config.json: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("not a config.json: an object of options is expected")
    return replace(Config(), values)


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Refuses settings of Keras under which the networks would not be TensorFlow's."""
    backend = environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        raise ConfigError(
            f"KERAS_BACKEND={backend}: towers trains with TensorFlow; unset "
            "KERAS_BACKEND or set it to tensorflow"
        )
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise ConfigError(
            "TF_USE_LEGACY_KERAS is set: towers needs Keras 3, which TensorFlow would "
            "then replace by Keras 2; unset it"
        )
