"""Runs of a few steps on a few images, and places where a test may halt them."""

import json
import pathlib
import threading
from collections.abc import Callable, Mapping

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from towers import data, losses, models
from towers.config import Config
from towers.data.batches import TrainBatches
from towers.data.sources import ArraySource, DataSet, Source, channel_moments
from towers.models.layers import Dropout

NUM_TRAIN, NUM_TEST = 50, 23
IMAGE_SHAPE = (8, 8, 3)
CLASS_NAMES = ("a", "b", "c", "d", "e")

# Where `halt_at` may halt a run.
PLACES = ("tracing", "computing", "waiting", "drawing", "evaluating", "saving")


def small_config(**changes) -> Config:
    """Ten steps; five of them are an epoch, and evaluations follow steps 5 and 10."""
    settings = {
        "dataset": "synthetic",
        "augment": "pad_crop_flip",
        "width": 0.05,
        "optimizer": "nesterov",
        "momentum": 0.9,
        "learning_rate": 0.1,
        "weight_decay": 0.01,
        "ema_decay": 0.9,
        "device": "cpu",
        "batch_size": 10,
        "num_epochs": 2.0,
        "log_every_steps": 2,
        "summary_every_steps": 0,
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


def small_data(
    before_train_read: Callable[[np.ndarray], None] | None = None,
    before_test_read: Callable[[np.ndarray], None] | None = None,
) -> DataSet:
    """50 training and 23 test images of five classes.

    Args:
        before_train_read, before_test_read: called with the indices of each read.
    """
    images, labels = arrays(NUM_TRAIN, 0)
    mean, deviation = channel_moments(images)
    return DataSet(
        name="small",
        train=_watched(ArraySource(images, labels), before_train_read),
        test=_watched(ArraySource(*arrays(NUM_TEST, 1)), before_test_read),
        class_names=CLASS_NAMES,
        mean=mean,
        deviation=deviation,
        found="made for a test",
    )


class _WatchedSource:
    """A source that tells of each read before it takes place."""

    def __init__(self, source: Source, before_read: Callable[[np.ndarray], None]):
        self.num_examples = source.num_examples
        self.image_shape = source.image_shape
        self._source = source
        self._before_read = before_read

    def read(self, indices):
        with tf.control_dependencies([_python(self._before_read, indices)]):
            return self._source.read(tf.identity(indices))


def _watched(source, before_read):
    return source if before_read is None else _WatchedSource(source, before_read)


def _python(call, *tensors):
    """A TensorFlow operation that calls Python."""

    def operation(*values):
        call(*values)
        return np.int32(0)

    return tf.numpy_function(operation, tensors, tf.int32)


def dropout_network(*, batch_norm: bool) -> Callable[..., keras.Model]:
    """A `create_model` for `towers.models.MODELS`: convolution, dropout, dense."""

    def create_model(*, image_shape, num_classes, width, regularizer):
        images = keras.Input(image_shape, name="images")
        noise = keras.Input((48,), name="dropout1_noise")
        x = layers.Conv2D(4, 3, use_bias=not batch_norm, name="conv1")(images)
        if batch_norm:
            x = layers.BatchNormalization(momentum=0.9, name="norm1")(x)
        x = layers.ReLU(name="relu1")(x)
        x = layers.MaxPooling2D(2, name="pool1")(x)
        x = layers.Flatten(name="flatten")(x)
        x = layers.Dense(48, kernel_regularizer=regularizer, name="fc1")(x)
        x = Dropout(0.25, name="dropout1")([x, noise])
        logits = layers.Dense(num_classes, name="logits")(x)
        return keras.Model([images, noise], logits)

    return create_model


def use(patch: pytest.MonkeyPatch, data_set: DataSet, *, batch_norm: bool) -> None:
    """Puts a data set and the network with dropout in the place of existing ones."""
    patch.setitem(data.DATASETS, "synthetic", lambda data_dir: data_set)
    network = dropout_network(batch_norm=batch_norm)
    patch.setitem(models.MODELS, "cnn", network)


def halt_at(patch: pytest.MonkeyPatch, place: str, halt: Callable[[], None]) -> None:
    """Has `halt` called each time when a run on the small data comes to a place.

    Args:
        patch: undoes it.
        place: "tracing" the step; "computing" a step; "waiting" for a batch; "drawing"
            the batch for the image summary; "evaluating"; "saving".
        halt: called from a thread that the run waits for.
    """
    watch = {
        "waiting": {"before_train_read": lambda indices: halt()},
        "evaluating": {"before_test_read": lambda indices: halt()},
    }
    data_set = small_data(**watch.get(place, {}))
    patch.setitem(data.DATASETS, "synthetic", lambda data_dir: data_set)

    cross_entropy, draw_batch = losses.cross_entropy, TrainBatches.__call__
    write = tf.train.Checkpoint.write

    def traced(logits, labels, label_smoothing):
        halt()
        return cross_entropy(logits, labels, label_smoothing)

    def computed(logits, labels, label_smoothing):
        with tf.control_dependencies([_python(halt)]):
            logits = tf.identity(logits)
        return cross_entropy(logits, labels, label_smoothing)

    def drawn(self, step):
        halt()
        return draw_batch(self, step)

    def written(*args, **kwargs):
        halt()
        return write(*args, **kwargs)

    if place == "tracing":
        patch.setattr(losses, "cross_entropy", traced)
    elif place == "computing":
        patch.setattr(losses, "cross_entropy", computed)
    elif place == "drawing":
        patch.setattr(TrainBatches, "__call__", drawn)
    elif place == "saving":
        patch.setattr(tf.train.Checkpoint, "write", written)


def join_left_behind() -> None:
    """Waits for calls that a watchdog has left behind, once what held them is gone."""
    for thread in threading.enumerate():
        if thread.name == "step":
            thread.join(30)
            assert not thread.is_alive()


def records(workdir: pathlib.Path) -> list[dict]:
    """The lines of `metrics.jsonl` without what depends on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k != "images_per_sec"}
        for line in lines
    ]


def assert_equal_states(
    state: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> None:
    """Every tensor has the same bits."""
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(state[name], tensor, err_msg=name)


def snapshot(workdir: pathlib.Path) -> dict[str, bytes | None]:
    """Path -> content of all that lies in a run's folder, but for its lock."""
    paths = (p for p in workdir.rglob("*") if p.name != ".lock")
    return {str(p): p.read_bytes() if p.is_file() else None for p in paths}
