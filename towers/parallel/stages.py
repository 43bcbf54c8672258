"""Parts of a run whose steps are compiled apart: with small images, with less to learn.

In every stage the parameters are the same ones. What is left out of a step's
computation is known when it is compiled, so it costs nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf


class Stage(NamedTuple):
    """Steps that are compiled in one.

    Attributes:
        end_step: the first step that is not of it; infinite for the last stage.
        model: the network for images of the size that they have here; its variables are
            those of the other stages' by name, shape and order.
        frozen: names of parameters whose learning rate is zero from here on. The
            gradient of the loss counts as zero for them, and is not computed.
    """

    end_step: float
    model: keras.Model
    frozen: frozenset[str] = frozenset()


def only_stage(model: keras.Model) -> Stage:
    """That of a run whose steps are all alike."""
    return Stage(math.inf, model)


def stage_at(stages: Sequence[Stage], step: int) -> int:
    """The number of the stage that a step, 0 for the first one, belongs to."""
    return next(i for i, stage in enumerate(stages) if step < stage.end_step)


def image_size(model: keras.Model) -> tuple[int, int]:
    """Height and width of the images that a network takes."""
    return _image_shape(model)[:2]


def _image_shape(model):
    [shape] = [tuple(x.shape[1:]) for x in model.inputs if x.name == "images"]
    return shape


def fitted(batch: Mapping[str, tf.Tensor], model: keras.Model) -> dict[str, tf.Tensor]:
    """The batch with its images shrunk to the size that the network takes."""
    if tuple(batch["images"].shape[1:]) == _image_shape(model):
        return dict(batch)
    return dict(batch) | {"images": shrunk(batch["images"], *image_size(model))}


def shrunk(images: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Images [n, height, width, channels] of a smaller size.

    Every new pixel is a mean with triangular weights that reach as far as one new pixel
    is wide, to both sides, as in TensorFlow's antialiased bilinear `tf.image.resize`;
    written as two matrix products, which run wherever the network does.
    """
    down = tf.constant(_weights(images.shape[1], height), images.dtype)
    across = tf.constant(_weights(images.shape[2], width), images.dtype)
    return tf.einsum("yh,nhwc,xw->nyxc", down, images, across)


def _weights(length: int, smaller: int) -> np.ndarray:
    """float64 [smaller, length]: what each pixel adds to each new one."""
    scale = length / smaller
    centres = (np.arange(smaller)[:, None] + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(length) - centres) / scale)
    return weights / weights.sum(axis=1, keepdims=True)


def without_frozen(
    gradients: Sequence[tf.Tensor], names: Sequence[str], frozen: frozenset[str]
) -> list[tf.Tensor]:
    """The gradients, zeros in place of those of frozen parameters. What led to those
    is then used by nothing, and so left out of the graph."""
    return [
        tf.zeros_like(gradient) if name in frozen else gradient
        for gradient, name in zip(gradients, names, strict=True)
    ]
