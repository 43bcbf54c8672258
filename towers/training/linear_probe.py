"""A new head that begins as a linear probe of a trained network.

LP-FT (Kumar et al. 2022, arXiv:2202.10054): logistic regression on the features of the
trained network gives the first head, then all layers are trained. A random head would
first pull the features towards its own directions.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np

from towers import console
from towers.build import builder
from towers.config import Config
from towers.data.batches import EvalBatches
from towers.data.sources import Subset
from towers.errors import ConfigError
from towers.keras_internals import last_operation
from towers.models.variables import variable_names
from towers.parallel.copies import Weights
from towers.parallel.evaluator import create_predictor
from towers.parallel.trainer import Trainer
from towers.pretrained.initial import set_initial

# Maximum number of images whose features are computed, taken at equal distances.
MAX_IMAGES = 10_000
# Penalty added to the sum of losses over images and mirror images, for features whose
# mean squared norm is 1: about the best of EfficientNet-Lite0 for 10 images per class.
L2_PENALTY = 0.6
# A fit ends when the norm of its gradient is below the tolerance: an error of at most
# TOLERANCE / L2_PENALTY in the logits of a typical image.
TOLERANCE = 2e-3
MAX_STEPS = 1000


def fit_head(
    trainer: Trainer,
    parts: builder.Parts,
    config: Config,
    new: Mapping[str, Sequence[int]],
    activity: Callable = lambda name: contextlib.nullcontext(lambda: None),
) -> None:
    """Set a head without trained values to the linear probe of other layers.

    `new` is the result of `start_from`: outputs with trained values keep them, and the
    others are fitted next to them. `activity` is a `Watchdog`'s. ConfigError if the
    last layer is not a Dense layer.
    """
    if not is_fitted(parts.model, new):
        if new:
            console.line("linear probe: none, as the head has trained values")
        return
    names = _head_names(parts.model)
    state, batches = trainer.state(), []
    kernel, bias = (state[name] for name in names)
    known = list(new[names[0]])
    with activity("fitting the head") as heartbeat:
        for batch in features_of_images(trainer, parts, config):
            batches.append(batch)
            heartbeat()
        images, labels = map(np.concatenate, zip(*batches, strict=True))
        is_known = np.isin(range(bias.size), known)
        offsets = (images @ kernel + bias) * is_known
        *values, correct = logistic_regression(
            images, labels, bias.size, heartbeat, known, offsets
        )
    for name, array in zip(names, values, strict=True):
        array[..., known] = state[name][..., known]
        set_initial(state, name, array)
    trainer.load(state)
    kind = "labels" if parts.data.multi_label else "images"
    count = f"{bias.size - len(known)} of {bias.size} outputs"
    fitted = f"{count} fitted; " if known else ""
    console.line(f"linear probe: {fitted}the head fits {correct:.1%} of the {kind}")


def is_fitted(model: keras.Model, new: Mapping[str, Sequence[int]]) -> bool:
    """Return whether the head of a network has outputs without trained values."""
    return bool(new) and _head_names(model)[0] in new


def num_images(parts: builder.Parts) -> int:
    """Return the number of images, without mirror images, that a head is fitted to."""
    return min(parts.num_examples, MAX_IMAGES)


def num_views(parts: builder.Parts, config: Config) -> int:
    """Return 2 if features of mirror images are computed too, otherwise 1."""
    # Every augmentation mirrors images. Many images do not need it.
    mirrors = config.augment != "none" and 2 * parts.num_examples <= MAX_IMAGES
    return 2 if mirrors else 1


def _head_names(model):
    """Return the names of kernel and bias of the last layer in `Trainer.state`."""
    head = last_operation(model.outputs[0])
    if not isinstance(head, keras.layers.Dense) or not head.use_bias:
        why = f"the last layer, {head.name!r}, is not a Dense layer with a bias"
        raise ConfigError(f"linear_probe: {why}; set --linear_probe=false")
    return [f"params/{name}" for name in variable_names([head.kernel, head.bias])]


def features_of_images(trainer, parts, config):
    """Yield features, float32 [n, f], as in an evaluation, and labels, int64.

    All towers compute them while the next batches are read.
    """
    source, state = parts.train_batches.source, trainer.state()
    taken = np.linspace(0, source.num_examples - 1, num_images(parts)).astype(np.int64)
    features = last_operation(parts.model.outputs[0]).input
    network = keras.Model(parts.model.inputs, features)
    for variable in network.variables:
        kind = "params" if variable.trainable else "state"
        variable.assign(state[f"{kind}/{variable.path}"])
    devices = trainer.devices[:: trainer.strategy.num_shards]
    predict = create_predictor(network, devices, ()).predictions
    views = (1, -1)[: num_views(parts, config)]  # steps from left to right
    for batch in EvalBatches(Subset(source, taken), parts.augment, config.batch_size):
        images, labels = batch["images"], batch.pop("labels").numpy()
        labels = labels[batch["mask"].numpy() > 0].astype(np.int64)
        for outputs in predict(batch | {"images": images[:, :, ::x]} for x in views):
            yield outputs[Weights.RAW]["logits"].astype(np.float32), labels


def logistic_regression(
    features: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    heartbeat: Callable[[], None] = lambda: None,
    known: Sequence[int] = (),
    offsets: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Fit a logistic regression with an L2 penalty on the kernel.

    By Nesterov's accelerated gradient with restarts (O'Donoghue and Candes 2015,
    arXiv:1204.3982), its steps scaled by an upper bound of the curvature (Boehning
    1992). Features are float32 [n, f]; labels classes [n] or sets [n, num_classes].
    `offsets` [n, num_classes] are added to the logits; the kernel and bias of `known`
    classes stay 0. Returns kernel, bias and accuracy.
    """
    if features.shape[1] > len(features):  # the kernel is a sum of features
        basis, rotated = np.linalg.qr(features.T)
        options = num_classes, heartbeat, known, offsets
        fitted = logistic_regression(rotated.T, labels, *options)
        return basis @ fitted[0], *fitted[1:]
    mean = features.mean(0)
    scale = np.sqrt(np.square(features - mean).sum(1).mean()) or 1.0
    # A column of ones for the bias, which has no penalty.
    x = np.c_[(features - mean) / scale, np.ones(len(features), np.float32)]
    penalty = np.full([x.shape[1], 1], L2_PENALTY, np.float32)
    penalty[-1] = 0
    is_set = labels.ndim == 2
    # Images of no class, labeled `num_classes`, have uniform targets.
    one_hot = np.eye(num_classes + 1, num_classes, dtype=np.float32)
    one_hot[-1] = 1 / num_classes
    targets = labels if is_set else one_hot[labels]

    def gradient(kernel):
        logits = x @ kernel + offsets
        if is_set:
            probabilities = 0.5 + 0.5 * np.tanh(0.5 * logits)  # the sigmoid
        else:
            exp = np.exp(logits - logits.max(1, keepdims=True))
            probabilities = exp / exp.sum(1, keepdims=True)
        slope = x.T @ (probabilities - targets) + penalty * kernel
        slope[:, known] = 0
        return slope

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
    logits = x @ kernel + offsets
    correct = np.mean((logits >= 0 if is_set else logits.argmax(1)) == labels)
    kernel, bias = kernel[:-1] / scale, kernel[-1]
    return kernel.astype(np.float32), bias - mean @ kernel, float(correct)
