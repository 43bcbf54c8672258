"""A new head that begins as a linear probe of a trained network.

LP-FT (Kumar et al. 2022, arXiv:2202.10054): logistic regression on the features of the
trained network gives the first head, then all layers are trained. A random head would
first pull the features towards its own directions.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from towers import build, console
from towers.data.batches import EvalBatches
from towers.data.sources import Subset
from towers.errors import ConfigError
from towers.keras_internals import last_operation
from towers.models.variables import variable_names
from towers.parallel.devices import HOST
from towers.parallel.towers import model_inputs
from towers.parallel.trainer import Trainer
from towers.run.initial import set_initial

# Images whose features are computed, taken at equal distances.
MAX_IMAGES = 10_000
# Of the sum of losses over the images, for features whose mean squared norm is 1: about
# the best of EfficientNet-Lite0 for 10 and for 100 images per class.
L2_PENALTY = 0.1
# A fit ends when the norm of its gradient is below the tolerance: an error of at most
# TOLERANCE / L2_PENALTY in the logits of a typical image.
TOLERANCE = 2e-3
MAX_STEPS = 1000
# Batches of features that are timed, and the time of a step relative to inference on
# its images: forward, backward to activations and backward to parameters.
TIMED_BATCHES = 8
PASSES = 3.0


def fit_head(
    trainer: Trainer,
    parts: build.Parts,
    batch_size: int,
    new: set[str],
    activity: Callable = lambda name: contextlib.nullcontext(lambda: None),
) -> None:
    """Set a head without trained values (`new`) to the linear probe of the other
    layers, and say how long the run takes; `activity` is a `Watchdog`'s. ConfigError if
    the last layer is not a Dense layer with a bias.
    """
    if not new:
        return
    kernel, bias = names = _head_names(parts.model)
    if kernel not in new:
        console.line(f"linear probe: none, as {kernel} has trained values")
        return
    state, examples, count = trainer.state(), [], _source(parts).num_examples
    num_timed = min(TIMED_BATCHES, math.ceil(count / batch_size) - 1)
    num_weights = 1 + any(name.startswith("averages/") for name in state)
    on_cpus = not any("GPU" in device for device in trainer.devices)
    with activity("fitting the head") as heartbeat:
        for batch in _features(parts, state, batch_size):
            examples.append(batch)
            heartbeat()
            if len(examples) == 1:
                started = time.monotonic()  # it was compiled with the first one
            elif len(examples) == 1 + num_timed and on_cpus:
                secs = (time.monotonic() - started) / (num_timed * batch_size)
                secs /= len(trainer.devices)  # a core for each
                minutes = max(1, round(run_secs(parts, secs, num_weights) / 60))
                console.line(f"this run takes about {minutes} min on this machine")
        *values, correct = logistic_regression(
            *map(np.concatenate, zip(*examples, strict=True)),
            state[bias].size,
            heartbeat,
        )
    for name, array in zip(names, values, strict=True):
        set_initial(state, name, array)
    trainer.load(state)
    kind = "labels" if parts.data.multi_label else "images"
    console.line(f"linear probe: the head fits {correct:.1%} of the {kind}")


def probe_secs(
    trainer: Trainer,
    parts: build.Parts,
    batch_size: int,
    new: set[str],
    heartbeat: Callable[[], None],
) -> float:
    """Seconds of `fit_head`, estimated from some batches."""
    if not new or _head_names(parts.model)[0] not in new:
        return 0.0
    state = trainer.state()
    started, times, examples = time.monotonic(), [], []
    batches = _features(parts, state, batch_size)
    for batch in itertools.islice(batches, 1 + TIMED_BATCHES):
        examples.append(batch)
        times.append(time.monotonic() - started)
        heartbeat()
    features, labels = map(np.concatenate, zip(*examples, strict=True))
    started, num_classes = time.monotonic(), len(parts.data.class_names)
    logistic_regression(features, labels, num_classes, heartbeat)
    rest = _source(parts).num_examples / len(labels) - 1
    per_images = (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)
    fit_secs = time.monotonic() - started
    return times[-1] + fit_secs + rest * (per_images + fit_secs)


def run_secs(parts: build.Parts, secs_per_image: float, num_weights: int) -> float:
    """Return the seconds of a run; `secs_per_image` are of an inference."""
    count = parts.periods.num_evaluations(0, parts.last_step)
    count *= parts.eval_split[1].num_examples * num_weights
    trained = PASSES * parts.last_step * parts.periods.images_per_step
    return secs_per_image * (_source(parts).num_examples + trained + count)


def _head_names(model):
    """The names of the kernel and bias of the last layer in `Trainer.state`."""
    head = last_operation(model.outputs[0])
    if not isinstance(head, keras.layers.Dense) or not head.use_bias:
        why = f"the last layer, {head.name!r}, is not a Dense layer with a bias"
        raise ConfigError(f"linear_probe: {why}; set --linear_probe=false")
    return [f"params/{name}" for name in variable_names([head.kernel, head.bias])]


def _source(parts):
    """The images of the probe."""
    source = parts.train_batches.source
    if source.num_examples <= MAX_IMAGES:
        return source
    taken = np.linspace(0, source.num_examples - 1, MAX_IMAGES).astype(np.int64)
    return Subset(source, taken)


def _features(parts, state, batch_size):
    """Batches of features, float32 [n, f], as in an evaluation, and labels, int64."""
    head = last_operation(parts.model.outputs[0])
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

    for batch in EvalBatches(_source(parts), parts.augment, batch_size):
        counts = batch["mask"].numpy() > 0
        features = features_of({"images": batch["images"]}).numpy()
        yield features[counts], batch["labels"].numpy()[counts].astype(np.int64)


def logistic_regression(
    features: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Fit a logistic regression with an L2 penalty on the kernel, by Nesterov's
    accelerated gradient with restarts (O'Donoghue and Candes 2015, arXiv:1204.3982),
    its steps scaled by an upper bound of the curvature (Boehning 1992). Features are
    float32 [n, f]; labels classes [n] or sets [n, num_classes]. Returns kernel, bias
    and accuracy.
    """
    if features.shape[1] > len(features):  # the kernel is a sum of features
        basis, rotated = np.linalg.qr(features.T)
        fitted = logistic_regression(rotated.T, labels, num_classes, heartbeat)
        return basis @ fitted[0], *fitted[1:]
    mean = features.mean(0)
    scale = np.sqrt(np.square(features - mean).sum(1).mean()) or 1.0
    # A column of ones for the bias, which has no penalty.
    x = np.c_[(features - mean) / scale, np.ones(len(features), np.float32)]
    penalty = np.full([x.shape[1], 1], L2_PENALTY, np.float32)
    penalty[-1] = 0
    is_set = labels.ndim == 2
    targets = labels if is_set else np.eye(num_classes, dtype=np.float32)[labels]

    def gradient(kernel):
        logits = x @ kernel
        if is_set:
            probabilities = 0.5 + 0.5 * np.tanh(0.5 * logits)  # the sigmoid
        else:
            exp = np.exp(logits - logits.max(1, keepdims=True))
            probabilities = exp / exp.sum(1, keepdims=True)
        return x.T @ (probabilities - targets) + penalty * kernel

    wide = x.astype(np.float64)
    bound = (0.25 if is_set else 0.5) * wide.T @ wide + np.diag(penalty[:, 0])
    rates = np.linalg.inv(bound).astype(np.float32)
    kernel = ahead = np.zeros([x.shape[1], num_classes], np.float32)
    age = 0
    for _ in range(MAX_STEPS):
        slope = gradient(ahead)
        moved = ahead - rates @ slope
        age = 0 if np.vdot(slope, moved - kernel) > 0 else age + 1
        ahead = moved + age / (age + 3) * (moved - kernel)
        kernel = moved
        heartbeat()
        if np.linalg.norm(slope) < TOLERANCE:
            break
    logits = x @ kernel
    correct = np.mean((logits >= 0 if is_set else logits.argmax(1)) == labels)
    kernel, bias = kernel[:-1] / scale, kernel[-1]
    return kernel.astype(np.float32), bias - mean @ kernel, float(correct)
