"""Grad-CAM: the places of an image that speak for a class (Selvaraju et al. 2017,
arXiv:1610.02391)."""

import keras
import numpy as np
import tensorflow as tf
from PIL import Image


def activation_maps(
    model: keras.Model, inputs: tf.Tensor, classes: np.ndarray
) -> np.ndarray | None:
    """float32 [n, h, w] from 0 to 1: the activations of the last layer of a Functional
    model with height and width, weighted by the mean gradients of the logits `classes`
    [n]. None where no layer before the logits has a height and a width."""
    outputs = [layer.output for layer in model.layers if _is_spatial(layer)]
    if not outputs:
        return None
    network = keras.Model(model.inputs, [outputs[-1], model.outputs[0]])
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        activations, logits = network(inputs, training=False)
        chosen = tf.gather(logits, classes, batch_dims=1)
    gradients = tf.cast(tape.gradient(chosen, activations), tf.float32)
    weights = tf.reduce_mean(gradients, [1, 2], keepdims=True)
    maps = tf.nn.relu(tf.reduce_sum(weights * tf.cast(activations, tf.float32), -1))
    most = tf.reduce_max(maps, [1, 2], keepdims=True)
    return tf.math.divide_no_nan(maps, most).numpy()


def _is_spatial(layer):
    is_input = isinstance(layer, keras.layers.InputLayer)
    output = getattr(layer, "output", None)
    has_one = isinstance(output, keras.KerasTensor) and len(output.shape) == 4
    return has_one and not is_input and max(output.shape[1:3]) > 1


def overlay(pixels: np.ndarray, activation_map: np.ndarray) -> np.ndarray:
    """An image in gray with a map in red, uint8 [height, width, 3], from uint8 [height,
    width, channels] and float32 [h, w] from 0 to 1."""
    height, width, _ = pixels.shape
    size = width, height
    heat = Image.fromarray(activation_map).resize(size, Image.Resampling.BILINEAR)
    heat = np.clip(np.asarray(heat), 0, 1)[..., None]
    gray = pixels.mean(-1, keepdims=True).repeat(3, -1)
    return (gray * (1 - 0.6 * heat) + 0.6 * heat * [255, 40, 0]).astype(np.uint8)
