"""Parts of a run whose steps are traced apart: with small images, with less to learn.

In every phase the parameters are the same ones. What a step leaves out is known when it
is traced, so it costs nothing. A phase is called by its number.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf


class Phase(NamedTuple):
    """Steps that are alike.

    Attributes:
        end_step: the first step that is not of it; infinite for the last phase.
        model: the network for images of the size that they have here; its variables are
            those of the other phases' by name, shape and order.
        frozen: names of parameters whose learning rate is zero from here on. Their
            gradient counts as zero, with that of weight decay, and is not computed.
    """

    end_step: float
    model: keras.Model
    frozen: frozenset[str] = frozenset()


def phases_of(phases: Sequence[Phase], model: keras.Model) -> list[Phase]:
    """The phases, or the only one of a run whose steps are all alike."""
    return list(phases) or [Phase(math.inf, model)]


def phase_at(phases: Sequence[Phase], step: int) -> int:
    """The number of the phase that a step, 0 for the first one, belongs to."""
    return next(i for i, phase in enumerate(phases) if step < phase.end_step)


def steps_within(phases: Sequence[Phase], step: int, num_steps: int) -> tuple[int, int]:
    """The phase of a step, and how many of the steps from there on belong to it."""
    phase = phase_at(phases, step)
    return phase, int(min(num_steps, phases[phase].end_step - step))


def image_size(model: keras.Model) -> tuple[int, int]:
    """Height and width of the images that a network takes."""
    [height_and_width] = [x.shape[1:3] for x in model.inputs if x.name == "images"]
    return tuple(height_and_width)


def resize_to_phase(
    batch: Mapping[str, tf.Tensor], model: keras.Model
) -> dict[str, tf.Tensor]:
    """The batch with images of the size that the network takes."""
    if tuple(batch["images"].shape[1:3]) == image_size(model):
        return dict(batch)
    return dict(batch) | {"images": shrunk(batch["images"], *image_size(model))}


def shrunk(images: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Images [n, height, width, channels] of a smaller size.

    Every new pixel is a mean with triangular weights that reach as far as one new pixel
    is wide, to both sides, as in TensorFlow's antialiased bilinear `tf.image.resize`;
    written as two matrix products, which run wherever the network does.

    Raises:
        ValueError: the images are not larger.
    """
    if not (height <= images.shape[1] and width <= images.shape[2]):
        raise ValueError(
            f"images of shape {images.shape} cannot be shrunk to {height}x{width}"
        )
    down = tf.constant(_weights(images.shape[1], height), images.dtype)
    across = tf.constant(_weights(images.shape[2], width), images.dtype)
    return tf.einsum("yh,nhwc,xw->nyxc", down, images, across)


def _weights(length: int, smaller: int) -> np.ndarray:
    """float64 [smaller, length]: what each pixel adds to each new one."""
    scale = length / smaller
    centres = (np.arange(smaller)[:, None] + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(length) - centres) / scale)
    return weights / weights.sum(axis=1, keepdims=True)


def zero_frozen(
    gradients: Sequence[tf.Tensor], names: Sequence[str], frozen: frozenset[str]
) -> list[tf.Tensor]:
    """The gradients, zeros in place of those of frozen parameters. What led to those
    is then used by nothing, and so left out of the graph."""
    kept = []
    for gradient, name in zip(gradients, names, strict=True):
        if name in frozen:
            with tf.device(gradient.device):
                gradient = tf.zeros_like(gradient)
        kept.append(gradient)
    return kept
