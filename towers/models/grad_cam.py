"""Heat maps of where a network finds a class."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

from towers.keras_internals import calls_of, last_operation, run_through_graph
from towers.models.layers.attention import Attention


def class_maps(
    model: keras.Model, inputs: tf.Tensor, classes: np.ndarray
) -> np.ndarray | None:
    """Return heat maps of classes, float32 [n, rows, columns] from 0 to 1.

    They are Grad-CAM (Selvaraju et al. 2017, arXiv:1610.02391) of the last layer with a
    height and a width, and of a Vision Transformer attention rollout weighted by
    gradients (Chefer et al. 2021, arXiv:2103.15679).

    Args:
        model: from images to logits [n, num_classes], without inputs of noise.
        inputs: preprocessed images [n, height, width, channels].
        classes: bool [n, num_classes]; of several, the sum of their logits counts.

    Returns:
        The maps, divided by their maxima; None if no layer has a height and a width.
    """
    attentions: list[Attention] = []
    last: Any = None
    for call in calls_of(model):
        shape = call.outputs[0].shape
        if len(shape) == 4 and max(shape[1:3]) > 1:
            last, attentions = call.outputs[0], []
        elif last is not None and isinstance(call.operation, Attention):
            attentions.append(call.operation)
    if last is None:
        return None
    if attentions:  # one image at a time, as the weights of all layers are kept
        compute, size, watched = _rollout, 1, attentions
    else:
        compute, size, watched = _grad_cam, len(inputs), [last_operation(last)]
    maps = [
        compute(
            *_gradients(model, inputs[i : i + size], classes[i : i + size], watched)
        )
        for i in range(0, len(inputs), size)
    ]
    flat = np.nan_to_num(np.concatenate(maps))[:, -math.prod(last.shape[1:3]) :]
    most = flat.max(1, keepdims=True)
    flat = np.divide(flat, most, out=np.zeros_like(flat), where=most > 0)
    return flat.reshape(-1, *last.shape[1:3])


def _gradients(model, inputs, classes, watched):
    """Return watched activations, or attention weights, and their gradients."""
    values: list[tf.Tensor] = []

    def watch(value):
        tape.watch(value)
        values.append(value)

    def replace(operation):
        def call(*args, **kwargs):
            if isinstance(operation, Attention):
                return operation.call(*args, watch=watch)
            output = operation(*args, **kwargs)
            watch(output)
            return output

        return call if operation in watched else operation

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        logits = run_through_graph(model, inputs, replace)
        chosen = tf.reduce_sum(tf.where(classes, logits, tf.zeros_like(logits)))
    gradients = tape.gradient(chosen, values)
    return [[tf.cast(x, tf.float32).numpy() for x in y] for y in (values, gradients)]


def _grad_cam(activations, gradients):
    """Return maps [n, cells] of activations [n, rows, columns, channels]."""
    weights = gradients[-1].mean((1, 2))
    maps = np.maximum(np.einsum("nhwc,nc->nhw", activations[-1], weights), 0)
    return maps.reshape(len(maps), -1)


def _rollout(attentions, gradients):
    """Return maps [1, tokens] of attention weights [1, heads, tokens, tokens]."""
    relevance = identity = np.eye(attentions[0].shape[-1], dtype=np.float32)
    for attention, gradient in zip(attentions, gradients, strict=True):
        weights = np.maximum(attention * gradient, 0).mean((0, 1))
        relevance = relevance + weights @ relevance
    is_read = weights.any(1)  # the class token alone, or all patches
    rows = (relevance - identity)[is_read]
    return rows.mean(0, keepdims=True) if len(rows) else relevance[:1] * 0


def enlarged(heat: np.ndarray, size: Sequence[int], box: Sequence[float]) -> np.ndarray:
    """Return a map at the pixels of an image, float32 of the size (height, width).

    The map covers a box (top, left, height, width) of the image; it is 0 elsewhere.
    """
    top, left, height, width = box
    x, y = heat.shape[1] / width, heat.shape[0] / height
    places = (x, 0, -left * x, 0, y, -top * y)
    options = Image.Transform.AFFINE, places, Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(heat).transform((size[1], size[0]), *options))


def overlay(pixels: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Return an image in gray with a map in red, uint8 [height, width, 3].

    `pixels` are uint8 [height, width, channels], the map is [height, width].
    """
    heat = heat[..., None]
    gray = pixels.mean(-1, keepdims=True)
    mixed = gray * (1 - 0.6 * heat) + 0.6 * heat * [255, 40, 0]
    return np.rint(mixed).astype(np.uint8)
