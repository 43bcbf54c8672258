"""Networks of stock Keras layers that compute the same as towers' own layers."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from towers.build.restored import RestoredRun
from towers.config import choices
from towers.data.augment.augmentation import TUTORIAL_SIZE
from towers.errors import ConfigError
from towers.keras_internals import layers_of, run_through_graph
from towers.models.keras.applications import ReverseChannels
from towers.models.keras.networks import IMAGES
from towers.models.keras.noise import WithNoise
from towers.models.layers import core, normalization
from towers.models.layers.attention import (
    Attention,
    Prefix,
    Tokens,
    WindowAttention,
    attention,
    rotated,
)
from towers.models.layers.core import Dropout, Gelu, GroupedConv2D, PadChannels
from towers.models.layers.cpu_kernels import channel_bands
from towers.models.variables import keras_settings
from towers.models.zoo.speedrun import Whitening


def stock_network(model: keras.Model) -> keras.Model:
    """Return a network of stock Keras layers with the same names and values."""

    @functools.cache  # a layer may be called several times
    def replacement(layer):
        if isinstance(layer, WithNoise):
            inner = replacement(layer.layer)
            return lambda inputs, **_: layer.call_of(inner, inputs)
        return _replacement(layer)

    def replace(operation):
        is_layer = isinstance(operation, layers.Layer)
        return replacement(operation) if is_layer else operation

    with keras_settings():
        logits = run_through_graph(model, model.input, replace)
        [images] = (x for x in model.inputs if x.name == IMAGES)
        return keras.Model(images, logits, name=model.name)


def _replacement(layer: layers.Layer) -> Callable:
    if type(layer) in _REPLACEMENTS:
        return _REPLACEMENTS[type(layer)](layer)
    if _package(type(layer)) not in ("keras", "towers"):
        return layer
    if type(layer).__name__ == "LayerScale":  # Keras' LayerScale is not public
        return _layer_scale(layer)
    return _of_keras(layer)


def _package(layer_class):
    return layer_class.__module__.partition(".")[0]


def _of_keras(layer, values=None):
    stock, settings = _class_and_settings(layer)
    return _with_values(stock.from_config(settings), values or layer.get_weights())


def _standardized(layer):
    kernel, *bias = layer.get_weights()
    return _of_keras(layer, [core.standardized(kernel).numpy(), *bias])


def _class_and_settings(layer):
    """Return the Keras class of a layer and its float32 settings."""
    stock = next(cls for cls in type(layer).__mro__ if _package(cls) == "keras")
    settings = stock.get_config(layer)
    settings = {k: v for k, v in settings.items() if "towers>" not in str(v)}
    is_trained = not normalization.is_frozen(layer)
    return stock, settings | {"dtype": "float32", "trainable": is_trained}


def _with_values(layer: layers.Layer, values: Sequence[np.ndarray]) -> Callable:
    """Return a function that calls a layer, and sets its values at the first call."""

    def call(*args, **kwargs):
        is_built = layer.built
        outputs = layer(*args, **kwargs)
        if not is_built:
            layer.set_weights(values)
            if isinstance(layer, layers.Normalization):
                layer.finalize_state()  # it computes with copies
        return outputs

    return call


def _dropout(layer):
    x, noise = layer.input
    shape = None if noise.shape == x.shape else (None, *noise.shape[1:])
    stock = layers.Dropout(layer.rate, noise_shape=shape, name=layer.name)
    return lambda inputs, **_: stock(inputs[0])  # without the noise


def _grouped_convolution(layer):
    """Return parallel convolutions: Keras' grouped one needs XLA on a CPU."""
    if layer.groups == 1:
        return _of_keras(layer)
    stock, settings = _class_and_settings(layer)
    groups, filters = settings.pop("groups"), settings.pop("filters")
    kernel, *bias = layer.get_weights()
    is_depthwise = groups == filters and kernel.shape[2] == 1
    if is_depthwise and layer.strides[0] == layer.strides[1]:
        for name in ("initializer", "regularizer", "constraint"):
            settings[f"depthwise_{name}"] = settings.pop(f"kernel_{name}", None)
        kernel = kernel.reshape(*kernel.shape[:2], filters, 1)
        return _with_values(layers.DepthwiseConv2D(**settings), [kernel, *bias])
    settings["filters"] = filters // groups
    parts = zip(*(np.split(x, groups, -1) for x in (kernel, *bias)), strict=True)
    calls = [
        _with_values(stock.from_config(settings | {"name": f"{layer.name}_{i}"}), part)
        for i, part in enumerate(parts, 1)
    ]
    return lambda x: ops.concatenate(
        [call(y) for call, y in zip(calls, ops.split(x, groups, -1), strict=True)], -1
    )


def _whitening(layer):
    bias, kernel = layer.get_weights()
    filters, settings = kernel.shape[-1], {"trainable": False, "name": layer.name}
    return _with_values(layers.Conv2D(filters, layer.size, **settings), [kernel, bias])


def _local_response_normalization(layer):
    """Return a normalization whose sums over channels are a 1x1 convolution."""
    channels, settings = layer.output.shape[-1], {"name": f"{layer.name}_sums"}
    [band] = channel_bands([channels], 0, layer.depth_radius, layer.groups, "float32")
    values = [layer.alpha * band.numpy()[None, None], np.full(channels, layer.bias)]
    sums = _with_values(layers.Conv2D(channels, 1, trainable=False, **settings), values)
    return lambda x: ops.multiply(x, ops.power(sums(ops.square(x)), -layer.beta))


def _tokens(layer):
    """Return an embedding, or a dense layer whose kernel is the class token."""
    settings = {"name": f"{layer.name}_reshape"}
    reshape = layers.Reshape([-1, layer.output.shape[-1]], **settings)
    if layer.positions == "none":
        return reshape
    table = np.array(layer.table)
    if not layer.has_class_token:
        is_trained = layer.trainable and layer.positions == "learned"
        rows = _rows(layer, table, trainable=is_trained)
        return lambda x: ops.add(y := reshape(x), rows(y))
    settings = {"name": layer.name, "trainable": layer.trainable, "bias_axes": "tc"}
    dense = layers.EinsumDense("nti,ic->ntc", table.shape, **settings)
    positions = _with_values(dense, layer.get_weights())
    before = [[0, 0], [1, 0], [0, 0]]

    def call(x):
        x = ops.pad(reshape(x), before)
        is_token = ops.pad(ops.zeros_like(x[:, 1:, :1]), before, constant_values=1)
        return x + positions(is_token)

    return call


def _window_attention(layer):
    """Return attention whose biases are an embedding of the distances of pixels."""
    size, settings = layer.size, {"trainable": layer.trainable, "name": layer.name}
    embedding = layers.Embedding(size**2, layer.heads, **settings)
    biases_of = _with_values(embedding, layer.get_weights())

    def call(x):
        places = ops.cumsum(ops.ones_like(x[:1, :size, 0, 0]), 1)
        apart = ops.abs(ops.transpose(places) - places)
        rows = size * ops.reshape(apart, [size, 1, size, 1])
        pairs = rows + ops.reshape(apart, [1, size, 1, size])
        pairs = ops.reshape(ops.cast(pairs, "int32"), [size**2, size**2])
        return layer.attend(x, ops.transpose(biases_of(pairs), [2, 0, 1]), attention)

    return call


def _rows(layer, table, **settings):
    """Return a function of [n, tokens, channels] to an embedding [n, *table.shape]."""
    settings = {"name": layer.name, "trainable": layer.trainable} | settings
    embedding = _with_values(layers.Embedding(*table.shape, **settings), [table])
    places = np.arange(len(table), dtype="int32")
    return lambda x: embedding(ops.cast(ops.zeros_like(x[:, :1, 0]), "int32") + places)


def _prefix(layer):
    rows = _rows(layer, *layer.get_weights())
    return lambda x: ops.concatenate([rows(x), x], 1)


def _attention(layer):
    rows = None
    if layer.grid:
        rows = _rows(layer, layer.angles(layer.input), trainable=False)

    def call(inputs):
        if rows:
            inputs = rotated(inputs, rows(inputs[0]), layer.heads)
        return attention(*inputs, heads=layer.heads)

    return call


def _channel_scale(layer, gamma, *beta):
    """Return a depthwise 1x1 convolution that scales and shifts each channel."""
    settings = {"trainable": layer.trainable, "use_bias": bool(beta)}
    convolution = layers.DepthwiseConv2D(1, name=layer.name, **settings)
    return _with_values(convolution, [gamma.reshape(1, 1, -1, 1), *beta])


def _layer_scale(layer):
    scale = _channel_scale(layer, *layer.get_weights())
    if len(layer.input.shape) == 4:
        return scale
    return lambda x: ops.squeeze(scale(ops.expand_dims(x, 1)), 1)


def _response(layer):
    scale = _channel_scale(layer, *layer.get_weights())
    return lambda x: ops.add(x, scale(normalization.response(x)))


def _layer_normalization(layer):
    """Return Keras' layer, of images one pixel high or wide on a matrix.

    tf2onnx 1.17.0 transposes such images wrongly for it.
    """
    normalize, shape = _of_keras(layer), layer.output.shape[1:]
    if layer.axis != [-1] or 1 not in shape[:-1]:
        return normalize
    matrix = [-1, shape[-1]]
    return lambda x: ops.reshape(normalize(ops.reshape(x, matrix)), [-1, *shape])


_REPLACEMENTS = {
    Attention: _attention,
    Dropout: _dropout,
    normalization.FusedLayerNormalization: _layer_normalization,
    Gelu: lambda layer: layers.Activation("gelu", name=layer.name),
    normalization.GlobalResponseNormalization: _response,
    GroupedConv2D: _grouped_convolution,
    layers.LayerNormalization: _layer_normalization,
    normalization.LocalResponseNormalization: _local_response_normalization,
    PadChannels: lambda layer: (
        lambda x: ops.pad(x, [[0, 0]] * 3 + [[layer.before, layer.after]])
    ),
    Prefix: _prefix,
    ReverseChannels: lambda layer: lambda x: ops.flip(x, -1),
    core.StandardizedConv2D: _standardized,
    core.StandardizedSameConv2D: _standardized,
    Tokens: _tokens,
    Whitening: _whitening,
    WindowAttention: _window_attention,
}


def with_preprocessing(network: keras.Model, run: RestoredRun) -> keras.Model:
    """Return stock layers from images to logits, or raise ConfigError."""
    augment, model, info = run.config.augment, run.config.model, run.dataset_info
    foreign = [
        f"layer {layer.name!r} of model={model} is {type(layer).__name__}"
        for layer in layers_of(network)
        if _package(type(layer)) != "keras" or isinstance(layer, layers.Lambda)
    ]
    if choices.find("augment", augment).is_in_a_file:
        foreign = [f"the preprocessing is augment={augment}"]
    if foreign:
        way = "--format=saved_model, tflite and onnx can hold it"
        raise ConfigError(f"format=keras: {foreign[0]}, not a layer of Keras; {way}")
    with keras_settings():
        images = keras.Input(run.image_shape, dtype=run.dtype, name=IMAGES)
        scaled = images
        if not run.pixels.is_photo:
            low, high = np.array(run.pixels.low), np.array(run.pixels.high)
            scaled = (ops.cast(images, "float32") - low) * (255 / (high - low))
            scaled = ops.clip(scaled, 0.0, 255.0)
        if augment == "tutorial":
            inputs = _standardized_by_itself(scaled)
        else:
            mean, variance = info.mean, [(x or 1) ** 2 for x in info.std]
            standardize = layers.Normalization(-1, mean, variance, name="standardize")
            inputs = standardize(scaled)
        return keras.Model(images, network(inputs), name="classifier")


# Arguments that Keras 3.4.1 lacks, with their defaults in Keras 3.15.1.
_NEWER_ARGUMENTS = {
    **dict.fromkeys(("antialias", "optional", "ragged", "renorm", "use_gate"), False),
    **dict.fromkeys(("flash_attention", "sliding_window", "quantization_config")),
    **dict.fromkeys(("input_axes", "output_axes", "output_padding", "renorm_clipping")),
    "renorm_momentum": 0.99,
}


def config_for_older_keras(config: Any) -> Any:
    """Return a serialized network without newer arguments that have their defaults."""
    if isinstance(config, (list, tuple)):
        return [config_for_older_keras(x) for x in config]
    if not isinstance(config, dict):
        return config
    config = {
        key: config_for_older_keras(value)
        for key, value in config.items()
        if key not in _NEWER_ARGUMENTS or value != _NEWER_ARGUMENTS[key]
    }
    # Older operations have no names; those given at loading must not be a layer's.
    nodes = config.get("layers", ())
    operations = [x for x in nodes if ".ops." in (x["module"] or "")]
    names = {_without_number(x["name"]) for x in nodes if x not in operations}
    for operation in operations:
        if _without_number(operation["name"]) not in names:
            operation["config"].pop("name", None)
    return config


def _without_number(name):
    return re.sub(r"_\d+$", "", name)


def _standardized_by_itself(images):
    """Return `tf.image.per_image_standardization` of the center of each image."""
    edges = [length - TUTORIAL_SIZE for length in images.shape[1:3]]
    edges = [(edge // 2, edge - edge // 2) for edge in edges]
    x = layers.Cropping2D(edges, name="crop")(images)
    x = ops.cast(x, "float32")
    mean = ops.mean(x, [1, 2, 3], keepdims=True)
    std = ops.std(x, [1, 2, 3], keepdims=True)
    return (x - mean) / ops.maximum(std, 1 / math.sqrt(math.prod(x.shape[1:])))
