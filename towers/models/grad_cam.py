"""Grad-CAM: maps of where a network finds a class (Selvaraju et al. 2017)."""

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

from towers.keras_internals import calls_of, last_operation, run_through_graph
from towers.models.layers.attention import Attention


def grad_cam(
    model: keras.Model, inputs: tf.Tensor, classes: np.ndarray
) -> np.ndarray | None:
    """Return heat maps of classes, float32 [n, rows, columns] from 0 to 1.

    The activations are those of the last layer with a height and a width
    (arXiv:1610.02391). In a Vision Transformer they are the patches that enter the last
    attention: after it a class token no longer reads them.

    Args:
        model: from images to logits [n, num_classes], without inputs of noise.
        inputs: preprocessed images [n, height, width, channels].
        classes: bool [n, num_classes]; of several, the sum of their logits counts.

    Returns:
        The maps, divided by their maxima; None if no layer has a height and a width.
    """
    if (cells := _cells(model)) is None:
        return None
    layer, grid = last_operation(cells[0]), cells[1]

    def watched(operation):
        def call(*args, **kwargs):
            outputs.append(operation(*args, **kwargs))
            tape.watch(outputs[-1])
            return outputs[-1]

        return call if operation is layer else operation

    outputs: list[tf.Tensor] = []
    # Layers before the activations are not recorded.
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        logits = run_through_graph(model, inputs, watched)
        chosen = tf.reduce_sum(tf.where(classes, logits, tf.zeros_like(logits)), 1)
    shape = len(inputs), -1, outputs[0].shape[-1]
    activations, gradients = (
        tf.reshape(tf.cast(x, tf.float32), shape)[:, -math.prod(grid) :]
        for x in (outputs[0], tape.gradient(chosen, outputs[0]))
    )
    weights = tf.reduce_mean(gradients, 1, keepdims=True)
    maps = tf.nn.relu(tf.reduce_sum(weights * activations, -1))
    maps = tf.math.divide_no_nan(maps, tf.reduce_max(maps, 1, keepdims=True))
    return np.nan_to_num(maps.numpy()).reshape(-1, *grid)


def _cells(model):
    """Return a symbolic tensor and the rows and columns of its last cells."""
    cells, sources = None, {}
    for call in calls_of(model):
        output, source = call.outputs[0], call.input_tensors[0]
        sources[id(output)] = source
        if len(output.shape) == 4 and max(output.shape[1:3]) > 1:
            cells = output, output.shape[1:3]
        elif cells and isinstance(call.operation, Attention):
            cells = sources[id(source)], cells[1]  # before the dense layer of queries
        elif cells and isinstance(call.operation, keras.layers.MultiHeadAttention):
            cells = source, cells[1]
    return cells


def enlarged(heat: np.ndarray, size: Sequence[int], box: Sequence[float]) -> np.ndarray:
    """Return a map at the pixels of an image, float32 of the size (height, width).

    The map covers a box (top, left, height, width) of the image; it is 0 elsewhere.
    """
    top, left, height, width = box
    x, y = heat.shape[1] / width, heat.shape[0] / height
    return np.asarray(
        Image.fromarray(heat).transform(
            (size[1], size[0]),
            Image.Transform.AFFINE,
            (x, 0, -left * x, 0, y, -top * y),
            Image.Resampling.BILINEAR,
        )
    )


def overlay(pixels: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Return an image in gray with a map in red, uint8 [height, width, 3].

    `pixels` are uint8 [height, width, channels], the map is [height, width].
    """
    heat = heat[..., None]
    gray = pixels.mean(-1, keepdims=True)
    return (gray * (1 - 0.6 * heat) + 0.6 * heat * [255, 40, 0]).astype(np.uint8)
