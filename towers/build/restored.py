"""Trained networks: a run without its data set, and its evaluation on a data set."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers import console
from towers.build import assembly, builder
from towers.config import Config, parse_json
from towers.data.augment.augmentation import Augment
from towers.data.batches import EvalBatches
from towers.data.pixel_format import PixelFormat
from towers.data.sources import Source
from towers.data.unknown import UNKNOWN
from towers.errors import CheckpointError, ConfigError, data_errors_of_tensorflow
from towers.messages import one_line, program
from towers.metrics.metrics import read_thresholds
from towers.metrics.predictions import sigmoid, to_probabilities
from towers.models.create import without_noise
from towers.models.keras import given
from towers.parallel import devices
from towers.parallel.copies import Weights
from towers.run.checkpoint import Checkpoint
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.restore import checkpointer_of, restore_fitting, validate_architecture
from towers.run.stored_config import stored_config


@dataclasses.dataclass(frozen=True)
class RestoredRun:
    """A trained network, and what is needed to use it.

    Attributes:
        path: the run's folder.
        step: of the checkpoint.
        config: of the run.
        dataset_info: classes and preprocessing of its data set.
        tensors: of the checkpoint, name -> array.
        temperature: divides the logits before they become probabilities.
        reject_below: images whose largest probability is lower are of no class; 0 for
            none, see `towers.reject`.
    """

    path: pathlib.Path
    step: int
    config: Config
    dataset_info: DatasetInfo
    tensors: Mapping[str, np.ndarray] = dataclasses.field(repr=False, compare=False)
    temperature: float = 1.0
    reject_below: float = 0.0

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in the order of the logits."""
        return self.dataset_info.class_names

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width, channels of the images that `preprocess` takes."""
        return self.dataset_info.image_shape

    @property
    def pixels(self) -> PixelFormat:
        """The dtype of images, and the range of values that becomes 0..255."""
        return self.dataset_info.pixels

    @property
    def dtype(self) -> str:
        """The dtype of images in exports: "uint8", or "float32" of any others."""
        return "uint8" if self.pixels.dtype == "uint8" else "float32"

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width, channels of the input of the network."""
        return self._augment.image_shape

    @property
    def input_box(self) -> tuple[int, ...]:
        """Top, left, height, width of `image_shape` that the network's input shows."""
        size = self.input_shape[:2]
        begins = [(x - y) // 2 for x, y in zip(self.image_shape, size, strict=False)]
        return *begins, *size

    @functools.cached_property
    def model(self) -> keras.Model:
        """The network with the raw parameters, built when it is first used.

        It maps preprocessed images `[n, *input_shape]` to logits `[n, classes]`.

        Raises:
            ConfigError: the network is in a file that is missing.
            CheckpointError: the checkpoint is of another network.
        """
        return without_noise(self.network())

    @functools.cached_property
    def model_ema(self) -> keras.Model | None:
        """The network with the EMA weights; None if the run keeps none."""
        is_kept = self.config.ema_decay > 0
        return without_noise(self.network(Weights.EMA)) if is_kept else None

    def network(self, weights: Weights = Weights.RAW) -> keras.Model:
        """Return a new network in training mode, with inputs of noise."""
        if self.config.choice_of("model").is_given:
            given.give_stored(self.config.model, RunFolder(self.path).network)
        # GPUs that are not used are hidden.
        device_kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
        shape, num_classes = self.input_shape, len(self.class_names)
        model = builder.create_network(self.config, shape, num_classes, device_kind)
        variables = {f"params/{v.path}": v for v in model.trainable_variables}
        variables |= {f"state/{v.path}": v for v in model.non_trainable_variables}
        kinds = ("params/", "state/")
        saved = {k: v for k, v in self.tensors.items() if k.startswith(kinds)}
        validate_architecture(variables, saved)
        for name, variable in variables.items():
            # Integers of the state have no average.
            averaged = f"averages/{variable.path}"
            is_ema = weights is Weights.EMA and averaged in self.tensors
            variable.assign(self.tensors[averaged if is_ema else name])
        return model

    def preprocess(self, images: np.ndarray | tf.Tensor) -> tf.Tensor:
        """Return the inputs of the network, float32 `[n, *input_shape]`.

        Args:
            images: `[n, *image_shape]` of the dtype of `pixels`, or float32 of the same
                values in place of uint16; also in a graph of TensorFlow.
        """
        images, shape = tf.convert_to_tensor(images), self.image_shape
        if images.dtype.name not in (self.pixels.dtype, self.dtype):
            expected = " or ".join(dict.fromkeys((self.pixels.dtype, self.dtype)))
            raise ValueError(f"images must be {expected}, got {images.dtype.name}")
        if not images.shape.is_compatible_with([None, *shape]):
            sizes = ", ".join(map(str, shape))
            raise ValueError(f"images must be [n, {sizes}], got {images.shape}")
        inputs = self._augment.evaluate(images)
        return tf.ensure_shape(inputs, [None, *self.input_shape])

    @functools.cached_property
    def thresholds(self) -> np.ndarray | None:
        """The thresholds of label sets, float64 [classes], else None."""
        if not self.dataset_info.multi_label:
            return None
        chosen = read_thresholds(RunFolder(self.path).thresholds, self.class_names)
        if chosen is None:
            return np.full(len(self.class_names), 0.5)
        with np.errstate(divide="ignore"):  # at the same logits
            return sigmoid(np.log(chosen / (1 - chosen)) / self.temperature)

    def to_probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return probabilities, float64 [n, classes], of logits [n, classes]."""
        logits = logits.astype(np.float64) / self.temperature
        return to_probabilities(logits, self.dataset_info.multi_label)

    def answers(self, probabilities: np.ndarray) -> list[str]:
        """Return the most probable class of each image, or UNKNOWN, by [n, classes]."""
        names, classes = (*self.class_names, UNKNOWN), probabilities.argmax(1)
        if self.reject_below:
            is_answered = probabilities.max(1) >= self.reject_below  # not NaN
            classes = np.where(is_answered, classes, -1)
        return [names[x] for x in classes]

    @functools.cached_property
    def _augment(self) -> Augment:
        return builder.create_augmentation(self.config, self.dataset_info)


def load_run(workdir: str | os.PathLike, *, step: int | str = "best") -> RestoredRun:
    """Load the trained network of a run; needs no data set and no recipe.

    If TensorFlow has no devices in this process yet, it gets the first GPU, or none
    while a training of the run holds the GPUs.

    Args:
        workdir: the run's folder.
        step: of the checkpoint; "best" for the best evaluation on held-out images, see
            `Config.best_by`, or the last step of a run without them; "last" for the
            newest valid one.

    Returns:
        `model` and `model_ema`, Keras models with the raw parameters and their moving
        averages from preprocessed images to logits; `preprocess`, from images to their
        input; `class_names`, in the order of the logits; `config`, `step`.

    Raises:
        TowersError: such as a CheckpointError if no checkpoint is valid, or a
            ConfigError if the run's network is in a file that is missing.
    """
    with contextlib.suppress(ConfigError):  # devices that were made before stay
        devices.configure(_free_device("auto", RunFolder(workdir), console.line), 1)
    return read_run(workdir, step=step)


def evaluation_devices(
    config: Config, folder: RunFolder, log: Callable[[str], None] = console.line
) -> devices.Devices:
    """Return the devices of an evaluation, or raise a ConfigError."""
    device = _free_device(config.device, folder, log)
    chosen = assembly.configure_devices(config, device=device, for_training=False)
    for remark in chosen.remarks:
        log(remark)
    return chosen


def _free_device(device, folder, log):
    """Return cpu for device=auto while a training of the run holds the GPUs."""
    holder = folder.holder()
    if device != "auto" or not holder or holder.get("device") != "GPU":
        return device
    why = f"process {holder.get('pid', '?')} trains this run on the GPUs"
    log(f"{why}, so the evaluation runs on the CPU")
    return "cpu"


def read_run(
    workdir: str | os.PathLike,
    *,
    step: int | str = "best",
    calibrated: bool = False,
    use_ema: bool | None = None,
    log: Callable[[str], None] = console.line,
) -> RestoredRun:
    """Return the trained network of a run, on devices that were chosen before."""
    folder = RunFolder(workdir)
    config, checkpoint = stored_config(folder, step), read_checkpoint(folder, step, log)
    info = DatasetInfo.from_values(checkpoint.run_state["dataset_info"])
    step, weights = checkpoint.step, reported_weights(config, use_ema)
    fitted, why = _read_fitted(folder.rejection, step, weights, "threshold")
    if why and folder.rejection.exists():
        why = f"{folder.rejection} is not used ({why})"
        way = f"{program('eval')} --reject writes it anew"
        log(f"no image is answered with {UNKNOWN}: {why}; {way}")
    if calibrated and not fitted:
        fitted, why = _read_fitted(folder.calibration, step, weights)
        if why:
            of = f"the {weights.value} weights of step {step} ({why})"
            ema = "use_ema" if weights is Weights.EMA else "nouse_ema"
            command = f"{program('eval')} --calibrate --step={step} --{ema} writes it"
            why = f"{folder.calibration}: has no temperature of {of}"
            raise ConfigError(f"{why}; {command}")
    return RestoredRun(folder.path, step, config, info, checkpoint.tensors, *fitted)


def _read_fitted(path, step, weights, *also):
    """Return the temperature and other values in a file, and why there are none."""
    try:
        content = parse_json(path.read_bytes())
        fitted = content["weights"], content["step"]
        if fitted != (weights.value, step):
            raise ValueError("it is of the {} weights of step {}".format(*fitted))
        return [float(content[name]) for name in ("temperature", *also)], ""
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [], one_line(error)


def read_checkpoint(
    folder: RunFolder,
    step: int | str = "best",
    log: Callable[[str], None] = console.line,
) -> Checkpoint:
    """Return the checkpoint of a step; CheckpointError if none is valid."""
    checkpoint = checkpointer_of(folder, log).read(step)
    if checkpoint is None:
        way = f"or let {program('eval')} wait for one with --eval_interval_secs"
        why = f"{folder.checkpoints} holds no checkpoint yet"
        raise CheckpointError(f"{why}; train first, {way}")
    return checkpoint


class RunEvaluator:
    """The network of a run on all devices, and a data set to evaluate it on.

    `difference` says how the training images differ from the run's, if both are known.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        info: DatasetInfo | None,
        test_only: bool = True,
    ):
        chosen = evaluation_devices(config, folder)
        self.parts, self._trainer = assembly.assemble(
            config, chosen, for_training=False, dataset_info=info, test_only=test_only
        )
        data, self.difference = self.parts.data, ""
        if info is not None and info.num_train is not None and data.train is not None:
            self.difference = info.training_difference(DatasetInfo.of(data))
        self._batch_size = config.batch_size

    def predict(
        self, checkpoint: Checkpoint, source: Source, weights: Sequence[Weights]
    ) -> Iterator[Mapping[Weights, Mapping[str, np.ndarray]]]:
        """Yield the outputs for batches of a source, see `Evaluator.predictions`."""
        trainer, batch_size = self._trainer, self._batch_size
        trainer.load(restore_fitting(checkpoint.tensors, trainer.state()))
        batches = EvalBatches(source, self.parts.augment, batch_size)
        with data_errors_of_tensorflow():
            yield from trainer.evaluator.predictions(batches, weights)


def reported_weights(config: Config, use_ema: bool | None = None) -> Weights:
    """Return the weights that `use_ema` asks for, by default EMA if the run has it."""
    if use_ema and not config.ema_decay:
        why = "use_ema, but this run keeps no averages: its ema_decay is 0"
        raise ConfigError(f"{why}; take the parameters with --nouse_ema")
    is_ema = config.ema_decay > 0 if use_ema is None else use_ema
    return Weights.EMA if is_ema else Weights.RAW


def evaluated_weights(
    config: Config, use_ema: bool | None = None
) -> tuple[Weights, ...]:
    """Return the weights that `use_ema` asks for, by default all of the run."""
    reported = reported_weights(config, use_ema)
    both = use_ema is None and reported is Weights.EMA
    return (Weights.RAW, Weights.EMA) if both else (reported,)
