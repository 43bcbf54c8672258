"""What a network is trained to make small."""

import keras
import tensorflow as tf


def cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0
) -> tf.Tensor:
    """Softmax cross-entropy of each image.

    The target is (1 - label_smoothing) on the label plus label_smoothing spread evenly
    over all classes (Szegedy et al. 2016, arXiv:1512.00567, section 7).

    Args:
        logits: floats [n, num_classes]; half-width ones are widened to float32 first.
        labels: integers [n].
        label_smoothing: in [0, 1).

    Returns:
        float32 (or float64) [n].
    """
    if logits.dtype in (tf.bfloat16, tf.float16):
        logits = tf.cast(logits, tf.float32)
    if label_smoothing == 0:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    targets = tf.one_hot(
        labels,
        logits.shape[-1],
        on_value=1 - label_smoothing,
        off_value=0.0,
        dtype=logits.dtype,
    )
    targets += label_smoothing / logits.shape[-1]
    return tf.nn.softmax_cross_entropy_with_logits(targets, logits)


def weight_decay(
    variables: list[keras.Variable], params: list[tf.Tensor]
) -> tf.Tensor | None:
    """The sum of the penalties that the network's own regularisers put on `params`.

    Args:
        variables: the network's trainable variables, asked for their regulariser only.
        params: the values to penalise, in the same order.

    Returns:
        A scalar, or None where no variable has a regulariser.
    """
    penalties = [
        _penalty(variable.regularizer, param)
        for variable, param in zip(variables, params, strict=True)
        if variable.regularizer is not None
    ]
    return tf.add_n(penalties) if penalties else None


def _penalty(regularizer, param):
    if type(regularizer) is keras.regularizers.L2:
        # One pass over the parameter, and one for the gradient, instead of five.
        return 2 * regularizer.l2 * tf.nn.l2_loss(param)
    return regularizer(param)
