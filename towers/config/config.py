"""What a run is: one frozen, flat dataclass, stored as JSON.

The field's default is the lowest of three layers; a recipe in `configs/` overrides it,
and a flag overrides the recipe. Where a run happens (its folder, the addresses of a
cluster) is not part of it.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from towers.config.checks import TFDS, check_option, check_together, nearest
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
AUGMENTS = (
    "none",
    "tutorial",
    "pad_crop_flip",
    "translate_flip",
    "translate_4_flip",
)
MODELS = (
    "cnn",
    "lenet",
    "alexnet",
    "alexnet_two_columns",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "wide_resnet_28_10",
    "convmixer_256_8",
    "speedrun",
    "speedrun_deep",
)
OPTIMIZERS = ("sgd", "nesterov", "rmsprop", "adamw", "lars", "muon")
SCHEDULES = (
    "constant",
    "exponential",
    "smooth_exponential",
    "piecewise",
    "cosine",
    "linear",
    "one_cycle",
)
VIEWS = ("plain", "mirror", "six", "six_unsure")
INPUTS = ("auto", "stream", "resident")
COMPILERS = ("none", "xla")
PRECISIONS = ("float32", "bfloat16", "float16")
STRATEGIES = ("towers", "async_towers", "replicated", "model_parallel")
ALL_REDUCES = ("star", "tree", "ring", "nccl")
DEVICES = ("auto", "cpu", "gpu")

# Schedules whose shape depends on the length of the run.
SCHEDULES_BY_LENGTH = ("cosine", "linear", "one_cycle")


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    or_prefix: str = "",
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
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
        "at_most": at_most,
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
    early_sizes: str = _option(
        "",
        "Pixels of height and width to which images are shrunk in the first part of "
        "--num_epochs, such as 24:0.5 in the first half; several by commas, growing: "
        "16:0.2,24:0.5.",
    )
    input: str = _option(
        "auto",
        "Batches are read ahead (stream), or made inside the compiled step from images "
        "that lie on the first tower's device (resident); auto: resident on GPUs where "
        "the data lies in memory.",
        choices=INPUTS,
        free=True,
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
        "standardised per image), pad_crop_flip (pad 4, crop, flip), translate_flip "
        "(2 pixels, mirrored edges; alternating flips), translate_4_flip (4 pixels).",
        choices=AUGMENTS,
    )
    color_jitter: float = _option(
        0.0,
        "Strength s of random brightness, contrast and saturation, by factors from "
        "max(0, 1 - s) to 1 + s; 0 for none.",
        at_least=0,
    )
    random_erasing: float = _option(
        0.0,
        "Probability that a random rectangle of an image is erased.",
        at_least=0,
        at_most=1,
    )
    cutout_size: int = _option(
        0,
        "Side of the square that is cut out of every image, in pixels; 0 for none.",
        at_least=0,
    )
    mixup: float = _option(
        0.0,
        "Mix each image and its label with another one's by shares from Beta(x, x), x "
        "being this; 0 for none.",
        at_least=0,
    )
    cutmix: float = _option(
        0.0,
        "Paste into each image a rectangle of another one, its share of the area and "
        "of the label from Beta(x, x); 0 for none. With --mixup, one of the two at "
        "random.",
        at_least=0,
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
        "Arithmetic of the network; parameters, slots and sums stay float32. With "
        "float16 the loss is scaled, and a step that overflows is passed over.",
        choices=PRECISIONS,
    )
    compile: str = _option(
        "none",
        "xla: the forward and backward part of each tower is compiled as one.",
        choices=COMPILERS,
        free=True,
    )

    # Optimisation.
    optimizer: str = _option(
        "sgd",
        "sgd (with --momentum, if any, as a heavy ball), nesterov, rmsprop, adamw, "
        "lars (layer-wise rates, for large batches), or muon (orthogonalised momentum "
        "for convolutions, nesterov for the rest).",
        choices=OPTIMIZERS,
    )
    learning_rate: float = _option(0.1, "Initial, or highest, learning rate.", above=0)
    momentum: float = _option(0.0, "Momentum of the velocity.", at_least=0, below=1)
    beta1: float = _option(
        0.9, "Decay of adamw's mean of the gradients.", at_least=0, below=1
    )
    beta2: float = _option(
        0.999, "Decay of adamw's mean of their squares.", at_least=0, below=1
    )
    rho: float = _option(
        0.9, "Decay of rmsprop's mean of the squared gradients.", at_least=0, below=1
    )
    epsilon: float = _option(
        1e-7,
        "Beside the root in adamw's denominator, under it in rmsprop's.",
        above=0,
    )
    muon_momentum: float = _option(
        0.6, "Momentum of the convolutions with muon.", at_least=0, below=1
    )
    trust_coefficient: float = _option(
        0.001,
        "With lars, the length of a kernel's step at rate 1 over that of the kernel.",
        above=0,
    )
    weight_decay: float = _option(
        0.004,
        "Weight decay: this times half the sum of squares of the parameters that the "
        "network marks, kernels as a rule, is added to the loss; adamw, lars and muon "
        "(not to convolutions) apply it in their update.",
        at_least=0,
    )
    label_smoothing: float = _option(
        0.0, "Probability spread evenly over all classes.", at_least=0, below=1
    )
    param_rates: str = _option(
        "",
        "Factors on the learning rate of parameters by name, the first pattern that "
        "fits, such as '*/bias:2', 0 to freeze them; with another number, "
        "'stem/bias:2:3', that rate falls linearly to zero over so many epochs.",
    )
    schedule: str = _option(
        "exponential",
        "Learning rate over the images seen: constant, exponential (a staircase), "
        "smooth_exponential, piecewise, or to zero at --num_epochs: cosine, linear, "
        "one_cycle.",
        choices=SCHEDULES,
    )
    decay_factor: float = _option(
        0.1, "Factor on the rate at each stair of the exponential schedules.", above=0
    )
    epochs_per_decay: float = _option(
        350.0, "Length of a stair of the exponential schedules, in epochs.", above=0
    )
    epoch_factors: str = _option(
        "",
        "Of the piecewise schedule: from which epoch on the rate is times what, such "
        "as 30:0.1,60:0.01.",
    )
    peak_fraction: float = _option(
        0.3,
        "Part of --num_epochs after which the one_cycle schedule is highest.",
        above=0,
        below=1,
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
    device_memory_mb: float = _option(
        0.0,
        "Megabytes that training may take on a device; refused where the account says "
        "more. On GPUs also the limit of the logical devices made of them. 0 for all.",
        at_least=0,
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
        -1.0,
        "Megabytes of the buffers in which gradients are all-reduced; 0 packs none; -1 "
        "is 1 on GPUs and 0 on a CPU, whose memory all towers share.",
        at_least=-1,
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

    init_from: str = _option(
        "",
        "Run folder whose parameters a new run starts from at step 0, where names and "
        "shapes match; empty for drawn ones.",
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
    views: str = _option(
        "plain",
        "What an evaluation reports beside the accuracy on the images: that of the "
        "mean logits with the mirrored image (mirror), with images moved by a pixel as "
        "well (six), or so for the quarter of each evaluation batch that is least sure "
        "and as it is for the others (six_unsure).",
        choices=VIEWS,
        free=True,
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
                self, field.name, check_option(field, getattr(self, field.name))
            )
        check_together(self)

    @property
    def images_per_step(self) -> int:
        """Images of one update."""
        return self.batch_size * self.accumulate_steps


FIELDS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(Config)}


def changed_mathematics(stored: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Fields, with both values, whose change would make a resumed run another run."""
    changed = {}
    for name, field in FIELDS.items():
        before, after = getattr(stored, name), getattr(new, name)
        free = field.metadata["free"] or (
            name == "num_epochs"
            and new.schedule not in SCHEDULES_BY_LENGTH
            and not new.early_sizes
        )
        if before != after and not free:
            changed[name] = (before, after)
    return changed


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
