"""A new head that begins as a linear probe of a trained network.

LP-FT (Kumar et al. 2022, arXiv:2202.10054): logistic regression on the features of the
trained network gives the first head, then all layers are trained. A random head would
first pull the features towards its own directions.
"""

import contextlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from towers import build, console
from towers.config import Config
from towers.data.batches import EvalBatches
from towers.data.sources import Subset
from towers.errors import ConfigError
from towers.keras_internals import last_operation
from towers.models.variables import variable_names
from towers.parallel.devices import HOST
from towers.parallel.tower import model_inputs
from towers.parallel.trainer import Trainer
from towers.run.initial import set_initial

# Images whose features are computed, taken at equal distances.
MOST_IMAGES = 10_000
# Of the sum of losses over the images, for features whose mean squared norm is 1: about
# the best of EfficientNet-Lite0 for 10 and for 100 images per class.
L2_PENALTY = 0.1
NUM_STEPS = 300


def fit_head(
    trainer: Trainer,
    parts: build.Parts,
    config: Config,
    new: set[str],
    activity: Callable = lambda name: contextlib.nullcontext(lambda: None),
) -> None:
    """Sets a head without trained values to the linear probe of the other layers.

    Args:
        trainer: has the trained values of the other layers.
        parts: of its run.
        config: of its run.
        new: the variables of `trainer.state()` that have no trained values.
        activity: of a `Watchdog`.

    Raises:
        ConfigError: the logits are not those of a Dense layer with a bias.
    """
    head = _head(parts.model)
    kernel, bias = (
        f"params/{name}" for name in variable_names([head.kernel, head.bias])
    )
    if kernel not in new:
        console.line(f"linear probe: none, as {kernel} has trained values")
        return
    state = trainer.state()
    with activity("fitting the head") as heartbeat:
        features, labels = _features(parts, head, state, config.batch_size, heartbeat)
        *values, correct = logistic_regression(
            features, labels, state[bias].size, heartbeat
        )
    for name, array in zip((kernel, bias), values, strict=True):
        set_initial(state, name, array)
    trainer.load(state)
    console.line(
        f"linear probe: the head fits {correct:.1%} of {len(labels)} training images"
    )


def _head(model):
    """The last layer, whose outputs are the logits."""
    layer = last_operation(model.outputs[0])
    if not isinstance(layer, keras.layers.Dense) or not layer.use_bias:
        raise ConfigError(
            f"linear_probe: the last layer, {layer.name!r}, is no Dense layer with a "
            "bias; set --linear_probe=false"
        )
    return layer


def _features(parts, head, state, batch_size, heartbeat):
    """Features, float32 [n, f], of images as in an evaluation; labels, int64 [n]."""
    source = parts.train_batches.source
    if source.num_examples > MOST_IMAGES:
        taken = np.linspace(0, source.num_examples - 1, MOST_IMAGES).astype(np.int64)
        source = Subset(source, taken)
    network = keras.Model(parts.model.inputs, head.input)
    with tf.device(HOST):
        values = [
            [tf.constant(state[f"{kind}/{name}"]) for name in variable_names(variables)]
            for kind, variables in (
                ("params", network.trainable_variables),
                ("state", network.non_trainable_variables),
            )
        ]

    @tf.function(autograph=False)
    def features_of(batch):
        inputs = model_inputs(network, batch)
        features = network.stateless_call(*values, inputs, training=False)[0]
        return tf.cast(features, tf.float32)

    features, labels = [], []
    for batch in EvalBatches(source, parts.augment, batch_size).stream():
        counts = batch["weights"].numpy() > 0
        images = {"images": batch["images"]}
        features.append(features_of(images).numpy()[counts])
        labels.append(batch["labels"].numpy()[counts])
        heartbeat()
    return np.concatenate(features), np.concatenate(labels).astype(np.int64)


def logistic_regression(
    features: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Multinomial logistic regression with an L2 penalty on the kernel, by Nesterov's
    accelerated gradient with restarts (O'Donoghue and Candes 2015, arXiv:1204.3982).

    Args:
        features: float32 [n, f].
        labels: integers [n], less than `num_classes`.
        num_classes: number of columns of the kernel.
        heartbeat: called after each step.

    Returns:
        The kernel, float32 [f, num_classes]; the bias, float32 [num_classes]; and the
        part of the images that they classify correctly.
    """
    mean = features.mean(0)
    scale = np.sqrt(np.square(features - mean).sum(1).mean()) or 1.0
    # A column of ones for the bias, which has no penalty.
    x = np.c_[(features - mean) / scale, np.ones(len(features), np.float32)]
    penalty = np.full([x.shape[1], 1], L2_PENALTY, np.float32)
    penalty[-1] = 0
    targets = np.eye(num_classes, dtype=np.float32)[labels]

    def gradient(kernel):
        logits = x @ kernel
        exp = np.exp(logits - logits.max(1, keepdims=True))
        return x.T @ (exp / exp.sum(1, keepdims=True) - targets) + penalty * kernel

    # The largest curvature is at most half the largest eigenvalue of x.T @ x.
    rate = 1 / (0.5 * np.linalg.norm(x @ _direction(x)) ** 2 + L2_PENALTY)
    kernel = ahead = np.zeros([x.shape[1], num_classes], np.float32)
    age = 0
    for _ in range(NUM_STEPS):
        slope = gradient(ahead)
        moved = (ahead - rate * slope).astype(np.float32)
        age = 0 if np.vdot(slope, moved - kernel) > 0 else age + 1
        ahead = moved + age / (age + 3) * (moved - kernel)
        kernel = moved
        heartbeat()
    correct = np.mean((x @ kernel).argmax(1) == labels)
    kernel, bias = kernel[:-1] / scale, kernel[-1]
    return kernel.astype(np.float32), bias - mean @ kernel, float(correct)


def _direction(x, num_steps=30):
    """Of unit length, close to the largest eigenvector of x.T @ x."""
    vector = np.ones(x.shape[1], np.float32)
    for _ in range(num_steps):
        vector = x.T @ (x @ (vector / np.linalg.norm(vector)))
    return vector / np.linalg.norm(vector)
