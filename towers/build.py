"""From a Config to its parts, which take plain arguments and know no Config."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import data, models
from towers.config import FIELDS, Config
from towers.data.augment import AUGMENTS, Augment
from towers.data.batches import TrainBatches, evaluation_stream, hold_out
from towers.data.distortions import extend
from towers.data.mixing import create_mix
from towers.data.resident import ResidentBatches
from towers.data.sources import DataSet, Source, Subset, num_bytes
from towers.data.tta import VIEWS
from towers.errors import ConfigError, data_errors_of_tensorflow
from towers.optim import losses
from towers.optim.create import create_phases, create_update
from towers.optim.phases import Phase
from towers.optim.update import Update
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.devices import Devices
from towers.parallel.model_parallel import ModelParallel
from towers.parallel.replicated import Replicated
from towers.parallel.synchronous import SynchronousTrainer
from towers.parallel.towers import Towers
from towers.parallel.trainer import Trainer

_STRATEGIES = {
    "towers": Towers,
    "async_towers": Towers,
    "replicated": Replicated,
    "model_parallel": ModelParallel,
}
# Of images on a GPU that are not asked for by name; CIFAR-10 has 154 MB.
MOST_RESIDENT_BYTES = 2**30

# That layers with a state from the data look at, as in the public speedruns.
NUM_ADAPT_IMAGES = 5000


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of, beside its devices.

    Attributes:
        data: the data set as it was found.
        train_batches: step -> batch.
        augment: what the images go through.
        validation: what the evaluations during training use: "validation" where a part
            of the training set is held out, else "test"; with its source.
        model: the network, with its initial parameters.
        phases: parts of the run whose steps are not alike, if there are any.
        update: from the mean gradient to the next parameters.
        num_examples: training images of an epoch.
        total_steps: steps until `num_epochs` is reached.
    """

    data: DataSet
    train_batches: TrainBatches
    augment: Augment
    validation: tuple[str, Source]
    model: keras.Model
    phases: tuple[Phase, ...]
    update: Update
    num_examples: int
    total_steps: int

    def evaluation_stream(self, source: Source, batch_size: int) -> tf.data.Dataset:
        """Every example of a source once, as the network sees it in an evaluation."""
        return evaluation_stream(source, self.augment, batch_size)


def build(config: Config, *, trains: bool = True) -> Parts:
    """Loads the data and builds the network and its update.

    Args:
        config: what the run is.
        trains: whether it is trained. An evaluation has no phases, and finds in its
            checkpoint what layers take from the data.

    Raises:
        DataError: the data set is not there or not what it should be.
        ConfigError: the options do not fit the data set.
    """
    found = data.load(
        config.dataset,
        config.data_dir,
        image_size=config.image_size,
        image_cache_mb=config.image_cache_mb,
    )
    train_source, validation = found.train, ("test", found.test)
    try:
        augment = extend(
            AUGMENTS[config.augment](
                found.train.image_shape, found.mean, found.deviation
            ),
            color_jitter=config.color_jitter,
            random_erasing=config.random_erasing,
            cutout_size=config.cutout_size,
        )
        if config.validation_fraction:
            train_source, held_out = hold_out(
                found.train, config.validation_fraction, config.seed
            )
            validation = ("validation", held_out)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    def model_for(height: int, width: int) -> keras.Model:
        return models.create_model(
            config.model,
            image_shape=(height, width, augment.image_shape[-1]),
            num_classes=len(found.class_names),
            width=config.width,
            weight_decay=config.weight_decay,
            precision=config.precision,
            seed=config.seed,
        )

    model = model_for(*augment.image_shape[:2])
    num_examples = train_source.num_examples
    images = config.num_epochs * num_examples
    total_steps = max(1, int(-(-images // config.images_per_step)))
    phases = ()
    if trains:
        models.adapt(model, lambda: _some_images(train_source, augment))
        phases = create_phases(
            config, num_examples, total_steps, model, lambda size: model_for(size, size)
        )
    return Parts(
        data=found,
        train_batches=TrainBatches(
            train_source,
            augment,
            config.seed,
            config.images_per_step,
            models.noise_shapes(model),
            create_mix(config.mixup, config.cutmix, len(found.class_names)),
        ),
        augment=augment,
        validation=validation,
        model=model,
        phases=phases,
        update=create_update(config, num_examples, model),
        num_examples=num_examples,
        total_steps=total_steps,
    )


def _some_images(source: Source, augment: Augment) -> np.ndarray:
    """Training images as the network sees them in an evaluation, from all over."""
    count = min(source.num_examples, NUM_ADAPT_IMAGES)
    places = np.linspace(0, source.num_examples - 1, count).astype(np.int64)
    with data_errors_of_tensorflow():
        batches = evaluation_stream(Subset(source, places), augment, batch_size=50)
        images = [x["images"][x["weights"] > 0] for x in batches.as_numpy_iterator()]
    return np.concatenate(images)


def create_trainer(config: Config, parts: Parts, devices: Devices) -> Trainer:
    """The trainer with the strategy of the config on the chosen devices.

    The strategy's constructor takes its options by the names of Config.

    Raises:
        ConfigError: there are more towers than images in a batch.
    """
    num_towers = len(devices.towers)
    if num_towers > config.batch_size:
        raise ConfigError(
            f"batch_size={config.batch_size} with {num_towers} towers: every tower "
            "needs an image; raise --batch_size or lower --num_towers"
        )
    if config.parameter_device == "gpu" and devices.kind != "GPU":
        raise ConfigError(
            "parameter_device=gpu, but the towers run on the CPU; drop one of the two"
        )
    create, options = _STRATEGIES[config.strategy], {}
    if config.strategy == "async_towers":
        create_trainer = AsynchronousTrainer
        options |= options_of(AsynchronousTrainer, config)
    else:
        create_trainer = SynchronousTrainer
        options |= {
            "accumulate_steps": config.accumulate_steps,
            "sync_batch_norm": config.batch_norm == "sync",
            "scale_loss": config.precision == "float16",
            "resident": resident(config, parts.train_batches, devices),
        }
    return create_trainer(
        create,
        parts.model,
        loss_fn=functools.partial(
            losses.cross_entropy, label_smoothing=config.label_smoothing
        ),
        update_fn=parts.update,
        stream=parts.train_batches.stream,
        batch_size=config.batch_size,
        devices=devices.towers,
        phases=parts.phases,
        tta=VIEWS[config.views],
        compile_towers=config.compile == "xla",
        **options,
        **options_of(create, config),
    )


def resident(
    config: Config, batches: TrainBatches, devices: Devices
) -> ResidentBatches | None:
    """The batches that the first tower's device makes by itself, or None for a stream.

    Raises:
        ConfigError: that was asked for, but the images do not lie in memory.
    """
    if config.input == "stream" or (config.input == "auto" and devices.kind != "GPU"):
        return None
    size = num_bytes(batches.source)
    if config.input == "auto" and (size is None or size > MOST_RESIDENT_BYTES):
        return None
    if size is None:
        raise ConfigError(
            f"input=resident with dataset={config.dataset}: its images are read from "
            "files when they are wanted; set --input=stream"
        )
    return ResidentBatches(batches, devices.towers[0])


def options_of(constructor: Callable, config: Config) -> dict[str, Any]:
    """The keyword-only arguments of a constructor that are fields of Config."""
    parameters = inspect.signature(constructor).parameters.values()
    return {
        p.name: getattr(config, p.name)
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name in FIELDS
    }
