"""Images of a batch mixed with each other, and their labels in the same shares.

Mixing comes last, before a batch is split into micro-batches and towers, so that the
pairs do not depend on these.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from towers.data.augment.augmentation import choose
from towers.data.augment.distortions import rectangles
from towers.data.randomness import Draw

# (batch, draw) -> batch: "images" float32 [n, height, width, channels], "labels", from
# integers [n], or label sets, to float32 [n, num_classes], and "sample_weights".
Mix = Callable[[Mapping[str, tf.Tensor], Draw], dict[str, tf.Tensor]]

# A power of two, by which a number from [0, 1) is multiplied exactly.
NUM_QUANTILES = 4096


def create_mix(mixup: float, cutmix: float, num_classes: int) -> Mix | None:
    """Create a function that mixes each image with the one before it in the batch.

    `mixup` and `cutmix` are the parameters of the Beta distributions, 0 for none. With
    both, each image has one of the two, drawn by "mixing" [n]. None if both are 0.
    """
    ways = []
    if mixup:
        ways.append((mixup_shares, beta_quantiles(mixup)))
    if cutmix:
        ways.append((cutmix_shares, beta_quantiles(cutmix)))
    if not ways:
        return None

    def mix(batch, draw):
        images = batch["images"]
        shares = [shares_fn(images.shape, draw, table) for shares_fn, table in ways]
        pixels, whole = shares[0]
        if len(shares) > 1:
            first = draw("mixing", [images.shape[0]]) < 0.5
            pixels = tf.where(first[:, None, None, None], pixels, shares[1][0])
            whole = tf.where(first, whole, shares[1][1])
        labels, whole = batch["labels"], whole[:, None]
        if labels.shape.rank == 1:
            labels = tf.one_hot(labels, num_classes)
        mixed = {"images": blend(images, pixels), "labels": blend(labels, whole)}
        if "sample_weights" in batch:  # of each label its image's
            sample_weights = batch["sample_weights"][:, None]
            weighted = blend(labels * sample_weights, whole)
            weights = blend(sample_weights, whole)
            shares = tf.math.divide_no_nan(weighted, weights)
            mixed["labels"] = tf.where(weights > 0, shares, mixed["labels"])
            mixed["sample_weights"] = weights[:, 0]
        return mixed

    return mix


def blend(values: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
    """Mix each entry, float32 [n, ...], with the one before it, cyclically."""
    return (1 - shares) * values + shares * tf.roll(values, 1, axis=0)


def mixup_shares(
    shape: tf.TensorShape, draw: Draw, quantiles: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw the share of the other image for each image, by "mixup" [n].

    It is [n, 1, 1, 1] for pixels and [n] for labels (Zhang et al. 2017,
    arXiv:1710.09412).
    """
    shares = at_quantiles(quantiles, draw("mixup", [shape[0]]))
    return shares[:, None, None, None], shares


def cutmix_shares(
    shape: tf.TensorShape, draw: Draw, quantiles: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw a rectangle of the other image for each image, by "cutmix" [n, 3].

    Returns the shares of the pixels, 0 or 1, [n, height, width, 1], and of the labels,
    [n] (Yun et al. 2019, arXiv:1905.04899). The center is any pixel.
    """
    n, height, width, _ = shape
    share, row, column = tf.unstack(draw("cutmix", [n, 3]), axis=1)
    side = tf.sqrt(at_quantiles(quantiles, share))
    heights, widths = tf.floor(height * side), tf.floor(width * side)
    tops = choose(row, height) - tf.floor(heights / 2)
    lefts = choose(column, width) - tf.floor(widths / 2)
    masks = rectangles(tops, lefts, heights, widths, height, width)
    return masks, tf.reduce_mean(masks, [1, 2, 3])


def beta_quantiles(alpha: float) -> np.ndarray:
    """Return the quantiles k / NUM_QUANTILES of Beta(alpha, alpha), float32."""
    wanted = np.arange(NUM_QUANTILES + 1) / NUM_QUANTILES
    # Without these bounds a narrow distribution would get tails.
    wanted = np.clip(wanted, 2**-24, 1 - 2**-24)
    low, high = np.zeros_like(wanted), np.ones_like(wanted)
    with tf.device("CPU:0"):  # the same values for all kinds of devices
        parameter = tf.constant(alpha, tf.float64)
        for _ in range(60):
            middle = (low + high) / 2
            is_below = tf.math.betainc(parameter, parameter, middle).numpy() < wanted
            low = np.where(is_below, middle, low)
            high = np.where(is_below, high, middle)
    return high.astype(np.float32)


def at_quantiles(quantiles: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Draw from a distribution by uniform numbers, linear between quantiles."""
    positions = numbers * NUM_QUANTILES
    below = tf.floor(positions)
    index = tf.cast(below, tf.int64)
    first, second = tf.gather(quantiles, index), tf.gather(quantiles, index + 1)
    return first + (positions - below) * (second - first)
