"""From a Config to its parts, which take plain arguments and know no Config."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import keras

from towers import models
from towers.build.images import (
    create_augmentation,
    load_data_set,
    split_for_evaluation,
)
from towers.build.pieces import create_network, create_update, match_parameters
from towers.config import Config, choices, factories
from towers.config.config import options_read_by
from towers.config.list_options import parse_early_sizes
from towers.data.augment import Augment
from towers.data.batches import EvalBatches, TrainBatches, some_images
from towers.data.mixing import create_mix
from towers.data.part import Part, shares
from towers.data.resident import Resident
from towers.data.sources import DataSet, Source, num_bytes
from towers.data.tta import create_tta
from towers.errors import ConfigError
from towers.optim import losses, param_rates
from towers.optim.epochs import num_images
from towers.optim.phases import Phase, create_phases
from towers.optim.update import Update
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.copies import Initial
from towers.parallel.devices import Devices
from towers.parallel.feed import Feed, Streams, runs_on
from towers.parallel.trainer import SynchronousTrainer, Task, Trainer
from towers.parallel.workers import ALONE, Workers
from towers.run import sizes
from towers.run.dataset_info import DatasetInfo

# Most bytes of images that input=auto puts on a GPU; CIFAR-10 has 154 MB.
MOST_RESIDENT_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run, besides its devices.

    Attributes:
        data: the data set.
        train_batches: step -> batch; None for an evaluation.
        augment: the augmentation of the images.
        eval_split: name and source of the images that evaluations during training use:
            "validation" where a part of the training set is held out, else "test".
        model: the network, with its initial parameters.
        phases: parts of the run whose steps are not alike, if there are any.
        update: from the mean gradient to the next parameters.
        num_examples: training images of an epoch; 0 where they were not loaded.
        total_steps: steps until `num_epochs` is reached; 0 likewise.
        part: which images of every batch this process computes.
    """

    data: DataSet
    train_batches: TrainBatches | None
    augment: Augment
    eval_split: tuple[str, Source]
    model: keras.Model
    phases: tuple[Phase, ...]
    update: Update
    num_examples: int
    total_steps: int
    part: Part


def build(
    config: Config,
    *,
    for_training: bool = True,
    part: Part | None = None,
    dataset_info: DatasetInfo | None = None,
    test_only: bool = False,
) -> Parts:
    """Loads the data and builds the network and its update.

    Args:
        config: of the run.
        for_training: False for an evaluation, which has no phases, and whose checkpoint
            holds the state that layers take from the data.
        part: of several workers that of this one, see `part_of`.
        dataset_info: of a run whose checkpoint is evaluated; its preprocessing is used.
        test_only: whether the evaluation can do without the training images, see
            `load_data_set`.

    Raises:
        DataError: the data set is missing or invalid.
        ConfigError: the options do not fit the data set.
    """
    data_set = load_data_set(config, dataset_info, test_only=test_only)
    augment = create_augmentation(config, data_set)
    train_source, eval_split = split_for_evaluation(config, data_set)
    part = part or Part.all_of(config.batch_size)
    # An evaluation takes its batches from the test images.
    images_per_step = config.images_per_step if for_training else config.batch_size
    images_per_step = images_per_step * part.size // part.whole
    sizes.check_batch(config, images_per_step, augment.image_shape)

    def create_model(height: int, width: int) -> keras.Model:
        shape = (height, width, augment.image_shape[-1])
        return create_network(config, shape, len(data_set.class_names), for_training)

    model = create_model(*augment.image_shape[:2])
    num_examples = total_steps = 0
    if train_source is not None:
        num_examples = train_source.num_examples
        total_steps = num_steps(config, num_examples)
    matched, frozen = match_parameters(config, model)
    models.freeze_normalization(model, frozen)

    def create_smaller_model(size: int) -> keras.Model:
        smaller = create_model(size, size)
        models.freeze_normalization(smaller, frozen)
        return smaller

    phases, train_batches = (), None
    if for_training:
        models.adapt(model, lambda: some_images(train_source, augment))
        phases = create_phases(
            model,
            total_steps=total_steps,
            early_sizes=parse_early_sizes(config.early_sizes),
            freezing_steps=param_rates.freezing_steps(
                matched, num_examples, config.images_per_step
            ),
            create_model=create_smaller_model,
        )
        train_batches = TrainBatches(
            train_source,
            augment,
            config.seed,
            config.images_per_step,
            models.noise_shapes(model),
            create_mix(config.mixup, config.cutmix, len(data_set.class_names)),
            part,
        )
    # Removes the regularizers of the model where the optimizer applies weight decay.
    update = create_update(config, num_examples if for_training else 0, model, matched)
    return Parts(
        data=data_set,
        train_batches=train_batches,
        augment=augment,
        eval_split=eval_split,
        model=model,
        phases=phases,
        update=update,
        num_examples=num_examples,
        total_steps=total_steps,
        part=part,
    )


def num_steps(config: Config, num_examples: int) -> int:
    """Steps of a run on so many training images, at least one.

    Raises:
        ConfigError: there are too many.
    """
    images = num_images(config.num_epochs, num_examples)
    if images >= 2**63 * config.images_per_step:  # which a step's number cannot reach
        raise ConfigError(f"num_epochs={config.num_epochs:g}: too many; lower it")
    return max(1, math.ceil(images / config.images_per_step))


def part_of(config: Config, devices: Devices, workers: Workers) -> Part:
    """The images of every batch that a worker computes, each on so many devices.

    Raises:
        ConfigError: there are more towers than images in a batch.
    """
    count = len(devices.towers)
    num_towers, first = workers.size * count, workers.index * count
    if num_towers > config.batch_size:
        raise ConfigError(
            f"batch_size={config.batch_size} with {num_towers} towers: every tower "
            "needs an image; raise --batch_size or lower --num_towers"
        )
    sizes = shares(config.batch_size, num_towers)
    own = sizes[first : first + count]
    return Part(sum(sizes[:first]), sum(own), config.batch_size)


def create_trainer(
    config: Config, parts: Parts, devices: Devices, workers: Workers = ALONE
) -> Trainer:
    """The trainer with the strategy of the config on the chosen devices; that of the
    parts of an evaluation takes no steps.

    Raises:
        ConfigError: options do not fit the devices.
    """
    part_of(config, devices, workers)  # refuses too many towers
    if config.parameter_device == "gpu" and devices.kind != "GPU":
        raise ConfigError(
            "parameter_device=gpu, but the towers run on the CPU; drop one of the two"
        )
    is_asynchronous = "asynchronous" in choices.find("strategy", config.strategy).traits
    create_strategy = factories.resolve("strategy", config.strategy)
    options = options_read_by(config, "strategy")
    strategy_options = factories.named_by(create_strategy, options)
    if "processes" in choices.find("strategy", config.strategy).traits:
        strategy_options["workers"] = workers
    elif strategy_options.get("all_reduce") == "auto":
        strategy_options["all_reduce"] = automatic_all_reduce(config, devices)
    strategy = create_strategy(
        Initial.of(parts.model),
        parts.update,
        devices.towers,
        config.batch_size,
        **strategy_options,
    )
    task = Task(
        model=parts.model,
        loss_fn=functools.partial(
            losses.cross_entropy, label_smoothing=config.label_smoothing
        ),
        update_fn=parts.update,
        micro_batch_size=config.batch_size,
        accumulate_steps=1 if is_asynchronous else config.accumulate_steps,
        phases=parts.phases,
        tta=create_tta(config.tta),
        compile_towers=config.compile == "xla",
        sync_batch_norm=config.batch_norm == "sync",
        scale_loss=config.precision == "float16" and not is_asynchronous,
        skip_not_finite=config.on_nonfinite == "skip",
    )
    feed = None
    if parts.train_batches is not None:
        lead_devices = devices.towers[:: strategy.num_shards]
        feed = create_feed(config, parts.train_batches, lead_devices, strategy.sizes)
    if is_asynchronous:
        return AsynchronousTrainer(
            task,
            strategy,
            feed,
            workers,
            async_scale_gradients=config.async_scale_gradients,
            max_staleness=config.max_staleness,
        )
    return SynchronousTrainer(task, strategy, feed, workers)


def automatic_all_reduce(config: Config, devices: Devices) -> str:
    """The algorithm that all_reduce=auto stands for: NCCL where it can be, which is
    between physical GPUs."""
    physical = devices.kind == "GPU" and not config.device_memory_mb
    sends = config.all_reduce_dtype == "float32"
    return "nccl" if physical and sends and len(devices.towers) > 1 else "star"


def create_feed(
    config: Config, batches: TrainBatches, devices: Sequence[str], sizes: Sequence[int]
) -> Feed:
    """Per tower its batches: resident on its device, copied to it ahead where that is a
    GPU, or those of the host.

    Args:
        config: of the run.
        batches: of all towers of this process.
        devices: the first one of each tower.
        sizes: images per tower.

    Raises:
        ConfigError: input=resident, but the images are not in memory.
    """
    of_towers, on_gpus = batches.split(sizes), "GPU" in devices[0]
    size = num_bytes(batches.source)
    if config.input == "resident" and size is None:
        raise ConfigError(
            f"input=resident with dataset={config.dataset}: its images are read "
            "from files when they are wanted; set --input=stream"
        )
    fits = size is not None and size <= MOST_RESIDENT_BYTES
    if config.input == "resident":
        return Resident(of_towers, devices)
    if not on_gpus or not runs_on(
        devices[0], of_towers[0].process, of_towers[0].stored_stream(0).element_spec
    ):
        return Streams([own.stream for own in of_towers], devices)
    if config.input == "auto" and fits:
        return Resident(of_towers, devices)
    return Streams(
        [own.stored_stream for own in of_towers],
        devices,
        [own.process for own in of_towers],
    )


def create_eval_feed(batches: EvalBatches, trainer: Trainer) -> Feed:
    """Per tower its part of the batches of an evaluation: resident on GPUs where the
    images fit, else from the host."""
    devices = trainer.devices[:: trainer.strategy.num_shards]
    of_towers, size = batches.split(len(devices)), num_bytes(batches.source)
    devices = devices[: len(of_towers)]
    if "GPU" in devices[0] and size is not None and size <= MOST_RESIDENT_BYTES:
        return Resident(of_towers, devices)
    datasets = [own.stream() for own in of_towers]
    return Streams([lambda _, x=x: x for x in datasets], devices)
