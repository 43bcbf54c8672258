"""Loss functions: cross-entropy and weight decay."""

import keras
import tensorflow as tf


def cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0
) -> tf.Tensor:
    """Softmax cross-entropy of each image.

    The target is (1 - label_smoothing) times the label plus label_smoothing spread
    evenly over all classes (Szegedy et al. 2016, arXiv:1512.00567, section 7).

    Args:
        logits: floats [n, num_classes]; 16-bit ones are cast to float32 first.
        labels: integers [n], or of mixed images floats [n, num_classes] whose rows add
            up to 1.
        label_smoothing: in [0, 1).

    Returns:
        float32 (or float64) [n].
    """
    if logits.dtype in (tf.bfloat16, tf.float16):
        logits = tf.cast(logits, tf.float32)
    labels, num_classes = tf.convert_to_tensor(labels), logits.shape[-1]
    if labels.dtype.is_floating:
        targets = tf.cast(labels, logits.dtype) * (1 - label_smoothing)
    elif label_smoothing == 0:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    else:
        targets = tf.one_hot(
            labels, num_classes, 1 - label_smoothing, 0.0, dtype=logits.dtype
        )
    targets += label_smoothing / num_classes
    return tf.nn.softmax_cross_entropy_with_logits(targets, logits)


def weight_decay(
    variables: list[keras.Variable], params: list[tf.Tensor]
) -> tf.Tensor | None:
    """The sum of the penalties that the network's regularizers put on `params`.

    Args:
        variables: the network's trainable variables; only their regularizers are read.
        params: the values to penalize, in the same order.

    Returns:
        A scalar, or None where no variable has a regularizer.
    """
    penalties = [
        _penalty(variable.regularizer, param)
        for variable, param in zip(variables, params, strict=True)
        if variable.regularizer is not None
    ]
    return tf.add_n(penalties) if penalties else None


def add_weight_decay(
    variables: list[keras.Variable],
    params: list[tf.Tensor],
    gradients: list[tf.Tensor],
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """From the gradients of the mean loss to those with weight decay.

    Args:
        variables, params: as in `weight_decay`; the parameters may be variables, of
            which only those with a regularizer are read.
        gradients: in the same order.

    Returns:
        (weight decay, gradients); it is 0 where no variable has a regularizer.
    """
    places = [i for i, v in enumerate(variables) if v.regularizer is not None]
    if not places:
        return tf.zeros([], params[0].dtype), list(gradients)
    penalized = [tf.convert_to_tensor(params[i]) for i in places]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(penalized)
        decay = weight_decay([variables[i] for i in places], penalized)
    gradients = list(gradients)
    for i, more in zip(places, tape.gradient(decay, penalized), strict=True):
        if more is not None:
            gradients[i] += more
    return decay, gradients


def pop_weight_decay(variables: list[keras.Variable]) -> tuple[float, ...]:
    """Removes the weight decay from the loss, for an optimizer that applies it itself.

    Args:
        variables: the network's trainable variables; they lose their regularizers.

    Returns:
        Per variable the coefficient of half its sum of squares; 0 where none was asked.

    Raises:
        ValueError: a penalty is no weight decay.
    """
    coefficients = []
    for variable in variables:
        regularizer, variable.regularizer = variable.regularizer, None
        if regularizer is None:
            coefficients.append(0.0)
        elif type(regularizer) is keras.regularizers.L2:
            coefficients.append(2 * float(regularizer.l2))
        else:
            raise ValueError(
                f"the penalty {type(regularizer).__name__} of {variable.path} is no "
                "weight decay, and the optimizer applies nothing else"
            )
    return tuple(coefficients)


def _penalty(regularizer, param):
    if type(regularizer) is keras.regularizers.L2:
        # One pass over the parameter, and one for the gradient, instead of five.
        return 2 * regularizer.l2 * tf.nn.l2_loss(param)
    return regularizer(param)
