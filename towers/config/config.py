"""Config, which describes a run: one frozen, flat dataclass, stored as JSON.

The field's default is the lowest of three layers; a recipe in `configs/`, or the config
of the run that is continued, overrides it, and a flag overrides both. Where a run
happens (its folder, the addresses of a cluster) is not part of it.
"""

import dataclasses
import functools
import textwrap
from collections.abc import Iterable
from typing import Any

from towers.config import choices
from towers.config.checks import check_together
from towers.config.installation import program
from towers.config.list_options import LISTS, parse
from towers.config.options import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    check_option,
    option,
    resumable_option,
)
from towers.config.preprocessing import INTERPOLATIONS
from towers.config.synonyms import suggestion
from towers.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that says what a run is. The defaults are the tutorial's.

    Raises:
        ConfigError: there is no such option; or a value has the wrong type, lies out of
            bounds, or contradicts another.
    """

    # Data set, input and augmentation.
    dataset: str = option("cifar10", "Data set", table="dataset")
    data_dir: str = resumable_option(
        "",
        "Folder that holds the data set; empty looks in data/ and in the default "
        "folder of tensorflow-datasets.",
        read_by="dataset",
    )
    columns: str = option(
        "",
        "Names, ROLE:NAME by commas, where they are not the usual ones: path, label, "
        "split, fold and weight of a table; image and label of parquet and webdataset; "
        "image, label and text of tfrecord.",
        read_by="dataset",
    )
    image_dir: str = resumable_option(
        "",
        "Folder that the paths in a table start from; empty for the table's.",
        read_by="dataset",
    )
    fold: int = option(
        -1,
        "Number in the column fold of a table whose images are for testing; -1 for "
        "none.",
        Range(at_least=-1),
        read_by="dataset",
    )
    shuffle_buffer_mb: float = option(
        1000.0,
        "Megabytes, in memory, of row groups of Parquet files, or of blocks of remote "
        "files, that are kept to shuffle images; where all have fewer, an epoch is "
        "shuffled as a whole.",
        POSITIVE,
        read_by="dataset",
    )
    image_size: int | str = option(
        0,
        "Pixels to which the images of image_folder and tfds:NAME are resized and "
        "cropped: height and width, or HEIGHTxWIDTH, for example 96x128; 0 keeps the "
        "stored size, or where sizes differ takes the size of the trained weights of "
        "--init_from, otherwise 64. Images of synthetic have this size, or 32.",
        NOT_NEGATIVE,
        read_by="dataset",
    )
    center_crop: float = option(
        0.0,
        "Part of height and width of the middle of images of image_folder and "
        "tfds:NAME that --image_size takes, where no random crop is: 0.875 is a resize "
        "to 256 and a crop of 224. 0: as the trained weights of --init_from were "
        "evaluated, otherwise 1.",
        Range(at_least=0, at_most=1),
        read_by="dataset",
    )
    interpolation: str = option(
        "auto",
        "Filter by which images of image_folder and tfds:NAME are resized, Pillow's "
        "bilinear or bicubic; auto: that of the trained weights of --init_from, "
        "otherwise bilinear.",
        choices=INTERPOLATIONS,
        read_by="dataset",
    )
    standardize: str = option(
        "auto",
        "Mean and standard deviation by which images are standardized: of the training "
        "images (data), of imagenet, those that make pixels -1..1 or 0..1, none for "
        "pixels from 0 to 255, or MEAN:STD of pixels divided by 255, one number or one "
        "per channel, such as 0.485,0.456,0.406:0.229,0.224,0.225. auto: those of the "
        "trained weights of --init_from or keras:NAME, none for a network of the user "
        "that begins with a Rescaling or Normalization layer, otherwise data.",
    )
    early_sizes: str = option(
        "",
        "Pixels of the shorter side to which images are shrunk in the first part of "
        "--num_epochs, such as 24:0.5 in the first half; several by commas, growing: "
        "16:0.2,24:0.5.",
    )
    input: str = resumable_option(
        "auto",
        "Batches are read ahead (stream; for GPUs also copied ahead), or made from "
        "images that lie on the towers' devices (resident); auto: resident on GPUs "
        "where the data lies in memory.",
        choices=("auto", "stream", "resident"),
    )
    image_cache_mb: float = resumable_option(
        2000.0,
        "Megabytes of decoded images of image_folder and tfds:NAME that are kept in "
        "memory; 0 decodes them in every epoch.",
        NOT_NEGATIVE,
        read_by="dataset",
    )
    max_image_pixels: int = resumable_option(
        choices.MAX_IMAGE_PIXELS,
        "Most pixels of an image file of image_folder and tfds:NAME; a larger one is "
        "refused before it is decoded.",
        AT_LEAST_1,
        read_by="dataset",
    )
    bad_images: str = resumable_option(
        "stop",
        "Image files of image_folder and tfds:NAME that cannot be used end the run "
        "(stop), or all files are read at the start and those left out (skip).",
        choices=("stop", "skip"),
        read_by="dataset",
    )
    validation_fraction: float = option(
        0.0,
        "Fraction of the images of each class, the same for every seed, that is held "
        "out; the evaluations during training then use it, and the best step is kept.",
        BELOW_1,
    )
    validation_fold: str = option(
        "",
        "In place of --validation_fraction, which of several equal parts is held out, "
        "such as 0/5, the first of five, to 4/5; --folds=5 trains all.",
    )
    best_by: str = resumable_option(
        "auto",
        "Metric on held-out images that makes a step the best, and that --patience and "
        "schedule plateau go by; of equal ones the lowest loss decides",
        table="best_by",
    )
    min_delta: float = resumable_option(
        0.0,
        "Improvement of --best_by over the last one, above which --patience and "
        "schedule plateau count an evaluation as better.",
        NOT_NEGATIVE,
    )
    sampler: str = option(
        "shuffle",
        "Order of an epoch: every image once (shuffle), or as many drawn with "
        "replacement, all classes equally likely (balanced).",
        choices=("shuffle", "balanced"),
    )
    repeats: int = option(
        1,
        "How often each image that is drawn occurs in a step, with random numbers of "
        "its own; an epoch stays as many images.",
        Range(at_least=1, at_most=1_000_000),
    )
    augment: str = option("tutorial", "Augmentation", table="augment")
    crop_scale: str = option(
        "0.08,1",
        "Least and most share of the area that random_resized_crop and rand_augment "
        "take.",
        read_by="augment",
    )
    policy: str = option(
        "none", "Operations on the pixels that --augment gives", table="policy"
    )
    rand_augment: str = option(
        "2,9",
        "Number of operations of --policy=rand_augment, and their magnitude, of 0 to "
        "30.",
        read_by="policy",
    )
    color_jitter: float = option(
        0.0,
        "Strength s of random brightness, contrast and saturation, by factors from "
        "max(0, 1 - s) to 1 + s; 0 for none.",
        NOT_NEGATIVE,
    )
    random_gray: float = option(
        0.0,
        "Probability that an image loses its colors.",
        Range(at_least=0, at_most=1),
    )
    random_erasing: float = option(
        0.0,
        "Probability that a random rectangle of an image is erased.",
        Range(at_least=0, at_most=1),
    )
    cutout_size: int = option(
        0,
        "Side of the square that is cut out of every image, in pixels; 0 for none.",
        NOT_NEGATIVE,
    )
    mixup: float = option(
        0.0,
        "Mix each image and its label with another one's by shares from Beta(x, x), x "
        "being this; 0 for none.",
        NOT_NEGATIVE,
    )
    cutmix: float = option(
        0.0,
        "Paste into each image a rectangle of another one, its share of the area and "
        "of the label from Beta(x, x); 0 for none. With --mixup, one of the two at "
        "random.",
        NOT_NEGATIVE,
    )
    seed: int = option(
        0, "Seed of the parameters, the order and the augmentation.", NOT_NEGATIVE
    )

    # Network, its arithmetic and compiler.
    model: str = option("cnn", "Network", table="model")
    width: float = option(
        1.0,
        "Factor on the channels of every layer.",
        Range(above=0, at_most=1000),
        read_by="model",
    )
    dropout: float = option(
        0.0,
        "Rate of dropout in the networks that docs/networks.md lists for it.",
        BELOW_1,
        read_by="model",
    )
    stochastic_depth: float = option(
        0.0,
        "Rate at which an image skips the last residual block of a network; that of "
        "the blocks before it grows linearly with depth.",
        BELOW_1,
        read_by="model",
    )
    precision: str = option(
        "float32",
        "Arithmetic of the network; parameters, slots and sums stay float32. With "
        "float16 the loss is scaled, and a step that overflows is skipped.",
        choices=choices.PRECISIONS,
    )
    compile: str = resumable_option(
        "auto",
        "xla: the forward and backward part of each tower is compiled as one, and on "
        "GPUs the update; auto: xla on GPUs, for networks that XLA compiles, in runs "
        "of at least 5,000 steps.",
        choices=("auto", "none", "xla"),
    )

    # Optimizer, learning rate, weight decay and moving averages.
    optimizer: str = option("sgd", "Optimizer", table="optimizer")
    learning_rate: float = option(0.1, "Initial, or highest, learning rate.", POSITIVE)
    momentum: float = option(
        0.0, "Momentum of the velocity.", BELOW_1, read_by="optimizer"
    )
    beta1: float = option(
        0.9,
        "Decay of the mean of the gradients of adam, adamw, lamb and lion.",
        BELOW_1,
        read_by="optimizer",
    )
    beta2: float = option(
        0.999,
        "Decay of the mean of their squares of adam, adamw and lamb.",
        BELOW_1,
        read_by="optimizer",
    )
    rho: float = option(
        0.9,
        "Decay of rmsprop's mean of the squared gradients.",
        BELOW_1,
        read_by="optimizer",
    )
    epsilon: float = option(
        1e-7,
        "Next to the root in the denominator of adam, adamw and lamb, under it in "
        "rmsprop's.",
        POSITIVE,
        read_by="optimizer",
    )
    muon_momentum: float = option(
        0.6, "Momentum of the convolutions with muon.", BELOW_1, read_by="optimizer"
    )
    trust_coefficient: float = option(
        0.001,
        "With lars, the length of a kernel's step at rate 1 over that of the kernel.",
        POSITIVE,
        read_by="optimizer",
    )
    optimizer_options: str = option(
        "",
        "Hyperparameters of the optimizer that have no flag of their own, such as "
        "'beta3:0.99,warm:5'.",
    )
    weight_decay: float = option(
        0.004,
        "Weight decay: this times half the sum of squares of the parameters that the "
        "network marks, kernels as a rule, is added to the loss; adamw, lars, lamb, "
        "lion and muon (not to convolutions) apply it in their update.",
        NOT_NEGATIVE,
    )
    loss: str = option("cross_entropy", "Loss of an image", table="loss")
    label_smoothing: float = option(
        0.0,
        "Probability spread evenly over all classes.",
        BELOW_1,
        read_by="loss",
    )
    focal_gamma: float = option(
        2.0,
        "Exponent of the focal loss; 0 is cross_entropy.",
        NOT_NEGATIVE,
        read_by="loss",
    )
    target_threshold: float = option(
        0.0,
        "With binary_cross_entropy, shares of mixed images above it count as 1 and "
        "others as 0; 0 takes the shares.",
        BELOW_1,
        read_by="loss",
    )
    class_weights: str = option(
        "",
        "Weights of the classes in the training loss: balanced for weights inverse to "
        "the number of images, or a JSON file of names and weights (in Python also a "
        "dict of names or numbers of classes and weights); empty for none.",
        read_by="loss",
    )
    pos_weights: str = option(
        "",
        "With binary_cross_entropy, factors on the terms of the images that have a "
        "class: balanced for the number of images without it over those with it, or a "
        "JSON file (in Python a dict) as of --class_weights; empty for none.",
        read_by="loss",
    )
    logit_adjustment: float = option(
        0.0,
        "Margin for classes with few images: the training loss takes the logits plus "
        "this times the logarithm of the class's share of the training images.",
        NOT_NEGATIVE,
        read_by="loss",
    )
    teacher: str = option(
        "",
        "Run folder of a trained network for the same images and classes, whose "
        "outputs the loss follows too; empty for none.",
    )
    distillation_temperature: float = option(
        4.0, "What the logits are divided by, of both networks.", POSITIVE
    )
    distillation_weight: float = option(
        0.9,
        "Weight of the loss that follows the teacher; that of the labels has the rest.",
        Range(at_least=0, at_most=1),
    )
    param_rates: str = option(
        "",
        "Factors on the learning rate of parameters by name, the first pattern that "
        "fits, such as '*/bias:2', 0 to freeze them; with another number, "
        "'stem/bias:2:3', that rate falls linearly to zero over so many epochs.",
    )
    layer_decay: float = option(
        1.0,
        "Factor on the learning rate for each block between a parameter and the head, "
        "whose rate is the whole one; 1 for none.",
        Range(above=0, at_most=1),
    )
    freeze: str = option(
        "",
        "Patterns of the names of parameters that are not trained, such as stem*, "
        "with commas between them. Batch normalization all of whose parameters are "
        "frozen normalizes with its moving averages and leaves them.",
    )
    schedule: str = option(
        "exponential", "Learning rate over the images trained on", table="schedule"
    )
    decay_factor: float = option(
        0.1,
        "Factor on the rate at each stair of the exponential schedules, and at each "
        "plateau.",
        POSITIVE,
        read_by="schedule",
    )
    epochs_per_decay: float = option(
        350.0,
        "Length of a stair of the exponential schedules, in epochs.",
        POSITIVE,
        read_by="schedule",
    )
    epoch_factors: str = option(
        "",
        "Of the piecewise schedule: epochs, and the factor on the rate from each of "
        "them on, such as 30:0.1,60:0.01.",
        read_by="schedule",
    )
    min_rate_factor: float = option(
        0.0,
        "What the cosine schedule ends at, as a part of the rate.",
        BELOW_1,
        read_by="schedule",
    )
    peak_fraction: float = option(
        0.3,
        "Part of --num_epochs after which the one_cycle schedule is highest.",
        Range(above=0, below=1),
        read_by="schedule",
    )
    plateau_patience: int = option(
        5,
        "Of the plateau schedule: evaluations on held-out images in a row, none the "
        "best so far, after which the rate is lowered.",
        AT_LEAST_1,
        read_by="schedule",
    )
    warmup_epochs: float = option(
        0.0, "Epochs over which the rate first rises linearly.", NOT_NEGATIVE
    )
    warmup_start_factor: float = option(
        0.0, "What that rise begins at, as a part of the rate.", BELOW_1
    )
    ema_decay: float = option(
        0.9999,
        "Decay of the parameters' moving averages, ramped as min(decay, (1+n)/(10+n)) "
        "in step n; 0 keeps none.",
        BELOW_1,
    )
    clip_norm: float = option(
        0.0, "Largest global norm of the mean gradient; 0 does not clip.", NOT_NEGATIVE
    )
    # Free, as max_steps is: every update is the same with both, one of them only
    # ends the run earlier.
    on_nonfinite: str = resumable_option(
        "stop",
        "Where a loss or a gradient is not finite: end the run before the update "
        "(stop), or leave out the update and count the step (skip); the tenth in a "
        "row ends the run.",
        choices=("stop", "skip"),
    )

    # Strategy, devices, all-reduce and the size of a batch.
    strategy: str = resumable_option(
        "towers", "Placement of the variables and averaging", table="strategy"
    )
    num_towers: int = resumable_option(
        0, "Number of devices; 0 takes every GPU, or one CPU.", NOT_NEGATIVE
    )
    device: str = resumable_option(
        "auto",
        "Where the towers run; cpu makes a logical device per tower.",
        choices=("auto", "cpu", "gpu"),
    )
    parameter_device: str = resumable_option(
        "auto",
        "Where strategies towers and async_towers keep and update the variables; auto "
        "is the CPU, or with a single tower its own device.",
        choices=("auto", "cpu", "gpu"),
        read_by="strategy",
    )
    async_scale_gradients: bool = option(
        True,
        "Whether strategy async_towers scales a tower's gradients by its share of the "
        "batch, so that an epoch moves the parameters as far as in the others.",
        read_by="strategy",
    )
    max_staleness: int = resumable_option(
        0,
        "Most updates by others between fetch and update of a tower in strategy "
        "async_towers; 0 does not bound them.",
        NOT_NEGATIVE,
        read_by="strategy",
    )
    group_size: int = resumable_option(
        1,
        "Devices that hold one network in strategy model_parallel; num_towers is a "
        "multiple of it.",
        AT_LEAST_1,
        read_by="strategy",
    )
    device_order: str = resumable_option(
        "",
        "Order in which devices are taken, such as 0,1,4,5: neighbors make a group; "
        "empty for the driver's order.",
    )
    device_memory_mb: float = resumable_option(
        0.0,
        "Megabytes that training may take on a device; refused where the variables "
        "alone take more. On GPUs also the limit of the logical devices made of them. "
        "0 for all.",
        Range(at_least=0, at_most=1e9),
    )
    batch_norm: str = option(
        "local",
        "Moments of batch normalization: of each tower's images (local), of the whole "
        "batch (sync), or the trained ones (frozen), with scales and offsets that are "
        "not trained.",
        choices=("local", "sync", "frozen"),
    )
    all_reduce: str = resumable_option(
        "auto",
        "Algorithm that adds up the gradients of strategy replicated: star (on one "
        "device), tree, ring, or nccl (two or more GPUs); or of multi_worker: ring or "
        "nccl. auto is nccl between GPUs, else star, or of multi_worker ring.",
        choices=("auto", "star", "tree", "ring", "nccl"),
        read_by="strategy",
    )
    all_reduce_pack_mb: float = resumable_option(
        -1.0,
        "Megabytes of the buffers in which gradients travel between workers; 0 for a "
        "single one, -1 for a default.",
        Range(at_least=-1, at_most=1e9),
        read_by="strategy",
    )
    all_reduce_dtype: str = option(
        "float32",
        "Type of the numbers that are all-reduced; bfloat16 halves them and rounds "
        "the gradients.",
        choices=("float32", "bfloat16"),
        read_by="strategy",
    )
    batch_size: int = option(
        128,
        "Images over all towers together: of a step, or of a micro-batch with "
        "--accumulate_steps.",
        Range(at_least=1, at_most=1_000_000),
    )
    accumulate_steps: int = option(
        1,
        "Micro-batches whose mean gradient makes one step of a synchronous strategy; "
        "a step then has batch_size x accumulate_steps images.",
        Range(at_least=1, at_most=10_000),
    )
    deterministic: bool = resumable_option(
        False, "Ask TensorFlow for kernels that repeat bit for bit (GPUs)."
    )

    # Start and length, periods of logs, evaluations and checkpoints.
    init_from: str = option(
        "",
        "What has the parameters that a new run starts from at step 0, where names "
        "and shapes match: a run folder, a .keras or .h5 file of Keras, a "
        ".safetensors file, a .pth file of PyTorch, a SavedModel, a checkpoint of "
        "TensorFlow; or imagenet: weights of keras:NAME, which Keras fetches, or of "
        "another network, where they are on this machine; empty for random ones.",
    )
    linear_probe: bool = option(
        False,
        "Fit the new head of a network with trained weights to the training images by "
        "logistic regression, before the first step.",
    )
    num_epochs: float = option(
        60.0,
        "Length of the run, in passes over the training images.",
        Range(above=0, at_most=1e9),
    )
    max_steps: int = resumable_option(
        0, "Stop after this step; shapes nothing; 0 does not stop.", NOT_NEGATIVE
    )
    steps_per_loop: int = resumable_option(
        100,
        "Most steps in one compiled call; fewer where something is due, or where they "
        "would take more than about 2 s.",
        AT_LEAST_1,
    )
    log_every_steps: int = resumable_option(
        100, "Steps between records in metrics.jsonl and TensorBoard.", AT_LEAST_1
    )
    summary_every_steps: int = resumable_option(
        1000,
        "Steps between histograms, and pictures of training batches, in TensorBoard; 0 "
        "ignores the steps.",
        NOT_NEGATIVE,
    )
    summary_every_secs: float = resumable_option(
        600.0,
        "Seconds between summaries, each with record, scalars, histograms and picture; "
        "0 ignores the clock.",
        NOT_NEGATIVE,
    )
    eval_every_epochs: float = resumable_option(
        1.0, "Epochs between evaluations; 0 evaluates none.", NOT_NEGATIVE
    )
    patience: int = resumable_option(
        0,
        "Evaluations on held-out images in a row, none the best so far, after which "
        "the run ends; 0 for never.",
        NOT_NEGATIVE,
    )
    tta: str = resumable_option(
        "none",
        "Test-time augmentation: evaluations also report the accuracy of the mean "
        "logits over several transformed copies of an image",
        table="tta",
    )
    checkpoint_every_secs: float = resumable_option(
        600.0, "Seconds between checkpoints; 0 ignores the clock.", NOT_NEGATIVE
    )
    checkpoint_every_steps: int = resumable_option(
        0, "Steps between checkpoints; 0 ignores the steps.", NOT_NEGATIVE
    )
    keep_checkpoints: int = resumable_option(
        3, "Newest checkpoints that are kept, besides the best.", AT_LEAST_1
    )
    stuck_after_secs: float = resumable_option(
        600.0,
        "Seconds without a finished step, or save, after which the run is ended as "
        "stuck; 0 waits forever.",
        NOT_NEGATIVE,
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = check_option(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        check_together(self)

    @functools.cached_property
    def lists(self) -> dict[str, Any]:
        """The values of the list options by name, parsed."""
        return {name: parse(name, getattr(self, name)) for name in LISTS}

    @property
    def images_per_step(self) -> int:
        """Images of one update."""
        return self.batch_size * self.accumulate_steps

    @property
    def fold_of_images(self) -> tuple[int, int] | None:
        """The fold of the training images that is held out, and the number of folds;
        None without `validation_fold`."""
        if not self.validation_fold:
            return None
        return tuple(map(int, self.validation_fold.split("/")))

    @property
    def holds_out(self) -> bool:
        """Whether training images are held out."""
        return bool(self.validation_fraction or self.validation_fold)

    @property
    def devices_per_network(self) -> int:
        """Devices that hold one network together."""
        choice = self.choice_of("strategy")
        return self.group_size if choice.sharded or choice.is_in_a_file else 1

    @property
    def length_is_resumable(self) -> bool:
        """True if a run may be made longer without becoming another run."""
        return not (self.choice_of("schedule").by_length or self.early_sizes)

    def choice_of(self, option: str) -> choices.Choice:
        """The row of what is chosen for an option, such as "optimizer"."""
        return choices.find(option, getattr(self, option))

    def options_of(self, option: str) -> dict[str, Any]:
        """The options, by name, that only the choice of an option may read; its target
        gets those that its signature names. Lists are parsed."""
        return {
            name: self.lists.get(name, getattr(self, name))
            for name, field in FIELDS.items()
            if field.metadata["read_by"] == option
        }


FIELDS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(Config)}
Config.__doc__ += "\n    Attributes:\n" + "\n".join(
    textwrap.fill(
        f"{name}: {field.metadata['help']}",
        88,
        initial_indent=8 * " ",
        subsequent_indent=12 * " ",
    )
    for name, field in FIELDS.items()
)


def _with_known_names(init):
    @functools.wraps(init)
    def checked(self, *args, **options):
        check_names(options)
        init(self, *args, **options)

    return checked


Config.__init__ = _with_known_names(Config.__init__)


def non_defaults(config: Config) -> list[str]:
    """The names of the options that are not defaults, in the order of the fields."""
    return [n for n, field in FIELDS.items() if getattr(config, n) != field.default]


def changed_mathematics(stored: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Fields, with both values, whose change would make a resumed run another run."""
    changed = {}
    for name, field in FIELDS.items():
        before, after = getattr(stored, name), getattr(new, name)
        is_resumable = field.metadata["resumable"]
        if name == "num_epochs":
            is_resumable = new.length_is_resumable
        # What plateaus are counted by.
        if name in ("eval_every_epochs", "best_by", "min_delta"):
            is_resumable = not new.choice_of("schedule").by_accuracy
        if before != after and not is_resumable:
            changed[name] = (before, after)
    return changed


def check_names(names: Iterable[str], source: str = "") -> None:
    """Refuses names of which there is no option; `source` begins the message.

    Raises:
        ConfigError: names the nearest option.
    """
    for name in names:
        if name not in FIELDS:
            raise ConfigError(
                f"{source}there is no option {name!r}; {suggestion(name, FIELDS)}"
                f"{program('train')} --help lists them"
            )
