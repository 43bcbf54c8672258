"""Builds the parts of a run from a Config; the parts take plain arguments."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from towers import console, data
from towers.cluster.workers import ALONE, Workers
from towers.config import Config, choices, factories
from towers.config.pretrained import published_weights
from towers.data.augment.augmentation import Augment, create_augment
from towers.data.augment.distortions import extend
from towers.data.augment.mixing import create_mix
from towers.data.augment.tta import create_tta
from towers.data.batches import EvalBatches, TrainBatches, hold_out, some_images
from towers.data.block_order import block_order
from towers.data.classes import BalancedOrder, class_weights, labels_for, logit_offsets
from towers.data.resident import Resident
from towers.data.share import Share, shares
from towers.data.sources import DataSet, Source, num_bytes
from towers.errors import ConfigError
from towers.models import create
from towers.models.variables import variable_names
from towers.optim import losses, optimizers, param_rates, schedules
from towers.optim.epochs import num_images
from towers.optim.phases import Phase, create_phases
from towers.optim.update import Update
from towers.parallel import devices as parallel_devices
from towers.parallel.assembly import assemble_trainer
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.compilation import why_not_xla
from towers.parallel.copies import Initial
from towers.parallel.devices import Devices
from towers.parallel.feed import Batch, Feed, Streams
from towers.parallel.reduce import split_batch
from towers.parallel.trainer import SynchronousTrainer, Trainer
from towers.run.dataset_info import DatasetInfo
from towers.run.periods import Periods
from towers.run.standardization import standardize

# Steps of a run from which compile=auto takes XLA. On an H200 it saves 4 to 8 ms a step
# and needs 15 to 50 s to compile.
XLA_STEPS = 5_000
# Most bytes of images that input=auto puts on a GPU; CIFAR-10 has 154 MB.
MOST_RESIDENT_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run, besides its devices.

    Attributes:
        data: the data set.
        train_batches: step -> batch; None for an evaluation.
        augment: the augmentation of the images.
        train_source: the images that are trained on; None where they were not loaded.
        eval_split: name and source of the images that evaluations during training use:
            "validation" where the data set has such or a part of the training set is
            held out, else "test".
        model: the network, with its initial parameters.
        phases: parts of the run whose steps are not alike, if there are any.
        update: from the mean gradient to the next parameters.
        num_examples: training images of an epoch; 0 where they were not loaded.
        total_steps: steps until `num_epochs` is reached, or 0.
        share: which images of every batch this process computes.
    """

    data: DataSet
    train_batches: TrainBatches | None
    augment: Augment
    train_source: Source | None
    eval_split: tuple[str, Source]
    model: keras.Model
    phases: tuple[Phase, ...]
    update: Update
    num_examples: int
    total_steps: int
    share: Share


def build(
    config: Config,
    *,
    device_kind: str = "CPU",
    for_training: bool = True,
    share: Share | None = None,
    dataset_info: DatasetInfo | None = None,
    test_only: bool = False,
    continued: DatasetInfo | None = None,
    schedule_fn: Callable[[Config, int], schedules.Schedule] | None = None,
) -> Parts:
    """Loads the data and builds the network and its update.

    Args:
        config: of the run.
        device_kind: of the towers, CPU or GPU.
        for_training: False for an evaluation, which has no phases, and whose checkpoint
            holds the state that layers take from the data.
        share: of one of several workers, see `share_of`.
        dataset_info, test_only: of an evaluation, see `load_data_set`.
        continued: of the checkpoint from which a training goes on.
        schedule_fn: (config, training images of an epoch) -> the learning rate, in
            place of `create_schedule`.

    Raises:
        DataError: the data set is missing or invalid.
        ConfigError: the options do not fit the data set.
    """
    # Images.
    data_set = load_data_set(config, dataset_info, test_only=test_only)
    train_source, eval_split = data_set.train, ("test", data_set.test)
    augment = create_augmentation(config, data_set, device_kind)
    if data_set.validation is not None:
        eval_split = "validation", data_set.validation
        for name in ("validation_fraction", "validation_fold"):
            if value := getattr(config, name):
                raise ConfigError(
                    f"{name}={value}: the data set has images for validation; leave "
                    "the option out"
                )
    elif config.holds_out and train_source is not None:
        train_source, held_out = hold_out(
            train_source, config.validation_fraction, config.fold_of_images
        )
        eval_split = "validation", held_out
    num_examples = total_steps = 0
    if train_source is not None:
        num_examples = train_source.num_examples
        images = num_images(config.num_epochs, num_examples)
        total_steps = max(1, math.ceil(images / config.images_per_step))
    share = share or Share.all_of(config.batch_size)

    # Network.
    *image_size, channels = augment.image_shape
    num_classes = len(data_set.class_names)

    def create_model_for(height: int, width: int) -> keras.Model:
        shape = (height, width, channels)
        model = create_network(config, shape, num_classes, device_kind)
        _, frozen = match_parameters(config, model)
        create.freeze_normalization(model, frozen)
        return model

    model = create_model_for(*image_size)
    if dataset_info is None:
        standardized = standardize(config, data_set, model, continued)
        if standardized is not data_set:
            data_set = standardized
            augment = create_augmentation(config, data_set, device_kind)
    matched, _ = match_parameters(config, model)

    # Training batches and phases.
    phases, train_batches = (), None
    if for_training:
        create.adapt(model, lambda: some_images(train_source, augment))
        phases = create_phases(
            model,
            total_steps=total_steps,
            early_sizes=config.lists["early_sizes"],
            freezing_steps=param_rates.freezing_steps(
                matched, num_examples, config.images_per_step
            ),
            create_model=create_model_for,
        )
        order = block_order(train_source, config.shuffle_buffer_mb)
        if config.sampler != "shuffle":
            if order is not None:
                console.warn(
                    f"sampler={config.sampler} reads row groups and other blocks in "
                    "random order, each many times; a larger --shuffle_buffer_mb, "
                    "which holds all of them, avoids that"
                )
            labels = labels_for(train_source, f"sampler={config.sampler}")
            order = BalancedOrder(labels)
        train_batches = TrainBatches(
            train_source,
            augment,
            config.seed,
            config.images_per_step,
            create.noise_shapes(model),
            create_mix(config.mixup, config.cutmix, num_classes),
            share,
            order,
            config.repeats,
        )

    # Update; of an evaluation without schedules.
    update = create_update(
        config,
        num_examples if for_training else 0,
        model,
        matched,
        schedule_fn or create_schedule,
    )
    return Parts(
        data=data_set,
        train_batches=train_batches,
        augment=augment,
        train_source=train_source,
        eval_split=eval_split,
        model=model,
        phases=phases,
        update=update,
        num_examples=num_examples,
        total_steps=total_steps,
        share=share,
    )


def create_augmentation(
    config: Config, info: DataSet | DatasetInfo, device_kind: str = "CPU"
) -> Augment:
    """The augmentation of the images of a data set. ConfigError where it does not fit
    them."""
    channels = info.image_shape[-1]
    for name, plain in {
        "color_jitter": [0.0],
        "random_gray": [0.0],
        "policy": ["none", "augmix"],
        "augment": [x for x in choices.AUGMENTS if x != "rand_augment"],
    }.items():
        value = getattr(config, name)
        if channels not in (1, 3) and value not in plain and ":" not in str(value):
            raise ConfigError(
                f"{name}={value} changes colors, and the images have {channels} "
                "channels, not 1 or 3; leave it out"
            )
    try:
        return extend(
            create_augment(
                config.augment,
                info.image_shape,
                info.mean,
                info.std,
                on_gpu=device_kind == "GPU",
                **config.options_of("augment"),
                policy=config.policy,
                **config.options_of("policy"),
            ),
            color_jitter=config.color_jitter,
            random_gray=config.random_gray,
            random_erasing=config.random_erasing,
            cutout_size=config.cutout_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def load_data_set(
    config: Config, dataset_info: DatasetInfo | None = None, *, test_only: bool = False
) -> DataSet:
    """The data set, with the moments of the run that is evaluated, or its own.

    Args:
        dataset_info: of a run whose checkpoint is evaluated.
        test_only: leave the training images out, `train` being None, where the data set
            can do without.

    Raises:
        DataError: it is missing or invalid.
    """
    weights = published_weights(config)
    data_set = data.load(
        config.dataset,
        **config.options_of("dataset"),
        **({"default_size": weights.size} if weights else {}),
        trained=dataset_info if test_only else None,
    )
    return dataset_info.preprocessing_of_run(data_set) if dataset_info else data_set


def create_network(
    config: Config,
    image_shape: tuple[int, int, int],
    num_classes: int,
    device_kind: str = "CPU",
) -> keras.Model:
    """The network for images [n, *image_shape], with its initial parameters. A file
    that is wrong is a ConfigError."""
    return create.create_model(
        config.model,
        image_shape=image_shape,
        num_classes=num_classes,
        **config.options_of("model"),
        weight_decay=config.weight_decay,
        precision=config.precision,
        seed=config.seed,
        device_kind=device_kind,
    )


def match_parameters(
    config: Config, model: keras.Model
) -> tuple[param_rates.Matched, frozenset[str]]:
    """The rates of the parameters of a network, and the names of the frozen ones. A
    pattern that fits no parameter is a ConfigError."""
    names = variable_names(model.trainable_variables)
    frozen = param_rates.match_frozen(config.lists["freeze"], names)
    if config.batch_norm == "frozen":
        frozen |= create.normalization_parameters(model)
    rates = param_rates.match_param_rates(config.lists["param_rates"], names, frozen)
    return rates, frozen


def create_schedule(config: Config, num_examples: int) -> schedules.Schedule:
    """The learning rate over the images trained on; an epoch has `num_examples`."""
    return schedules.create_schedule(
        config.schedule,
        config.learning_rate,
        num_examples=num_examples,
        num_epochs=config.num_epochs,
        warmup_epochs=config.num_warmup_epochs,
        warmup_start_factor=config.warmup_start_factor,
        **config.options_of("schedule"),
    )


def create_update(
    config: Config,
    num_examples: int,
    model: keras.Model,
    matched: param_rates.Matched,
    schedule_fn: Callable[[Config, int], schedules.Schedule] = create_schedule,
) -> Update:
    """The optimizer with its schedules; these only where there are training images.

    Where the optimizer applies the weight decay, the model loses its regularizers.
    """
    optimizer = optimizers.create_optimizer(
        config.optimizer,
        config.lists["optimizer_options"],
        **config.options_of("optimizer"),
    )
    decays, learning_rate_fn, rate_fns = (), schedules.constant(0.0), ()
    if optimizer.takes_decay:
        try:
            decays = losses.pop_weight_decay(model.trainable_variables)
        except ValueError as error:
            raise ConfigError(f"optimizer={config.optimizer}: {error}") from None
        # Scaled to a norm, a larger decay would displace the gradient.
        if not optimizer.needs_norms:
            decays = param_rates.scale_decays(decays, matched)
    if num_examples:
        learning_rate_fn, rate_fns = param_rates.create_rate_fns(
            param_rates.decay_by_layer(matched, config.layer_decay),
            schedule_fn(config, num_examples),
            config.learning_rate,
            num_examples,
            config.images_per_step,
        )
    return Update(
        optimizer=optimizer,
        learning_rate_fn=learning_rate_fn,
        clip_norm=config.clip_norm,
        ema_decay=config.ema_decay,
        decays=decays,
        rate_fns=rate_fns,
    )


def create_periods(config: Config, parts: Parts) -> Periods:
    """The periods of logs, summaries, checkpoints and evaluations."""
    return Periods(
        total_steps=parts.total_steps,
        images_per_step=config.images_per_step,
        log_every_steps=config.log_every_steps,
        summary_every_steps=config.summary_every_steps,
        checkpoint_every_steps=config.checkpoint_every_steps,
        images_per_eval=num_images(config.eval_every_epochs, parts.num_examples),
        images_per_epoch=parts.num_examples,
    )


def last_step_of(config: Config, parts: Parts) -> int:
    """The step with which the run ends, by its length or by max_steps."""
    return min(config.max_steps or parts.total_steps, parts.total_steps)


def configure_devices(
    config: Config, *, device: str = "", for_training: bool = True
) -> Devices:
    """The devices of the towers; `device` overrides the config's. The kernels of an
    evaluation need not repeat bit for bit. ConfigError where the machine does not have
    the devices."""
    if config.deterministic and for_training:
        parallel_devices.enable_determinism()
    return parallel_devices.configure(
        device or config.device,
        config.num_towers,
        config.device_order,
        config.device_memory_mb,
    )


def share_of(config: Config, devices: Devices, workers: Workers) -> Share:
    """The images of every batch that one of several workers computes on its devices.
    More towers than images are a ConfigError."""
    count = max(1, len(devices.towers) // config.devices_per_network)
    num_towers, first = workers.size * count, workers.index * count
    if num_towers > config.batch_size:
        raise ConfigError(
            f"batch_size={config.batch_size} with {num_towers} towers: every tower "
            "needs an image; raise --batch_size or lower --num_towers"
        )
    images = shares(config.batch_size, num_towers)
    before, own = sum(images[:first]), sum(images[first : first + count])
    return Share(before, own, config.batch_size)


def create_trainer(
    config: Config,
    parts: Parts,
    devices: Devices,
    workers: Workers = ALONE,
    feed: Feed | None = None,
    teacher: keras.Model | None = None,
) -> Trainer:
    """Creates a trainer with the config's strategy on the chosen devices; for an
    evaluation, it takes no steps. `feed` replaces the batches of the parts. With
    `teacher`, a trained network, the loss includes distillation. Options that do not
    fit the devices are a ConfigError."""
    share_of(config, devices, workers)  # refuses too many towers
    if config.parameter_device == "gpu" and devices.kind != "GPU":
        raise ConfigError(
            "parameter_device=gpu, but the towers run on the CPU; drop one of the two"
        )
    in_16_bits = config.precision in ("bfloat16", "float16")
    if devices.kind == "GPU" and in_16_bits and not config.deterministic:
        parallel_devices.normalize_in_nhwc(parts.model)
    choice, all_options = config.choice_of("strategy"), config.options_of("strategy")
    create_strategy = factories.resolve("strategy", config.strategy)
    options = factories.named_by(create_strategy, all_options)
    if choice.processes:
        options["workers"] = workers
    if options.get("all_reduce_dtype") == "float32":
        options["all_reduce_dtype"] = ""  # a network in float64 keeps its own
    if not choice.processes and options.get("all_reduce") == "auto":
        options["all_reduce"] = automatic_all_reduce(config, devices)
    strategy = create_strategy(
        Initial.of(parts.model),
        parts.update,
        devices.towers,
        config.batch_size,
        **options,
    )
    batches, class_names = parts.train_batches, parts.data.class_names
    multi_label = parts.data.multi_label
    plain = {"class_weights": None, "pos_weights": None, "logit_adjustment": None}
    plain, by_class = config.options_of("loss") | plain, {}
    for name in ("class_weights", "pos_weights"):
        if batches is not None and (value := getattr(config, name)):
            weights = class_weights(value, batches.source, class_names, name)
            by_class[name] = weights
    if batches is not None and config.logit_adjustment:
        by_class["logit_adjustment"] = logit_offsets(
            config.logit_adjustment, batches.source, len(class_names)
        )
    create_loss = functools.partial(
        losses.create_loss, config.loss, multi_label=multi_label
    )
    loss_fn = create_loss(**plain | by_class)
    if multi_label and (config.linear_probe or teacher is not None):
        name = "linear_probe" if config.linear_probe else "teacher"
        raise ConfigError(
            f"{name}={getattr(config, name)}: it is of one label an image, and these "
            "have several; leave it out"
        )
    if teacher is not None:
        loss_fn = losses.distillation(
            loss_fn, config.distillation_temperature, config.distillation_weight
        )
    compiles, why_not = config.compile == "xla", ""
    if devices.kind == "GPU" and batches is not None and config.compile != "none":
        if config.compile == "auto" and parts.total_steps < XLA_STEPS:
            why_not = f"a run of fewer than {XLA_STEPS:,} steps would not gain by it"
        else:
            why_not = _why_not_xla(config, parts, loss_fn, devices.towers[0], teacher)
        compiles = not why_not
    if why_not and config.compile == "xla":
        raise ConfigError(f"compile=xla: {why_not}; set --compile=none")
    if batches is not None and feed is None:
        lead_devices = devices.towers[:: strategy.num_shards]
        feed = create_feed(config, batches, lead_devices, strategy.sizes)
    trainer_class, options = SynchronousTrainer, {}
    if choice.asynchronous:
        trainer_class = AsynchronousTrainer
        options = {name: all_options[name] for name in choice.trainer_options}
    return assemble_trainer(
        strategy,
        parts.model,
        loss_fn,
        parts.update,
        config.batch_size,
        feed=feed,
        workers=workers,
        accumulate_steps=1 if choice.asynchronous else config.accumulate_steps,
        phases=parts.phases,
        tta=create_tta(config.tta),
        eval_loss_fn=create_loss(**plain),
        compile_towers=compiles,
        not_compiled=why_not,
        sync_batch_norm=config.batch_norm == "sync",
        scale_loss=config.precision == "float16" and not choice.asynchronous,
        skip_not_finite=config.on_nonfinite == "skip",
        scale_rate=config.choice_of("schedule").by_accuracy,
        teacher=teacher,
        keeps_logits=config.choice_of("best_by").is_in_a_file,
        trainer_class=trainer_class,
        **options,
    )


def _why_not_xla(config, parts, loss_fn, device, teacher):
    """Why XLA does not compile the towers of GPUs; empty where it does."""
    if config.choice_of("strategy").sharded or config.batch_norm == "sync":
        return "layers transfer activations between GPUs"
    num_classes = len(parts.data.class_names)
    labels = tf.TensorSpec([], tf.int64)
    if parts.train_batches.mix is not None or parts.data.multi_label:
        labels = tf.TensorSpec([num_classes], tf.float32)
    if teacher is not None:  # whose logits are the third argument
        with_teacher = loss_fn

        def loss_fn(logits, labels):
            return with_teacher(logits, labels, logits)

    return why_not_xla(parts.model, loss_fn, labels, device, config.deterministic)


def automatic_all_reduce(config: Config, devices: Devices) -> str:
    """The algorithm that all_reduce=auto stands for: NCCL where it can be, which is
    between physical GPUs."""
    are_physical = devices.kind == "GPU" and not config.device_memory_mb
    in_full = config.all_reduce_dtype == "float32"
    return "nccl" if are_physical and in_full and len(devices.towers) > 1 else "star"


def create_feed(
    config: Config, batches: TrainBatches, devices: Sequence[str], sizes: Sequence[int]
) -> Feed:
    """The batches of each tower: resident on its (first) device, copied to it ahead
    where that is a GPU, or on the host; `sizes` are the images per tower."""
    per_tower = batches.split(sizes)
    if config.input == "resident":
        if num_bytes(batches.source) is None:
            raise ConfigError(
                f"input=resident with dataset={config.dataset}: its images are read "
                "from files when they are wanted; set --input=stream"
            )
        return Resident(per_tower, devices)
    if "GPU" not in devices[0]:
        # One pipeline for all towers, which is traced once.
        split_fn = functools.partial(split_batch, sizes=sizes)
        stream = functools.partial(batches.stream, split_fn=split_fn)
        return Streams([stream], devices)
    first = per_tower[0]
    if not runs_on(devices[0], first.process, first.stored_stream(0).element_spec):
        return Streams([own.stream for own in per_tower], devices)
    is_asynchronous = config.choice_of("strategy").asynchronous
    if not is_asynchronous and config.input == "auto" and fits_on_gpus(batches.source):
        return Resident(per_tower, devices)
    return Streams(
        [own.stored_stream for own in per_tower],
        devices,
        [own.process for own in per_tower],
    )


def runs_on(
    device: str,
    process: Callable[[tf.Tensor, Batch], Batch],
    elements: Mapping[str, tf.TensorSpec],
) -> bool:
    """True if a device has a kernel for every operation of `process` (see `Streams`) on
    `elements` of its stream, by trying it."""
    zeros = {
        # int32 tensors of a GPU are in host memory.
        k: tf.zeros(x.shape, tf.int64 if x.dtype == tf.int32 else x.dtype)
        for k, x in elements.items()
    }
    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device(device):
            tf.function(process, autograph=False)(tf.constant(0, tf.int64), zeros)
    except tf.errors.InvalidArgumentError:
        return False
    finally:
        tf.config.set_soft_device_placement(before)
    return True


def fits_on_gpus(source: Source) -> bool:
    """True if `input=auto` keeps the images on GPUs."""
    size = num_bytes(source)
    return size is not None and size <= MOST_RESIDENT_BYTES


def create_eval_feed(batches: EvalBatches, trainer: Trainer) -> Feed:
    """The batches of an evaluation of each tower: resident on GPUs where the images
    fit, else from the host."""
    devices = trainer.devices[:: trainer.strategy.num_shards]
    per_tower = batches.split(len(devices))
    devices = devices[: len(per_tower)]
    if "GPU" in devices[0] and fits_on_gpus(batches.source):
        return Resident(per_tower, devices)
    datasets = [own.stream() for own in per_tower]
    return Streams([lambda _, x=x: x for x in datasets], devices)
