"""Runs of a few steps on a few images, and places where a test can halt them."""

import atexit
import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from marks import slow

from towers.config import Config
from towers.data import streams
from towers.data.augment import augmentation as augmentations
from towers.data.batches import TrainBatches
from towers.data.sets import synthetic
from towers.data.sources import ArraySource, DataSet, Source, channel_moments
from towers.models.layers.core import Dropout
from towers.models.zoo import cnn
from towers.optim import losses
from towers.parallel.trainer import Trainer
from towers.run import checkpointer
from towers.run.checkpoint import Checkpoint
from towers.run.checkpointer import Checkpointer
from towers.training.train import train

NUM_TRAIN, NUM_TEST = 50, 23
IMAGE_SHAPE = (8, 8, 3)
CLASS_NAMES = ("a", "b", "c", "d", "e")

# Options of a run with held-out images.
HELD_OUT = {
    "validation_fraction": 0.4,  # 30 images are left, three steps of an epoch
    "eval_every_epochs": 1.0,
    "num_epochs": 5.0,
    "checkpoint_every_steps": 1,
    "keep_checkpoints": 1,
    # The rate rises tenfold with every epoch, so the first epochs are the best.
    "decay_factor": 10.0,
    "epochs_per_decay": 1.0,
}

# Runs under other strategies than towers. Of asynchronous towers one alone has an order
# that repeats itself.
OTHER_STRATEGIES = [
    slow({"strategy": "replicated", "num_towers": 2}, id="replicated"),
    slow(
        {"strategy": "model_parallel", "num_towers": 2, "group_size": 2},
        id="model_parallel",
    ),
    slow({"strategy": "async_towers", "num_towers": 1}, id="async_towers"),
]
every_strategy = pytest.mark.parametrize(
    "strategy", [pytest.param({}, id="towers"), *OTHER_STRATEGIES]
)


def small_config(**changes) -> Config:
    """Ten steps, five of them an epoch; no evaluation."""
    settings = {
        "dataset": "synthetic",
        "augment": "none",
        "width": 0.05,
        "optimizer": "nesterov",
        "momentum": 0.9,
        "learning_rate": 0.1,
        "weight_decay": 0.01,
        "schedule": "exponential",
        "ema_decay": 0.9,
        "device": "cpu",
        "batch_size": 10,
        "num_epochs": 2.0,
        "log_every_steps": 2,
        "eval_every_epochs": 0.0,
        "summary_every_steps": 0,
        "summary_every_secs": 0.0,
        "checkpoint_every_secs": 0.0,
    }
    return Config(**settings | changes)


def arrays(num_examples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [n, 8, 8, 3], brighter where their int32 label [n] is higher."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(CLASS_NAMES), num_examples, dtype=np.int32)
    images = rng.integers(0, 156, (num_examples, *IMAGE_SHAPE))
    images += 25 * labels[:, None, None, None]
    return images.astype(np.uint8), labels


def small_data(before_read: Callable[[], None] | None = None) -> DataSet:
    """50 training and 23 test images of five classes.

    Args:
        before_read: called before each read of training images.
    """
    images, labels = arrays(NUM_TRAIN, 0)
    mean, std = channel_moments(images)
    train = ArraySource(images, labels)
    return DataSet(
        name="small",
        train=_WatchedSource(train, before_read) if before_read else train,
        test=ArraySource(*arrays(NUM_TEST, 1)),
        class_names=CLASS_NAMES,
        mean=mean,
        std=std,
        origin="made for a test",
    )


class _WatchedSource:
    """A source that calls a function before each read."""

    def __init__(self, source: Source, before_read: Callable[[], None]):
        self.num_examples = source.num_examples
        self.image_shape = source.image_shape
        self.labels = source.labels
        self._source = source
        self._before_read = before_read

    def read(self, indices):
        with tf.control_dependencies([_operation(self._before_read)]):
            return self._source.read(tf.identity(indices))


def _operation(call):
    """A TensorFlow operation that calls Python."""

    def operation():
        call()
        return np.int32(0)

    return tf.numpy_function(operation, [], tf.int32)


def spoiled(patch: pytest.MonkeyPatch, *steps: int) -> DataSet:
    """The small data set; augment=none turns the last image of some steps, that of the
    last tower, into NaN, also in the epochs that follow."""
    data_set = small_data()
    order = TrainBatches(data_set.train, None, seed=0, images_per_step=10)
    images, labels = arrays(NUM_TRAIN, 0)
    for step in steps:
        images[int(order.indices(tf.constant(step - 1, tf.int64))[-1])] = 255
    none = augmentations.none

    def create(image_shape, mean, std):
        augment = none(image_shape, mean, std)

        def spoiling(images, draw):
            white = tf.reduce_all(images == 255, [1, 2, 3], keepdims=True)
            return tf.where(white, np.nan, augment.train(images, draw))

        return dataclasses.replace(augment, train=spoiling)

    patch.setattr(augmentations, "none", create)
    return dataclasses.replace(data_set, train=ArraySource(images, labels))


def linear_network(*, image_shape, num_classes, width, regularizer) -> keras.Model:
    """The smallest network, for tests that do not depend on the network."""
    images = keras.Input(image_shape, name="images")
    x = layers.Flatten(name="flatten")(images)
    logits = layers.Dense(num_classes, kernel_regularizer=regularizer, name="logits")
    return keras.Model(images, logits(x))


def dropout_network(*, image_shape, num_classes, width, regularizer) -> keras.Model:
    """Convolution, pooling, dropout."""
    return _network(image_shape, num_classes, regularizer, batch_norm=False)


def full_network(*, image_shape, num_classes, width, regularizer) -> keras.Model:
    """Convolution, batch normalization, pooling, dropout: everything with a state."""
    return _network(image_shape, num_classes, regularizer, batch_norm=True)


def _network(image_shape, num_classes, regularizer, batch_norm):
    images = keras.Input(image_shape, name="images")
    noise = keras.Input((36,), name="dropout1_noise")
    x = layers.Conv2D(4, 3, use_bias=not batch_norm, name="conv1")(images)
    if batch_norm:
        x = layers.BatchNormalization(momentum=0.9, name="norm1")(x)
    x = layers.ReLU(name="relu1")(x)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = layers.Flatten(name="flatten")(x)
    x = Dropout(0.25, name="dropout1")([x, noise])
    logits = layers.Dense(num_classes, kernel_regularizer=regularizer, name="logits")
    return keras.Model([images, noise], logits(x))


def use(
    patch: pytest.MonkeyPatch,
    network: Callable[..., keras.Model] = linear_network,
    data_set: DataSet | None = None,
) -> None:
    """Puts a network and a data set, by default the small one, in the place of
    existing ones."""
    patch.setattr(synthetic, "load", lambda data_dir: data_set or small_data())
    patch.setattr(cnn, "create_model", network)


def halt_at(patch: pytest.MonkeyPatch, place: str, halt: Callable[[], None]) -> None:
    """Calls `halt` each time when a run on the small data reaches a place.

    Args:
        patch: reverts it.
        place: "tracing" the step; "computing" the loss of a tower; "waiting" for a
            batch; "drawing" the batch of the image summary; "evaluating"; "saving".
        halt: called in a thread that the run waits for.
    """

    def halting(call):
        def wrapped(*args, **kwargs):
            halt()
            return call(*args, **kwargs)

        return wrapped

    def computing(logits, labels, label_smoothing):
        with tf.control_dependencies([_operation(halt)]):
            logits = tf.identity(logits)
        return cross_entropy(logits, labels, label_smoothing)

    cross_entropy = losses.cross_entropy
    if place == "waiting":
        patch.setattr(streams, "NUM_CALLS", 1)  # batches are read in their order
        patch.setattr(synthetic, "load", lambda data_dir: small_data(halt))
    elif place == "computing":
        patch.setattr(losses, "cross_entropy", computing)
    else:
        owner, name = {
            "tracing": (losses, "cross_entropy"),
            "drawing": (TrainBatches, "__call__"),
            "evaluating": (Trainer, "evaluate"),
            "saving": (checkpointer, "write"),
        }[place]
        patch.setattr(owner, name, halting(getattr(owner, name)))


def records(workdir: pathlib.Path) -> list[dict]:
    """The lines of `metrics.jsonl` without the fields that depend on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    timed = ("images_per_sec", "input_wait_percent")
    return [
        {k: v for k, v in json.loads(line).items() if k not in timed} for line in lines
    ]


def has_logged(workdir: pathlib.Path, step: int) -> bool:
    """Whether `metrics.jsonl` has a record of a step by now."""
    path = workdir / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def assert_equal_states(
    state: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> None:
    """Every tensor has the same bits."""
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(state[name], tensor, err_msg=name)


def snapshot(workdir: pathlib.Path) -> dict[str, bytes | None]:
    """Path -> content of everything in a run's folder except its lock."""
    paths = (p for p in workdir.rglob("*") if p.name != ".lock")
    return {str(p): p.read_bytes() if p.is_file() else None for p in paths}


@dataclasses.dataclass(frozen=True)
class Finished:
    """An uninterrupted run: its folder, not to be changed, final state and records."""

    path: pathlib.Path
    state: dict
    records: list


@functools.cache
def uninterrupted(config: Config, network=linear_network) -> Finished:
    """The uninterrupted run of a Config on the small data; each is trained once."""
    workdir = pathlib.Path(tempfile.mkdtemp(prefix="uninterrupted-"))
    atexit.register(shutil.rmtree, workdir, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, network)
        state = train(workdir, config).state
    return Finished(workdir, state, records(workdir))


def half_way(workdir: pathlib.Path) -> pathlib.Path:
    """Makes the folder of a run that has taken five of its ten steps."""
    return shutil.copytree(uninterrupted(small_config(max_steps=5)).path, workdir)


def saved(workdir: pathlib.Path) -> Checkpoint:
    return Checkpointer(workdir / "checkpoints").read()


def numpy_logits(
    workdir: pathlib.Path, images: np.ndarray, kind: str = "averages", step="last"
) -> np.ndarray:
    """Return the logits of the linear network in a run, in float64."""
    tensors = Checkpointer(workdir / "checkpoints").read(step).tensors
    axes, known = (0, 1, 2), arrays(NUM_TRAIN, 0)[0]
    inputs = (images - known.mean(axes)) / known.std(axes)
    inputs = inputs.reshape(len(images), -1)
    return inputs @ tensors[f"{kind}/logits/kernel"] + tensors[f"{kind}/logits/bias"]


def saved_steps(workdir: pathlib.Path) -> list[int]:
    return Checkpointer(workdir / "checkpoints").steps()
