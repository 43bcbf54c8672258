"""Data set, network, optimizer and schedule that a Config describes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from towers import console, data
from towers.build.periods import Periods
from towers.config import Config, choices, non_defaults
from towers.config.pretrained import published_weights
from towers.data.augment.augmentation import Augment, create_augment
from towers.data.augment.distortions import extend
from towers.data.augment.mixing import create_mix
from towers.data.batches import TrainBatches, hold_out, some_images
from towers.data.classes import labels_for
from towers.data.orders import BalancedOrder, BlockOrder, block_order
from towers.data.pixel_format import PixelFormat
from towers.data.sets import arrays
from towers.data.share import Share
from towers.data.sources import DataSet, Source
from towers.data.unknown import separated
from towers.errors import ConfigError
from towers.models import create
from towers.models.keras import given
from towers.models.variables import variable_names
from towers.optim import losses, optimizers, schedules
from towers.optim.phases import Phase, create_phases
from towers.optim.schedules import num_images
from towers.optim.update import RateFn, Update
from towers.pretrained.standardization import standardize
from towers.run.dataset_info import DatasetInfo

# Options that freeze parameters.
_FREEZING = ("freeze", "batch_norm", "param_rates")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run, besides its devices and its trainer."""

    data: DataSet
    train_batches: TrainBatches  # step -> batch; None for an evaluation
    augment: Augment
    train_source: Source | None  # the images to train on, if they were loaded
    eval_split: tuple[str, Source]  # "validation", or "test" without held-out images
    model: keras.Model  # with its initial parameters
    phases: tuple[Phase, ...]  # empty if all steps are alike
    update: Update  # from the mean gradient to the next parameters
    unknown: dict[str, Source]  # "validation" or "test" -> its images of no class
    num_examples: int  # training images of an epoch; 0 if they were not loaded
    total_steps: int  # until `num_epochs` is reached; 0 without training images
    last_step: int  # the end of the run, by its length or by max_steps
    periods: Periods  # of logs, summaries, checkpoints and evaluations
    share: Share  # the images of every batch that this process computes


def with_given(
    config: Config, model: Any, data: Any, class_names: Sequence[str | int]
) -> tuple[Config, str]:
    """Return the config of objects passed to `train`, and the network in JSON."""
    architecture = ""
    if model is not None:
        name, architecture = given.give(model)
        config = dataclasses.replace(config, model=name)
    if data is not None:
        config = dataclasses.replace(config, dataset=arrays.give(data, class_names))
    return config, architecture


def build(
    config: Config,
    *,
    device_kind: str = "CPU",
    for_training: bool = True,
    share: Share | None = None,
    dataset_info: DatasetInfo | None = None,
    test_only: bool = False,
    continued: DatasetInfo | None = None,
    schedule_fn: Callable[[int], schedules.Schedule] | None = None,
) -> Parts:
    """Load the data, and build the network and its update; or raise a TowersError.

    An evaluation has no phases and no schedules, and the moments of `dataset_info`;
    with `test_only` it loads no training images if possible. `continued` describes the
    data in the checkpoint from which a training continues. `schedule_fn`, training
    images of an epoch -> learning rate, takes the place of the config's schedule.
    """
    # Images.
    pixels = None if continued is None else continued.pixels
    data_set = load_data_set(config, dataset_info, test_only=test_only, pixels=pixels)
    train_source, eval_split, unknown = split_images(config, data_set)
    augment = create_augmentation(config, data_set, device_kind)
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
        everywhere = config.batch_norm == "frozen"
        create.freeze_normalization(model, frozen, everywhere)
        return model

    model = create_model_for(*image_size)
    if dataset_info is None:
        standardized = standardize(config, data_set, model, continued)
        if standardized is not data_set:
            data_set = standardized
            augment = create_augmentation(config, data_set, device_kind)
    matched, _ = match_parameters(config, model)

    # Phases, training batches, update.
    phases: tuple[Phase, ...] = ()
    train_batches: Any = None
    if for_training and train_source is not None:
        source = train_source
        validate_trained(config, matched)
        create.adapt(model, lambda: some_images(source, augment))
        freezing_steps = schedules.freezing_steps(
            matched, num_examples, config.images_per_step
        )
        phases = create_phases(
            model,
            total_steps=total_steps,
            early_sizes=config.lists["early_sizes"],
            freezing_steps=freezing_steps,
            create_model=create_model_for,
        )
        train_batches = TrainBatches(
            source,
            augment,
            config.seed,
            config.images_per_step,
            create.noise_shapes(model),
            create_mix(config.mixup, config.cutmix, num_classes),
            share,
            create_order(config, source),
            config.repeats,
        )
    schedule = None
    if train_batches is not None:
        create_fn = schedule_fn or functools.partial(create_schedule, config)
        schedule = create_fn(num_examples)
    update = create_update(config, model, matched, schedule, num_examples)
    periods = Periods(
        total_steps=total_steps,
        images_per_step=config.images_per_step,
        log_every_steps=config.log_every_steps or min(100, max(1, total_steps // 50)),
        summary_every_steps=config.summary_every_steps,
        checkpoint_every_steps=config.checkpoint_every_steps,
        images_per_eval=num_images(config.eval_every_epochs, num_examples),
        images_per_epoch=num_examples,
    )
    return Parts(
        data=data_set,
        train_batches=train_batches,
        augment=augment,
        train_source=train_source,
        eval_split=eval_split,
        unknown=unknown,
        model=model,
        phases=phases,
        update=update,
        num_examples=num_examples,
        total_steps=total_steps,
        last_step=min(config.max_steps or total_steps, total_steps),
        periods=periods,
        share=share,
    )


def split_images(
    config: Config, data_set: DataSet
) -> tuple[Source | None, tuple[str, Source], dict[str, Source]]:
    """Return the images to train on, and the name and images of the evaluations.

    Last are the held-out images of no class by split.
    """
    unknown = dict(data_set.unknown or {})
    if data_set.validation is not None:
        for name in ("validation_fraction", "validation_fold"):
            if value := getattr(config, name):
                why = "the data set has images for validation; leave the option out"
                raise ConfigError(f"{name}={value}: {why}")
        return data_set.train, ("validation", data_set.validation), unknown
    if config.holds_out and data_set.train is not None:
        train_source, held_out = hold_out(
            data_set.train, config.validation_fraction, config.fold_of_images
        )
        if data_set.unknown is not None:
            held_out, unknown["validation"] = separated(
                data_set.train, held_out.indices, len(data_set.class_names)
            )
        return train_source, ("validation", held_out), unknown
    return data_set.train, ("test", data_set.test), unknown


def create_order(config: Config, source: Source) -> BlockOrder | BalancedOrder | None:
    """Return the order of an epoch; None for a shuffle of all images."""
    order = block_order(source, config.shuffle_buffer_mb)
    if config.sampler == "shuffle":
        return order
    if order is not None:
        console.warn(
            f"sampler={config.sampler} reads row groups and other blocks in random "
            "order, each many times; a larger --shuffle_buffer_mb, which holds all of "
            "them, avoids that"
        )
    return BalancedOrder(labels_for(source, f"sampler={config.sampler}"))


def create_augmentation(
    config: Config, info: DataSet | DatasetInfo, device_kind: str = "CPU"
) -> Augment:
    """Return the augmentation of a data set; ConfigError if it does not fit."""
    channels, pixels = info.image_shape[-1], info.pixels
    why = "" if channels in (1, 3) else f"{channels} channels, not 1 or 3"
    plain: dict[str, list[Any]] = {
        "color_jitter": [0.0],
        "random_gray": [0.0],
        "policy": ["none", "augmix"],
        "augment": [x for x in choices.AUGMENTS if x != "rand_augment"],
    }
    if not pixels.is_photo:
        why = why or f"pixels of {pixels}, not 8-bit colors"
        plain["policy"] = ["none"]  # the others compute with whole values of 0..255
    changing = {}
    for name, values in plain.items():
        value = getattr(config, name)
        is_in_a_file = ":" in str(value) and (name == "augment" or pixels.is_photo)
        if why and value not in values and not is_in_a_file:
            changing[name] = values[0]
    if changing:
        given = ", ".join(f"{name}={getattr(config, name)}" for name in changing)
        way = " ".join(f"--{name}={value}" for name, value in changing.items())
        why = f"for changes of colors, and the images have {why}; leave it out: {way}"
        raise ConfigError(f"{given} is {why}")
    try:
        augment = extend(
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
    return augment if pixels.is_photo else augment.with_scale(pixels.scale)


def load_data_set(
    config: Config,
    dataset_info: DatasetInfo | None = None,
    *,
    test_only: bool = False,
    pixels: PixelFormat | None = None,
) -> DataSet:
    """Return the data set, with the moments of the run that is evaluated, or its own.

    `pixels` is the format of the run that is continued.
    With `test_only` it has no training images if it can do without them. A data set
    that is missing or invalid is a DataError.
    """
    options = config.options_of("dataset")
    if weights := published_weights(config.model, config.init_from):
        options["default_size"] = weights.size
    options["pixels"] = dataset_info.pixels if dataset_info else pixels
    options["unknown_class"] = config.unknown_class
    trained: Any = dataset_info if test_only else None
    data_set = data.load(config.dataset, **options, trained=trained)
    return dataset_info.preprocessing_of_run(data_set) if dataset_info else data_set


def create_network(
    config: Config,
    image_shape: tuple[int, int, int],
    num_classes: int,
    device_kind: str = "CPU",
) -> keras.Model:
    """Return a new network for images [n, *image_shape]; ConfigError of a file."""
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
) -> tuple[schedules.Matched, frozenset[str]]:
    """Return the rates of the parameters, and the names of the frozen ones."""
    names = variable_names(model.trainable_variables)
    frozen = schedules.match_frozen(config.lists["freeze"], names)
    if config.batch_norm == "frozen":
        frozen |= create.normalization_parameters(model)
    rates = schedules.match_param_rates(config.lists["param_rates"], names, frozen)
    return rates, frozen


def validate_trained(config: Config, matched: schedules.Matched) -> None:
    """Raise ConfigError if options together freeze all parameters."""
    if matched and all(rate and rate.factor == 0 for rate in matched.values()):
        names = [name for name in _FREEZING if name in non_defaults(config)]
        given_options = [f"{name}={getattr(config, name)}" for name in names]
        raise ConfigError(
            f"{' with '.join(given_options)} leaves no parameter to train; freeze fewer"
        )


def create_schedule(config: Config, num_examples: int) -> schedules.Schedule:
    """Return the learning rate by the number of images; an epoch has `num_examples`."""
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
    model: keras.Model,
    matched: schedules.Matched,
    schedule: schedules.Schedule | None,
    num_examples: int,
) -> Update:
    """Return the optimizer with its rates; without a schedule the rate is 0.

    The model loses the regularizers that the optimizer applies itself.
    """
    optimizer = optimizers.create_optimizer(
        config.optimizer,
        config.lists["optimizer_options"],
        **config.options_of("optimizer"),
    )
    decays: tuple[float, ...] = ()
    rate_fns: tuple[RateFn, ...] = ()
    learning_rate_fn = schedules.constant(0.0)
    if optimizer.takes_decay:
        try:
            decays = losses.pop_weight_decay(model.trainable_variables)
        except ValueError as error:
            raise ConfigError(f"optimizer={config.optimizer}: {error}") from None
        # Scaled to a norm, a larger decay would displace the gradient.
        if not optimizer.needs_norms:
            decays = schedules.scale_decays(decays, matched)
    if schedule is not None:
        learning_rate_fn, rate_fns = schedules.create_rate_fns(
            schedules.decay_by_layer(
                matched, config.layer_decay, create.head_layers(model)
            ),
            schedule,
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
