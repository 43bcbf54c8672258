"""Config, which describes a run: one frozen, flat dataclass, stored as JSON.

The field's default is the lowest of three layers; a recipe in `configs/`, or the config
of the run that is continued, overrides it, and a flag overrides both. Where a run
happens (its folder, the addresses of a cluster) is not part of it.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from towers.config import choices
from towers.config.checks import check_together
from towers.config.list_options import LISTS, parse
from towers.config.options import (
    AT_LEAST_1,
    BELOW_1,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    check_option,
    dataset_option,
    loss_option,
    model_option,
    optimizer_option,
    option,
    resumable_option,
    schedule_option,
    strategy_option,
)
from towers.config.preprocessing import FITS, INTERPOLATIONS
from towers.config.synonyms import suggestion
from towers.errors import ConfigError
from towers.messages import program

T = TypeVar("T")


def with_suggestions(cls: type[T]) -> type[T]:
    """Decorate a class to suggest names for unknown arguments, see `check_names`."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self, *args, **options):
        check_names(options)
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@with_suggestions
@dataclasses.dataclass(frozen=True)
class Config:
    """Options of a run. The defaults suit most convolutional networks.

    docs/flags.md and `run_train.py --help` describe each of them.

    Raises:
        ConfigError: an option is unknown; or a value has the wrong type, lies out of
            bounds, or contradicts another.
    """

    # Data set, input and augmentation.
    dataset: str = option("cifar10", "Data set.", table="dataset")
    data_dir: str = dataset_option(
        "", "Folder of the data set; default: data/, or TFDS' folder.", resumable=True
    )
    columns: str = dataset_option(
        "",
        "Column names as ROLE:NAME, separated by commas, if they differ from the "
        "usual ones: path, label, split, fold and weight of a table; image and label "
        "of parquet and webdataset; image, label and text of tfrecord.",
    )
    image_dir: str = dataset_option(
        "", "Base folder of the paths in a table; default: the table's.", resumable=True
    )
    label_separator: str = dataset_option(
        ";",
        "Text between the labels of an image with several, in the label column of a "
        "table, such as '|' or ' '; empty if no image has several.",
    )
    fold: int = dataset_option(
        -1, "Value of column fold of test images; -1 for none.", Range(at_least=-1)
    )
    class_level: int = dataset_option(
        0,
        "Level of the folders that name the classes of image_folder, counted from 1; 0 "
        "infers it and stops if there are two readings.",
        NOT_NEGATIVE,
    )
    unknown_class: str = option(
        "",
        "Class whose images are of no class: they train as uniform targets (outlier "
        "exposure), and choose the threshold of run_eval.py --reject; such as unknown.",
    )
    shuffle_buffer_mb: float = dataset_option(
        1000.0,
        "Shuffle buffer in megabytes, for row groups of Parquet files and blocks of "
        "remote files; an epoch that fits is shuffled as a whole.",
        POSITIVE,
    )
    image_size: int | str = dataset_option(
        0,
        "Size in pixels to which images of folders, containers and tfds:NAME are "
        "resized and cropped: one number, or HEIGHTxWIDTH such as 96x128. 0 keeps the "
        "stored size; if sizes differ, it takes the size of the weights of "
        "--init_from, otherwise 64. Images of synthetic have this size, or 32.",
        NOT_NEGATIVE,
    )
    center_crop: float = dataset_option(
        0.0,
        "Fraction of height and width that the center crop keeps before the resize to "
        "--image_size; 0.875 equals a resize to 256 and a crop of 224. 0 crops as the "
        "weights of --init_from, otherwise 1.",
        FRACTION,
    )
    interpolation: str = dataset_option(
        "auto",
        "Filter of the resize to --image_size, as in Pillow; auto follows the weights "
        "of --init_from, otherwise is bilinear.",
        choices=INTERPOLATIONS,
    )
    fit: str = dataset_option(
        "auto",
        "How photos fit into other proportions: crop takes the largest part in the "
        "middle, pad adds black borders to the whole photo, stretch changes its "
        "proportions; random crops are taken from the result. auto follows the run of "
        "--init_from, otherwise is crop.",
        choices=FITS,
    )
    value_range: str = dataset_option(
        "auto",
        "Pixel values that become black and white, LOW:HIGH, such as 0:4095, or of "
        "several bands 0,-1:4095,1: dtype takes all values of integers of 8 or 16 "
        "bits; auto does so for 8 bits, and otherwise takes the 0.1 and 99.9 "
        "percentiles of training images. The windows of DICOM files apply unless "
        "LOW:HIGH is given.",
    )
    standardize: str = option(
        "auto",
        "Mean and standard deviation of the standardization: data (of the training "
        "images), imagenet, -1..1 or 0..1 (scales pixels to this range), none (pixels "
        "from 0 to 255), or MEAN:STD of pixels divided by 255, one number or one per "
        "channel, such as 0.485,0.456,0.406:0.229,0.224,0.225. auto follows the "
        "trained weights of --init_from or keras:NAME, is none for your own network "
        "that begins with a Rescaling or Normalization layer, otherwise data.",
    )
    early_sizes: str = option(
        "",
        "Progressive resizing: shorter side of images up to a fraction of the run, "
        "such as 24:0.5 for the first half; several in growing order: 16:0.2,24:0.5.",
    )
    input: str = resumable_option(
        "auto",
        "Input pipeline: stream reads batches ahead (for GPUs it also copies them "
        "ahead), resident gathers them from images kept on the towers' devices; auto "
        "is resident on GPUs if the data is in memory.",
        choices=("auto", "stream", "resident"),
    )
    image_cache_mb: float = dataset_option(
        2000.0,
        "Cache of decoded image files, in megabytes; 0 decodes in every epoch.",
        NOT_NEGATIVE,
        resumable=True,
    )
    max_image_pixels: int = dataset_option(
        choices.MAX_IMAGE_PIXELS,
        "Maximum number of pixels of an image file; larger ones are refused.",
        AT_LEAST_1,
        resumable=True,
    )
    bad_images: str = dataset_option(
        "stop",
        "Image files that cannot be used: stop ends the run; skip reads all files at "
        "the start and leaves the bad ones out.",
        choices=("stop", "skip"),
        resumable=True,
    )
    validation_fraction: float = option(
        0.0,
        "Fraction of each class's images that is held out for validation, the same for "
        "every seed; evaluations then use it, and the best step is kept.",
        BELOW_1,
    )
    validation_fold: str = option(
        "",
        "Fold of a cross-validation that is held out: 0/5 is the first of five, 4/5 "
        "the last; --folds=5 trains all.",
    )
    best_by: str = resumable_option(
        "auto",
        "Metric on held-out images that selects the best step, and that --patience "
        "and schedule plateau monitor; ties are broken by the loss.",
        table="best_by",
    )
    min_delta: float = resumable_option(
        0.0, "Minimum gain in --best_by for --patience and plateau.", NOT_NEGATIVE
    )
    sampler: str = option(
        "shuffle",
        "Order of an epoch: shuffle visits every image once; balanced draws as many "
        "with replacement, all classes equally likely.",
        choices=("shuffle", "balanced"),
    )
    repeats: int = option(
        1,
        "Repeated augmentation: how often each drawn image occurs in a step, with "
        "other random numbers; an epoch has as many images.",
        Range(at_least=1, at_most=1_000_000),
    )
    augment: str = option("auto", "Augmentation.", table="augment")
    crop_scale: str = option("0.08,1", "Area of crops (fractions).", read_by="augment")
    policy: str = option("none", "Policy, applied after --augment.", table="policy")
    rand_augment: str = option(
        "2,9", "Operations of rand_augment, their magnitude (0-30).", read_by="policy"
    )
    color_jitter: float = option(
        0.0,
        "Strength s of random brightness, contrast and saturation, with factors from "
        "max(0, 1 - s) to 1 + s; 0 for none.",
        NOT_NEGATIVE,
    )
    random_gray: float = option(0.0, "Probability of converting to gray.", FRACTION)
    random_erasing: float = option(
        0.0, "Probability that a random rectangle of an image is erased.", FRACTION
    )
    cutout_size: int = option(
        0, "Side in pixels of the square that Cutout erases; 0 for none.", NOT_NEGATIVE
    )
    mixup: float = option(
        0.0,
        "Parameter alpha of Mixup, which mixes each image and its label with another "
        "one with a weight from Beta(alpha, alpha); 0 for none.",
        NOT_NEGATIVE,
    )
    cutmix: float = option(
        0.0,
        "Parameter alpha of CutMix, which pastes a rectangle of another image, its "
        "fraction of the area and of the label from Beta(alpha, alpha); 0 for none. "
        "With --mixup, one of the two at random.",
        NOT_NEGATIVE,
    )
    seed: int = option(0, "Seed of parameters, order and augmentation.", NOT_NEGATIVE)

    # Network, its arithmetic and compiler.
    model: str = option("cnn", "Network.", table="model")
    width: float = model_option(
        1.0, "Factor on the number of channels per layer.", Range(above=0, at_most=1000)
    )
    dropout: float = model_option(
        0.0, "Dropout rate of the networks that docs/networks.md lists.", BELOW_1
    )
    stochastic_depth: float = model_option(
        0.0,
        "Probability of skipping the last residual block of a network (stochastic "
        "depth); it decreases linearly to the first block.",
        BELOW_1,
    )
    precision: str = option(
        "float32",
        "Data type of the network's computations; parameters, slots and sums stay "
        "float32. float16 scales the loss, and skips steps that overflow.",
        choices=choices.PRECISIONS,
    )
    compile: str = resumable_option(
        "auto",
        "xla compiles the passes of each tower, on GPUs also the update, and on a "
        "single GPU the whole step; auto does so on GPUs, for networks that XLA "
        "compiles, in runs of 5,000 steps or more.",
        choices=("auto", "none", "xla"),
    )
    recompute: bool = resumable_option(
        False,
        "Compute the activations of blocks again in the backward pass: the same "
        "training in less memory, about a quarter slower.",
    )

    # Optimizer, learning rate, weight decay and moving averages.
    optimizer: str = option("nesterov", "Optimizer.", table="optimizer")
    learning_rate: float = option(0.1, "Initial or peak learning rate.", POSITIVE)
    momentum: float = optimizer_option(0.9, "Momentum of the optimizer.", BELOW_1)
    beta1: float = optimizer_option(
        0.9, "Decay rate of the first moment of adam, adamw, lamb and lion.", BELOW_1
    )
    beta2: float = optimizer_option(
        0.999, "Decay rate of the second moment of adam, adamw and lamb.", BELOW_1
    )
    rho: float = optimizer_option(
        0.9, "Exponential decay rate of the mean squared gradient of rmsprop.", BELOW_1
    )
    epsilon: float = optimizer_option(
        1e-7,
        "Added to the denominator of adam, adamw and lamb for numerical stability; "
        "with rmsprop, added below the square root.",
        POSITIVE,
    )
    muon_momentum: float = optimizer_option(0.6, "Momentum of convolutions.", BELOW_1)
    trust_coefficient: float = optimizer_option(
        0.001, "Trust coefficient of lars: update over kernel norm at rate 1.", POSITIVE
    )
    optimizer_options: str = option(
        "", "Further hyperparameters of the optimizer, such as 'beta3:0.99,warm:5'."
    )
    weight_decay: float = option(
        0.0005,
        "Coefficient of the L2 penalty: this times half the sum of squares of the "
        "decayed parameters, as a rule kernels, is added to the loss. adamw, lars, "
        "lamb, lion and muon (but for convolutions) apply decoupled weight decay.",
        NOT_NEGATIVE,
    )
    loss: str = option("cross_entropy", "Loss function.", table="loss")
    label_smoothing: float = loss_option(
        0.0, "Label smoothing: probability spread evenly over all classes.", BELOW_1
    )
    focal_gamma: float = loss_option(
        2.0, "Focusing parameter of focal loss; 0 equals cross_entropy.", NOT_NEGATIVE
    )
    target_threshold: float = loss_option(
        0.0,
        "With binary_cross_entropy, targets of mixed images above this count as 1 and "
        "others as 0; 0 keeps the targets.",
        BELOW_1,
    )
    class_weights: str = loss_option(
        "",
        "Class weights of the training loss: balanced (inverse to the number of "
        "images), or a JSON file of class names and weights; empty: none.",
    )
    pos_weights: str = loss_option(
        "",
        "With several labels per image, or binary_cross_entropy: weights of the "
        "positive examples of each class, balanced (negative over positive images), "
        "or as --class_weights; empty: none.",
    )
    logit_adjustment: float = loss_option(
        0.0,
        "Logit adjustment: adds this times the log class frequency to the logits.",
        NOT_NEGATIVE,
    )
    teacher: str = option(
        "",
        "Run folder of the teacher for knowledge distillation, a network trained on "
        "the same image shape and classes; empty for none.",
    )
    distillation_temperature: float = option(
        4.0, "Distillation temperature: divides the logits of both networks.", POSITIVE
    )
    distillation_weight: float = option(
        0.9, "Weight of the distillation loss; the label loss has the rest.", FRACTION
    )
    param_rates: str = option(
        "",
        "Learning rate multipliers of parameters by name; the first matching pattern "
        "counts, such as '*/bias:2', and 0 freezes. A third value, 'stem/bias:2:3', is "
        "a number of epochs within which the rate falls to zero.",
    )
    layer_decay: float = option(
        1.0,
        "Layer-wise learning rate decay, a factor per block below the head; 1: none.",
        Range(above=0, at_most=1),
    )
    freeze: str = option(
        "",
        "Patterns of the names of parameters that are not trained, such as stem*, "
        "separated by commas. A batch normalization layer whose parameters are all "
        "frozen uses its moving averages and does not update them.",
    )
    schedule: str = option(
        "cosine", "Learning rate schedule over the training images.", table="schedule"
    )
    decay_factor: float = schedule_option(
        0.1, "Learning rate factor of a stair (exponential) and a plateau.", POSITIVE
    )
    epochs_per_decay: float = schedule_option(
        350.0, "Length of a stair of the exponential schedules, in epochs.", POSITIVE
    )
    epoch_factors: str = schedule_option(
        "", "Epochs and the factors of piecewise from each on, such as 30:0.1,60:0.01."
    )
    min_rate_factor: float = schedule_option(
        0.0, "Final rate of the cosine schedule, as a fraction of the initial.", BELOW_1
    )
    peak_fraction: float = schedule_option(
        0.3, "Fraction of the run at which one_cycle peaks.", Range(above=0, below=1)
    )
    plateau_patience: int = schedule_option(
        5,
        "Number of evaluations on held-out images without improvement after which the "
        "plateau schedule reduces the learning rate.",
        AT_LEAST_1,
    )
    warmup_epochs: float = option(
        -1.0,
        "Number of epochs of linear learning rate warm-up; -1 for a twentieth of "
        "--num_epochs with the schedules cosine and linear, otherwise none.",
        Range(at_least=-1),
    )
    warmup_start_factor: float = option(
        0.0, "First rate of the warm-up, as a fraction of --learning_rate.", BELOW_1
    )
    ema_decay: float = option(
        0.9999,
        "Decay of the exponential moving average (EMA) of the parameters, ramped up "
        "as min(decay, (1+n)/(10+n)) in step n; 0 for no EMA.",
        BELOW_1,
    )
    clip_norm: float = option(
        0.0, "Maximum global norm of the gradient; 0 for no clipping.", NOT_NEGATIVE
    )
    # Resumable, as max_steps is: every update is the same with both, one of them
    # only ends the run earlier.
    on_nonfinite: str = resumable_option(
        "stop",
        "A loss or gradient that is not finite: stop ends the run before the update; "
        "skip leaves out the update. The tenth in a row always ends the run.",
        choices=("stop", "skip"),
    )

    # Strategy, devices, all-reduce and the size of a batch.
    strategy: str = resumable_option(
        "auto", "Placement of variables and averaging of gradients.", table="strategy"
    )
    num_towers: int = resumable_option(
        0,
        "Number of towers; 0 for one per GPU, or one on the CPU (with "
        "--batch_norm=frozen one for each of a few cores).",
        NOT_NEGATIVE,
    )
    device: str = resumable_option(
        "auto",
        "Device type of the towers; cpu creates a logical device per tower.",
        choices=("auto", "cpu", "gpu"),
    )
    parameter_device: str = strategy_option(
        "auto",
        "Device on which strategies towers and async_towers keep and update the "
        "variables; auto is the CPU, or with a single tower its own device.",
        choices=("auto", "cpu", "gpu"),
        resumable=True,
    )
    async_scale_gradients: bool = strategy_option(
        True,
        "Scale a tower's gradients by its share of the batch in async_towers, so that "
        "an epoch moves the parameters as far as with other strategies.",
    )
    max_staleness: int = strategy_option(
        0,
        "Maximum number of updates by other towers between fetch and update of a "
        "tower in strategy async_towers; 0 for no limit.",
        NOT_NEGATIVE,
        resumable=True,
    )
    group_size: int = strategy_option(
        1,
        "Devices that share one network in model_parallel; divides num_towers.",
        AT_LEAST_1,
        resumable=True,
    )
    device_order: str = resumable_option(
        "", "Order of devices, such as 0,1,4,5: neighbors form a group."
    )
    device_memory_mb: float = resumable_option(
        0.0,
        "Memory limit of a device in megabytes, refused if the variables alone need "
        "more; of the logical devices on GPUs too. 0 for no limit.",
        Range(at_least=0, at_most=1e9),
    )
    batch_norm: str = option(
        "local",
        "Statistics of batch normalization: of each tower's images (local), of the "
        "whole batch (sync), or the trained ones (frozen, with scales and offsets).",
        choices=("local", "sync", "frozen"),
    )
    all_reduce: str = strategy_option(
        "auto",
        "Algorithm that sums the gradients of replicated: star (on one device), tree, "
        "ring, or nccl (two or more GPUs); of multi_worker: ring or nccl. auto is nccl "
        "between GPUs, otherwise star, or ring with multi_worker.",
        choices=("auto", "star", "tree", "ring", "nccl"),
        resumable=True,
    )
    all_reduce_pack_mb: float = strategy_option(
        -1.0,
        "Minimum size of gradient buffers between workers, in megabytes; 0 for a "
        "single buffer, -1 for 1 MB between CPUs and 25 MB between GPUs.",
        Range(at_least=-1, at_most=1e9),
        resumable=True,
    )
    all_reduce_dtype: str = strategy_option(
        "float32",
        "Data type of gradients in the all-reduce; bfloat16 rounds, half the traffic.",
        choices=("float32", "bfloat16"),
    )
    batch_size: int = option(
        128,
        "Images over all towers, per step or micro-batch (--accumulate_steps). "
        "run_train.py also takes auto: the largest that fits on GPUs, by trial.",
        Range(at_least=1, at_most=1_000_000),
    )
    accumulate_steps: int = option(
        1,
        "Gradient accumulation: number of micro-batches per step of a synchronous "
        "strategy; a step then has batch_size x accumulate_steps images.",
        Range(at_least=1, at_most=10_000),
    )
    deterministic: bool = resumable_option(False, "Use deterministic kernels (GPUs).")

    # Start and length, periods of logs, evaluations and checkpoints.
    init_from: str = option(
        "",
        "Weights from which a new run starts at step 0, if names and shapes match: "
        "a run folder, a .keras or .h5 file of Keras, a .safetensors file, a .pth "
        "file of PyTorch, a SavedModel, a TensorFlow checkpoint; timm/NAME, "
        "hf://OWNER/NAME or torchvision/NAME, which are fetched; or imagenet, weights "
        "of keras:NAME, or of another network if here. Empty for random weights.",
    )
    linear_probe: bool = option(
        False,
        "Fit a new head to trained features by logistic regression, before step 1.",
    )
    num_epochs: float = option(60.0, "Epochs of the run.", Range(above=0, at_most=1e9))
    max_steps: int = resumable_option(
        0, "Stop after this step; changes no schedule; 0 for no limit.", NOT_NEGATIVE
    )
    steps_per_loop: int = resumable_option(
        100,
        "Maximum number of steps per compiled call; fewer in 2 s or if some are due.",
        AT_LEAST_1,
    )
    log_every_steps: int = resumable_option(
        0,
        "Steps between records in metrics.jsonl and TensorBoard; 0 for 100, or for a "
        "fiftieth of a shorter run.",
        NOT_NEGATIVE,
    )
    summary_every_steps: int = resumable_option(
        1000,
        "Steps between histograms and pictures in TensorBoard; 0 for no period.",
        NOT_NEGATIVE,
    )
    summary_every_secs: float = resumable_option(
        600.0,
        "Seconds between summaries (scalars, histograms, picture); 0 for no period.",
        NOT_NEGATIVE,
    )
    eval_every_epochs: float = resumable_option(
        1.0, "Epochs between evaluations; 0 for no evaluations.", NOT_NEGATIVE
    )
    patience: int = resumable_option(
        0,
        "Early stopping: number of evaluations on held-out images without improvement "
        "after which the run ends; 0 never stops early.",
        NOT_NEGATIVE,
    )
    tta: str = resumable_option(
        "none",
        "Test-time augmentation: evaluations also report the accuracy of the mean "
        "logits over several transformed copies of an image.",
        table="tta",
    )
    checkpoint_every_secs: float = resumable_option(
        600.0, "Seconds between checkpoints; 0 for no period in time.", NOT_NEGATIVE
    )
    checkpoint_every_steps: int = resumable_option(
        0, "Steps between checkpoints; 0 for no period in steps.", NOT_NEGATIVE
    )
    keep_checkpoints: int = resumable_option(
        3, "Number of latest checkpoints to keep, in addition to the best.", AT_LEAST_1
    )
    stuck_after_secs: float = resumable_option(
        600.0,
        "Seconds without a step or save after which a run ends; 0 waits forever.",
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
    def num_warmup_epochs(self) -> float:
        """`warmup_epochs`, or the length that -1 stands for."""
        if self.warmup_epochs >= 0:
            return self.warmup_epochs
        return self.num_epochs / 20 if self.choice_of("schedule").warms_up else 0.0

    @property
    def fold_of_images(self) -> tuple[int, int] | None:
        """The fold that is held out, and the number of folds; None without."""
        if not self.validation_fold:
            return None
        fold, _, folds = self.validation_fold.partition("/")
        return int(fold), int(folds)

    @property
    def holds_out(self) -> bool:
        """Return whether training images are held out."""
        return bool(self.validation_fraction or self.validation_fold)

    @property
    def devices_per_network(self) -> int:
        """Devices that hold one network together."""
        choice = self.choice_of("strategy")
        return self.group_size if choice.sharded or choice.is_in_a_file else 1

    def warmup_for(self, num_epochs: float, schedule: str = "") -> float:
        """Return `warmup_epochs` for another length, scaled if that is necessary."""
        by_length = choices.find("schedule", schedule or self.schedule).by_length
        if self.warmup_epochs > (0 if by_length else num_epochs):
            return self.warmup_epochs * num_epochs / self.num_epochs
        return self.warmup_epochs

    @property
    def resize_options(self) -> dict[str, Any]:
        """The arguments of `image.read_image` of the same names."""
        names = "center_crop", "interpolation", "fit"
        return {name: getattr(self, name) for name in names}

    @property
    def length_is_resumable(self) -> bool:
        """Return whether a run may be made longer without becoming another run."""
        return not (self.choice_of("schedule").by_length or self.early_sizes)

    def choice_of(self, option: str) -> choices.Choice:
        """Return the row of its table that an option, such as "optimizer", names."""
        return choices.find(option, getattr(self, option))

    def options_of(self, option: str) -> dict[str, Any]:
        """Return name -> value of the options with `read_by=option`, parsed."""
        return {
            name: self.lists.get(name, getattr(self, name))
            for name, field in FIELDS.items()
            if field.metadata["read_by"] == option
        }


FIELDS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(Config)}


def non_defaults(config: Config) -> list[str]:
    """Return the options that are not defaults, in the order of the fields."""
    return [n for n, field in FIELDS.items() if getattr(config, n) != field.default]


def changed_mathematics(stored: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return fields, with both values, that differ and must not in a resumed run."""
    changed = {}
    for name, field in FIELDS.items():
        before, after = getattr(stored, name), getattr(new, name)
        is_resumable = field.metadata["resumable"]
        if name == "num_epochs":
            is_resumable = new.length_is_resumable
        # Plateaus are counted by these.
        if name in ("eval_every_epochs", "best_by", "min_delta"):
            is_resumable = not new.choice_of("schedule").by_accuracy
        if before != after and not is_resumable:
            changed[name] = (before, after)
    return changed


def check_names(names: Iterable[str], source: str = "") -> None:
    """Raise ConfigError for names that are not options, after `source`."""
    for name in names:
        if name not in FIELDS:
            way = f"{suggestion(name, FIELDS)}{program('train')} --help lists them"
            raise ConfigError(f"{source}unknown option {name!r}; {way}")


def to_json(config: Config) -> str:
    """Return the text of `config.json`."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str | bytes) -> Config:
    """Return the Config of a `config.json`; fields that it lacks have their default."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"not a config.json: {error}") from None
    return from_values(values)


def from_values(values: Any) -> Config:
    """Return the Config of a stored object of options."""
    if not isinstance(values, dict) or not all(isinstance(x, str) for x in values):
        raise ConfigError("an object of options is expected")
    return Config(**values)


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError if it is not JSON."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
