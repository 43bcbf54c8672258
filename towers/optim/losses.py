"""Loss functions of images, distillation, and weight decay."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.config import factories
from towers.errors import ConfigError
from towers.optim.vector import Layout

# (logits [n, num_classes], labels) -> loss of each image [n]. Labels are int32 [n], or
# floats [n, num_classes] for mixed images and images with several labels.
LossFn = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def create_loss(name: str, *, multi_label: bool = False, **options: Any) -> LossFn:
    """Return the named loss, with an attribute `multi_label`.

    Args:
        name: in `towers.config.choices.LOSSES`, or FILE.py:FUNCTION.
        multi_label: whether labels are sets, floats [n, num_classes] of 0 and 1;
            "cross_entropy" is then binary cross-entropy of sigmoids.
        **options: label_smoothing, class_weights, pos_weights, logit_adjustment,
            focal_gamma, target_threshold; a loss gets the ones its signature names.

    Raises:
        ConfigError: the loss takes one label per image, and images have several.
    """
    if multi_label and name == "cross_entropy":
        name = "binary_cross_entropy"
        options.pop("target_threshold", None)  # an option of --loss=binary_...
    function = factories.resolve("loss", name)
    if multi_label and name == "focal":
        raise ConfigError(
            f"loss={name} takes one label per image, and these have several; set "
            "--loss=binary_cross_entropy"
        )
    options = factories.named_by(function, options | {"multi_label": multi_label})
    loss_fn: Any = functools.partial(function, **options)
    loss_fn.multi_label = multi_label
    return loss_fn


def mean_loss(
    losses: tf.Tensor, logits: tf.Tensor, weights: tf.Tensor | None = None
) -> tf.Tensor:
    """Return the mean loss, with weights as in Keras' "sum_over_batch_size"."""
    shape = losses.shape if tf.is_tensor(losses) else None
    images = logits.shape[:1]
    if shape is None or shape.rank != 1 or not shape.is_compatible_with(images):
        raise ConfigError(
            f"--loss gave {shape or type(losses).__name__} for logits {logits.shape}; "
            f"return the loss of each image, {images}"
        )
    if weights is not None:
        losses *= tf.cast(weights, losses.dtype)
    return tf.reduce_mean(losses)


def cross_entropy(
    logits: tf.Tensor,
    labels: tf.Tensor,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
    logit_adjustment: Sequence[float] | None = None,
    *,
    pos_weights: Sequence[float] | None = None,
) -> tf.Tensor:
    """Return the softmax cross-entropy of each image.

    The target is (1 - label_smoothing) times the label plus label_smoothing spread
    evenly over all classes (Szegedy et al. 2016, arXiv:1512.00567, section 7).

    Args:
        logits: floats [n, num_classes]; 16-bit ones are cast to float32 first.
        labels: integers [n], or floats [n, num_classes] of mixed images, with row sums
            of 1.
        label_smoothing: in [0, 1).
        class_weights: factor per class on its term of the sum over the classes, as in
            PyTorch's `CrossEntropyLoss`; a mean over images is not divided by them.
        logit_adjustment: number per class that is added to its logit.
        pos_weights: must be None.

    Returns:
        float32 (or float64) [n].

    Raises:
        ConfigError: `pos_weights` are set, which `binary_cross_entropy` takes.
    """
    if pos_weights is not None:
        raise ConfigError(
            "pos_weights with loss=cross_entropy: each image has one label; set "
            "--class_weights or --loss=binary_cross_entropy"
        )
    logits, labels = _adjusted(logits, logit_adjustment), tf.convert_to_tensor(labels)
    if not (labels.dtype.is_floating or label_smoothing or class_weights is not None):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    targets = _targets(logits, labels, label_smoothing)
    if class_weights is not None:
        # The gradient of the fused operation assumes targets that add up to 1.
        targets *= tf.constant(class_weights, logits.dtype)
        return -tf.reduce_sum(targets * tf.nn.log_softmax(logits), axis=-1)
    return tf.nn.softmax_cross_entropy_with_logits(targets, logits)


def focal(
    logits: tf.Tensor,
    labels: tf.Tensor,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
    logit_adjustment: Sequence[float] | None = None,
    *,
    focal_gamma: float = 2.0,
) -> tf.Tensor:
    """Return `cross_entropy` with terms times (1 - p) ** gamma (arXiv:1708.02002)."""
    logits, labels = _adjusted(logits, logit_adjustment), tf.convert_to_tensor(labels)
    logs = tf.nn.log_softmax(logits)
    # Roots do not have a gradient at 0.
    rest = tf.maximum(-tf.math.expm1(logs), tf.constant(1e-9, logits.dtype))
    terms = _targets(logits, labels, label_smoothing) * rest**focal_gamma * logs
    if class_weights is not None:
        terms *= tf.constant(class_weights, logits.dtype)
    return -tf.reduce_sum(terms, axis=-1)


def binary_cross_entropy(
    logits: tf.Tensor,
    labels: tf.Tensor,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
    logit_adjustment: Sequence[float] | None = None,
    *,
    target_threshold: float = 0.0,
    pos_weights: Sequence[float] | None = None,
    multi_label: bool = False,
) -> tf.Tensor:
    """Return the mean over the classes of sigmoid cross-entropy, for each image.

    As in timm and "ResNet strikes back" (Wightman et al. 2021, arXiv:2110.00476).
    Targets above a `target_threshold` become 1, others 0. `pos_weights` are factors on
    the terms of the positive images of each class, as in PyTorch's `BCEWithLogitsLoss`.
    With `multi_label` labels are sets, and smoothing moves each target towards 1/2, as
    in Keras' `BinaryCrossentropy`. Other arguments are as in `cross_entropy`.

    Raises:
        ConfigError: all smoothed labels would be on one side of the threshold.
    """
    logits, labels = _adjusted(logits, logit_adjustment), tf.convert_to_tensor(labels)
    num_targets = 2 if multi_label else logits.shape[-1]
    targets = _targets(logits, labels, label_smoothing, num_targets)
    if target_threshold:
        least = label_smoothing / num_targets
        most = 1 - label_smoothing + least
        if not least <= target_threshold < most:
            raise ConfigError(
                f"target_threshold={target_threshold} with label_smoothing="
                f"{label_smoothing}: the targets are {least:g} and {most:g}; choose a "
                "threshold between them"
            )
        targets = tf.cast(targets > target_threshold, logits.dtype)
    if pos_weights is None:
        terms = tf.nn.sigmoid_cross_entropy_with_logits(targets, logits)
    else:
        factors = tf.constant(pos_weights, logits.dtype)
        terms = tf.nn.weighted_cross_entropy_with_logits(targets, logits, factors)
    if class_weights is not None:
        terms *= tf.constant(class_weights, logits.dtype)
    return tf.reduce_mean(terms, axis=-1)


def with_uniform_targets(loss_fn: LossFn) -> LossFn:
    """Return a loss in which images of no class have uniform targets.

    Their label is the number of classes, and the labels of mixed images sum to the
    share of images of a class. Source: outlier exposure (Hendrycks et al. 2019,
    arXiv:1812.04606).
    """

    def loss(logits, labels):
        num_classes = logits.shape[-1]
        if not labels.dtype.is_floating:
            labels = tf.one_hot(labels, num_classes)
        rest = 1 - tf.reduce_sum(labels, axis=-1, keepdims=True)
        return loss_fn(logits, labels + rest / num_classes)

    return loss


def distillation(
    loss_fn: LossFn, temperature: float, weight: float
) -> Callable[..., tf.Tensor]:
    """Return the weighted mean of a loss and the distillation loss (arXiv:1503.02531).

    It maps (logits, labels, a teacher's logits) to losses [n]. The distillation loss is
    temperature ** 2 times the divergence of the softmaxes of logits over the
    temperature.
    """

    def taught_loss(logits, labels, teacher_logits):
        loss = (1 - weight) * loss_fn(logits, labels)
        logits = _adjusted(logits, None)
        soft = tf.nn.log_softmax(logits / temperature)
        taught = tf.nn.log_softmax(tf.cast(teacher_logits, logits.dtype) / temperature)
        divergence = tf.reduce_sum(tf.exp(taught) * (taught - soft), axis=-1)
        return loss + weight * temperature**2 * divergence

    return taught_loss


def _adjusted(logits, adjustment):
    if logits.dtype in (tf.bfloat16, tf.float16):
        logits = tf.cast(logits, tf.float32)
    if adjustment is not None:
        logits += tf.constant(adjustment, logits.dtype)
    return logits


def _targets(logits, labels, label_smoothing, num_targets=None):
    """Return floats [n, num_classes], smoothed over `num_targets`, by default all."""
    num_classes = logits.shape[-1]
    if not labels.dtype.is_floating:
        labels = tf.one_hot(labels, num_classes, dtype=logits.dtype)
    targets = tf.cast(labels, logits.dtype) * (1 - label_smoothing)
    return targets + label_smoothing / (num_targets or num_classes)


class WeightDecay:
    """Penalties of the regularizers of trainable variables, as vectors of a layout."""

    def __init__(self, variables: Sequence[keras.Variable], layout: Layout):
        coefficients, self._others = [], []
        for number, variable in enumerate(variables):
            regularizer = variable.regularizer
            is_l2 = type(regularizer) is keras.regularizers.L2
            coefficients.append(2 * float(regularizer.l2) if is_l2 else 0.0)
            if regularizer is not None and not is_l2:
                self._others.append((number, regularizer))
        self._columns, self._layout = layout.columns(coefficients), layout

    def __call__(
        self, params: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the penalty, a scalar, and the gradients with its gradient added."""
        gradients, penalties = list(gradients), []
        pairs = zip(params, self._columns, strict=True)
        for number, (param, column) in enumerate(pairs):
            if isinstance(column, float) and column == 0:
                continue
            decay = tf.constant(column, param.dtype) * param
            gradients[number] += decay
            if isinstance(column, float):
                penalties.append(column * tf.nn.l2_loss(param))
            else:
                penalties.append(0.5 * tf.reduce_sum(param * decay))
        if self._others:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(params)
                views = self._layout.views(params)
                other = tf.add_n([penalty(views[i]) for i, penalty in self._others])
            penalties.append(other)
            for number, more in enumerate(tape.gradient(other, params)):
                if more is not None:
                    gradients[number] += more
        if not penalties:
            return tf.zeros([], params[0].dtype), gradients
        return tf.add_n(penalties), gradients


def pop_weight_decay(variables: list[keras.Variable]) -> tuple[float, ...]:
    """Remove the regularizers of variables; return the weight decay of each."""
    coefficients = []
    for variable in variables:
        regularizer, variable.regularizer = variable.regularizer, None
        if regularizer is None:
            coefficients.append(0.0)
        elif type(regularizer) is keras.regularizers.L2:
            coefficients.append(2 * float(regularizer.l2))
        else:
            raise ValueError(
                f"the penalty {type(regularizer).__name__} of {variable.path} is not "
                "weight decay, and the optimizer applies nothing else"
            )
    return tuple(coefficients)
