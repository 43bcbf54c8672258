"""The network of a run with its trained parameters, without its data set."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import build
from towers.config import Config, checks, choices
from towers.data.augment import create_augment
from towers.errors import CheckpointError, ConfigError
from towers.evaluation import devices
from towers.models.check import IMAGES
from towers.models.layers import Dropout
from towers.output import say
from towers.run import checkpoint_files, checkpoints
from towers.run.checkpoint_files import Checkpoint
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.restore import check_trainer_state, dataset_info_of, newest_checkpoint


@dataclasses.dataclass(frozen=True)
class RestoredRun:
    """A trained network, and what is needed to use it.

    Attributes:
        path: the run's folder.
        step: of the checkpoint.
        config: of the run.
        class_names: in the order of the logits.
        image_shape: height, width, channels of the images that `preprocess` takes.
        mean, deviation: of the training images, per channel, in units of 0..255.
        input_shape: height, width, channels of the input of the network.
        preprocess: uint8 images [n, *image_shape] -> float32 [n, *input_shape], as in
            an evaluation; made of TensorFlow operations.
        tensors: the checkpoint's, name -> array.
    """

    path: pathlib.Path
    step: int
    config: Config
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    input_shape: tuple[int, int, int]
    preprocess: Callable[[np.ndarray | tf.Tensor], tf.Tensor] = dataclasses.field(
        repr=False, compare=False
    )
    tensors: Mapping[str, np.ndarray] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def model(self) -> keras.Model:
        """The network with the raw parameters: preprocessed images [n, *input_shape] ->
        logits [n, classes]. Built when it is first used.

        Raises:
            ConfigError: the network is in a file that is missing.
            CheckpointError: the checkpoint is of another network.
        """
        return without_noise(self.network())

    @functools.cached_property
    def model_ema(self) -> keras.Model | None:
        """As `model`, with the moving averages of the parameters; None where the run
        keeps none."""
        if not self.config.ema_decay:
            return None
        return without_noise(self.network("averages"))

    def network(self, kind: str = "params") -> keras.Model:
        """A new network as it is trained: with dropout, and an input of noise for each
        such layer.

        Args:
            kind: "params", or "averages" for the moving averages.

        Raises:
            ConfigError, CheckpointError: as `model`.
        """
        _check_file(self.path, self.config, "model")
        # GPUs that are not used are hidden.
        device_kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
        model = build.create_network(
            self.config, self.input_shape, len(self.class_names), False, device_kind
        )
        load_variables(model, self.tensors, kind)
        return model


def load_run(workdir: str | os.PathLike, *, step: int = 0) -> RestoredRun:
    """See `towers.load_run`."""
    devices.configure_one(RunFolder(workdir), say)
    return read_run(workdir, step=step)


def read_run(
    workdir: str | os.PathLike, *, step: int = 0, log: Callable[[str], None] = say
) -> RestoredRun:
    """As `load_run`, on devices that were chosen before.

    Args:
        log: takes a line for each checkpoint that is rejected.

    Raises:
        ConfigError: there is no run, the run is too old to have class names, or a file
            of the user that it needs is missing.
        CheckpointError: there is no checkpoint, or none that is valid.
        RunFolderError: the folder cannot be looked into.
    """
    checks.check_environment()
    folder = RunFolder(workdir)
    folder.check()
    config = folder.stored_config(step)
    checkpoint = find_checkpoint(folder, step, log)
    if checkpoint is None:
        raise CheckpointError(f"{folder.checkpoints} holds no checkpoint; train first")
    info = dataset_info_of(checkpoint.trainer_state) or folder.stored_dataset_info()
    if info is None:
        raise ConfigError(
            f"{folder.path} has no {folder.dataset_info.name}: it was trained by an "
            "older towers. Continue it once, which writes the file also where the run "
            f"is finished: run_train.py --workdir={folder.path}"
        )
    return restored_run(folder.path, checkpoint.step, config, info, checkpoint.tensors)


def restored_run(
    path: pathlib.Path,
    step: int,
    config: Config,
    info: DatasetInfo,
    tensors: Mapping[str, np.ndarray],
) -> RestoredRun:
    """See the attributes of `RestoredRun`.

    Raises:
        ConfigError: a file of the user is missing, or the options and the images do
            not fit.
    """
    _check_file(path, config, "augment")
    try:
        augment = create_augment(
            config.augment, info.image_shape, info.mean, info.deviation
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None

    def preprocess(images: np.ndarray | tf.Tensor) -> tf.Tensor:
        images = tf.convert_to_tensor(images)
        if images.dtype != tf.uint8:
            raise ValueError(f"images must be uint8, got {images.dtype.name}")
        if not images.shape.is_compatible_with([None, *info.image_shape]):
            raise ValueError(
                f"images must be [n, {', '.join(map(str, info.image_shape))}], got "
                f"{images.shape}"
            )
        return tf.ensure_shape(augment.evaluate(images), [None, *augment.image_shape])

    return RestoredRun(
        path=path,
        step=step,
        config=config,
        class_names=info.class_names,
        image_shape=info.image_shape,
        mean=info.mean,
        deviation=info.deviation,
        input_shape=augment.image_shape,
        preprocess=preprocess,
        tensors=tensors,
    )


def find_checkpoint(
    folder: RunFolder,
    step: int = 0,
    log: Callable[[str], None] = say,
    known: dict[str, tuple[Any, str]] | None = None,
) -> Checkpoint | None:
    """The checkpoint of a step, or for 0 the newest valid one; None where a run has
    none at all. `log` takes a line for each one that is rejected.

    Args:
        known: see `checkpoints.restore_latest`.

    Raises:
        CheckpointError: that of the step is missing or invalid, or none is valid.
    """
    if not step:
        return newest_checkpoint(folder, log, known)
    checkpoint = checkpoints.restore_step(folder.checkpoints, step)
    check_trainer_state(checkpoint)
    return checkpoint


def kinds_of_parameters(config: Config, use_ema: bool | None) -> tuple[bool, ...]:
    """Whether the parameters that are evaluated are the moving averages; the last of
    them are those that the run reports.

    Args:
        config: of the run.
        use_ema: only the averages (True) or the raw parameters (False); None for both,
            where the run keeps averages.

    Raises:
        ConfigError: averages of a run that keeps none.
    """
    if use_ema and not config.ema_decay:
        raise ConfigError(
            "use_ema, but this run keeps no averages: its ema_decay is 0; take the "
            "parameters with --nouse_ema"
        )
    if use_ema is not None:
        return (use_ema,)
    return (False, True) if config.ema_decay else (False,)


def load_variables(
    model: keras.Model, tensors: Mapping[str, np.ndarray], kind: str = "params"
) -> None:
    """Gives the variables of a network the values of a checkpoint.

    Args:
        model: as `build.create_network` gives it.
        tensors: name -> array, of the whole state.
        kind: "params", or "averages" for the moving averages.

    Raises:
        CheckpointError: they are of another network.
    """
    named = {f"{kind}/{v.path}": v for v in model.trainable_variables}
    named |= {f"state/{v.path}": v for v in model.non_trainable_variables}
    trained = {name for name in tensors if name.startswith("params/")}
    saved = {
        name: tensor
        for group in (f"{kind}/", "state/")
        for name, tensor in tensors.items()
        if name.startswith(group)
        and (group == "state/" or f"params/{name.partition('/')[2]}" in trained)
    }
    checkpoint_files.check_architecture(
        [(name, tuple(v.shape), v.dtype) for name, v in named.items()],
        checkpoint_files.architecture(saved),
    )
    for name, variable in named.items():
        # The state is averaged too, but not in checkpoints of older versions.
        averaged = f"{kind}/{variable.path}"
        variable.assign(tensors.get(averaged, tensors[name]))


def without_noise(model: keras.Model) -> keras.Model:
    """The network for inference, which takes images alone: its dropout layers, which
    change nothing there, and their inputs of noise are left out. It shares the other
    layers with the model."""
    if len(model.inputs) == 1:
        return model
    [images] = (x for x in model.inputs if x.name == IMAGES)

    def call(layer, inputs, *args, **kwargs):
        return (
            inputs[0] if isinstance(layer, Dropout) else layer(inputs, *args, **kwargs)
        )

    clone = keras.models.clone_model(
        model,
        input_tensors=model.inputs,
        clone_function=lambda layer: layer,
        call_function=call,
    )
    return keras.Model(images, clone.outputs[0], name=model.name)


def _check_file(path, config, option):
    """Refuses a run whose network or augmentation is in a file that is missing."""
    name = getattr(config, option)
    file = name.rpartition(":")[0]
    if choices.find(option, name).is_in_a_file and not os.path.isfile(file):
        raise ConfigError(
            f"{path} needs the file of its {option}, {file}, which is not in "
            f"{os.getcwd()}; put it there, or work in the folder that it was trained "
            "from"
        )
