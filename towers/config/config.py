"""Config, which describes a run: one frozen, flat dataclass, stored as JSON.

The field's default is the lowest of three layers; a recipe in `configs/`, or the config
of the run that is continued, overrides it, and a flag overrides both. Where a run
happens (its folder, the addresses of a cluster) is not part of it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from towers.config import choices
from towers.config.checks import check_together
from towers.config.options import check_option, option
from towers.config.synonyms import suggestion
from towers.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that says what a run is. The defaults are the tutorial's.

    Raises:
        ConfigError: a value has the wrong type, lies out of bounds, or contradicts
            another.
    """

    # Data.
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
        "images that lie on the first tower's device (resident); auto: resident on "
        "GPUs where the data lies in memory.",
        choices=choices.INPUTS,
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
    validation_fraction: float = option(
        0.0,
        "Fraction of the training images, drawn from the seed, that is held out; the "
        "evaluations during training then use it, and the best step is kept.",
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

    # Network.
    model: str = option("cnn", f"Network: {choices.explained('model')}.", table="model")
    width: float = option(
        1.0, "Factor on the channels of every layer.", read_by="model", above=0
    )
    precision: str = option(
        "float32",
        "Arithmetic of the network; parameters, slots and sums stay float32. With "
        "float16 the loss is scaled, and a step that overflows is skipped.",
        choices=choices.PRECISIONS,
    )
    compile: str = option(
        "none",
        "xla: the forward and backward part of each tower is compiled as one.",
        choices=choices.COMPILERS,
        free=True,
    )

    # Optimization.
    optimizer: str = option(
        "sgd",
        f"Optimizer: {choices.explained('optimizer')}.",
        table="optimizer",
    )
    learning_rate: float = option(0.1, "Initial, or highest, learning rate.", above=0)
    momentum: float = option(
        0.0, "Momentum of the velocity.", read_by="optimizer", at_least=0, below=1
    )
    beta1: float = option(
        0.9,
        "Decay of adamw's mean of the gradients.",
        read_by="optimizer",
        at_least=0,
        below=1,
    )
    beta2: float = option(
        0.999,
        "Decay of adamw's mean of their squares.",
        read_by="optimizer",
        at_least=0,
        below=1,
    )
    rho: float = option(
        0.9,
        "Decay of rmsprop's mean of the squared gradients.",
        read_by="optimizer",
        at_least=0,
        below=1,
    )
    epsilon: float = option(
        1e-7,
        "Next to the root in adamw's denominator, under it in rmsprop's.",
        read_by="optimizer",
        above=0,
    )
    muon_momentum: float = option(
        0.6,
        "Momentum of the convolutions with muon.",
        read_by="optimizer",
        at_least=0,
        below=1,
    )
    trust_coefficient: float = option(
        0.001,
        "With lars, the length of a kernel's step at rate 1 over that of the kernel.",
        read_by="optimizer",
        above=0,
    )
    optimizer_options: str = option(
        "",
        "Hyperparameters of the optimizer that have no flag of their own, such as "
        "'beta3:0.99,warm:5'.",
    )
    weight_decay: float = option(
        0.004,
        "Weight decay: this times half the sum of squares of the parameters that the "
        "network marks, kernels as a rule, is added to the loss; adamw, lars and muon "
        "(not to convolutions) apply it in their update.",
        at_least=0,
    )
    label_smoothing: float = option(
        0.0, "Probability spread evenly over all classes.", at_least=0, below=1
    )
    param_rates: str = option(
        "",
        "Factors on the learning rate of parameters by name, the first pattern that "
        "fits, such as '*/bias:2', 0 to freeze them; with another number, "
        "'stem/bias:2:3', that rate falls linearly to zero over so many epochs.",
    )
    schedule: str = option(
        "exponential",
        f"Learning rate over the images trained on: {choices.explained('schedule')}.",
        table="schedule",
    )
    decay_factor: float = option(
        0.1,
        "Factor on the rate at each stair of the exponential schedules.",
        read_by="schedule",
        above=0,
    )
    epochs_per_decay: float = option(
        350.0,
        "Length of a stair of the exponential schedules, in epochs.",
        read_by="schedule",
        above=0,
    )
    epoch_factors: str = option(
        "",
        "Of the piecewise schedule: epochs, and the factor on the rate from each of "
        "them on, such as 30:0.1,60:0.01.",
        read_by="schedule",
    )
    peak_fraction: float = option(
        0.3,
        "Part of --num_epochs after which the one_cycle schedule is highest.",
        read_by="schedule",
        above=0,
        below=1,
    )
    warmup_epochs: float = option(
        0.0, "Epochs over which the rate first rises linearly from 0.", at_least=0
    )
    ema_decay: float = option(
        0.9999,
        "Decay of the parameters' moving averages, ramped as min(decay, (1+n)/(10+n)) "
        "in step n; 0 keeps none.",
        at_least=0,
        below=1,
    )
    clip_norm: float = option(
        0.0, "Largest global norm of the mean gradient; 0 does not clip.", at_least=0
    )
    # Free, as max_steps is: every update is the same with both, one of them only ends
    # the run earlier.
    on_nonfinite: str = option(
        "stop",
        "Where a loss or a gradient is not finite: end the run before the update "
        "(stop), or leave out the update and count the step (skip); the tenth in a row "
        "ends the run.",
        choices=choices.ON_NONFINITE,
        free=True,
    )

    # Parallelism.
    strategy: str = option(
        "towers",
        f"Placement of the variables and averaging: {choices.explained('strategy')}.",
        table="strategy",
        free=True,
    )
    num_towers: int = option(
        0, "Number of devices; 0 takes every GPU, or one CPU.", at_least=0, free=True
    )
    device: str = option(
        "auto",
        "Where the towers run; cpu makes a logical device per tower.",
        choices=choices.DEVICES,
        free=True,
    )
    parameter_device: str = option(
        "cpu",
        "Where strategies towers and async_towers keep and update the variables.",
        read_by="strategy",
        choices=("cpu", "gpu"),
        free=True,
    )
    async_scale_gradients: bool = option(
        True,
        "Whether strategy async_towers scales a tower's gradients by its share of the "
        "batch, so that an epoch moves the parameters as far as in the others.",
        read_by="strategy",
    )
    max_staleness: int = option(
        0,
        "Most updates by others between fetch and update of a tower in strategy "
        "async_towers; 0 does not bound them.",
        read_by="strategy",
        at_least=0,
        free=True,
    )
    group_size: int = option(
        1,
        "Devices that hold one network in strategy model_parallel; num_towers is a "
        "multiple of it.",
        read_by="strategy",
        at_least=1,
        free=True,
    )
    device_order: str = option(
        "",
        "Order in which devices are taken, such as 0,1,4,5: neighbors make a group; "
        "empty for the driver's order.",
        free=True,
    )
    device_memory_mb: float = option(
        0.0,
        "Megabytes that training may take on a device; refused where the account says "
        "more. On GPUs also the limit of the logical devices made of them. 0 for all.",
        at_least=0,
        free=True,
    )
    batch_norm: str = option(
        "local",
        "Moments of batch normalization: of each tower's images (local) or of the "
        "whole batch (sync).",
        choices=("local", "sync"),
    )
    all_reduce: str = option(
        "auto",
        "Algorithm that adds up the gradients of strategy replicated: star (on one "
        "device; auto), tree, ring, or nccl (two or more GPUs); or of multi_worker: "
        "ring, nccl, or auto, which is nccl between GPUs.",
        read_by="strategy",
        choices=choices.ALL_REDUCES,
        free=True,
    )
    all_reduce_pack_mb: float = option(
        -1.0,
        "Megabytes of the buffers in which gradients are all-reduced; 0 packs none, or "
        "with strategy multi_worker all in one; -1 for a default.",
        read_by="strategy",
        at_least=-1,
        free=True,
    )
    all_reduce_dtype: str = option(
        "float32",
        "Type of the numbers that are all-reduced; bfloat16 halves them and rounds the "
        "gradients.",
        read_by="strategy",
        choices=("float32", "bfloat16"),
    )
    batch_size: int = option(
        128,
        "Images over all towers together: of a step, or of a micro-batch with "
        "--accumulate_steps.",
        at_least=1,
    )
    accumulate_steps: int = option(
        1,
        "Micro-batches whose mean gradient makes one step of a synchronous strategy; "
        "a step then has batch_size x accumulate_steps images.",
        at_least=1,
    )
    deterministic: bool = option(
        False, "Ask TensorFlow for kernels that repeat bit for bit (GPUs).", free=True
    )

    init_from: str = option(
        "",
        "Run folder whose parameters a new run starts from at step 0, where names and "
        "shapes match; empty for drawn ones.",
    )

    # Length and periods.
    num_epochs: float = option(
        60.0, "Length of the run, in passes over the training images.", above=0
    )
    max_steps: int = option(
        0,
        "Stop after this step; shapes nothing; 0 does not stop.",
        at_least=0,
        free=True,
    )
    steps_per_loop: int = option(
        100,
        "Most steps in one compiled call; fewer where something is due, or where they "
        "would take more than about 2 s.",
        at_least=1,
        free=True,
    )
    log_every_steps: int = option(
        100, "Steps between log lines and scalars.", at_least=1, free=True
    )
    summary_every_steps: int = option(
        1000,
        "Steps between histograms and image grids in TensorBoard; 0 writes none.",
        at_least=0,
        free=True,
    )
    eval_every_epochs: float = option(
        1.0, "Epochs between evaluations; 0 evaluates none.", at_least=0, free=True
    )
    tta: str = option(
        "none",
        "Test-time augmentation: evaluations also report the accuracy of the mean "
        f"logits over several views of an image: {choices.explained('tta')}.",
        table="tta",
        free=True,
    )
    checkpoint_every_secs: float = option(
        600.0,
        "Seconds between checkpoints; 0 ignores the clock.",
        at_least=0,
        free=True,
    )
    checkpoint_every_steps: int = option(
        0, "Steps between checkpoints; 0 ignores the steps.", at_least=0, free=True
    )
    keep_checkpoints: int = option(
        3, "Newest checkpoints that are kept, besides the best.", at_least=1, free=True
    )
    stuck_after_secs: float = option(
        600.0,
        "Seconds without a finished step, or save, after which the run is ended as "
        "stuck; 0 waits forever.",
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
        is_length = name == "num_epochs" and length_is_free(new)
        if before != after and not (field.metadata["free"] or is_length):
            changed[name] = (before, after)
    return changed


def length_is_free(config: Config) -> bool:
    """True if a run may be made longer without becoming another run."""
    return not depends_on_length(config.schedule) and not config.early_sizes


def depends_on_length(schedule: str) -> bool:
    """True if a schedule depends on the length of the run; assumed of one in a file."""
    choice = choices.find("schedule", schedule)
    return choice.is_in_a_file or "by_length" in choice.traits


def options_read_by(config: Config, option: str) -> dict[str, Any]:
    """The fields that are passed to the choice of an option, such as "optimizer"."""
    names = (name for name, f in FIELDS.items() if f.metadata["read_by"] == option)
    return {name: getattr(config, name) for name in names}


def replace(config: Config, changes: Mapping[str, Any]) -> Config:
    """`dataclasses.replace` whose error names the nearest field."""
    for name in changes:
        if name not in FIELDS:
            raise ConfigError(
                f"there is no option {name!r}: {suggestion(name, FIELDS)}"
                "run_train.py --help lists them"
            )
    return dataclasses.replace(config, **changes)
