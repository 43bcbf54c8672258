"""Networks of stock Keras layers that compute what the layers of towers do."""

import math
from collections.abc import Callable

import keras
import numpy as np
from keras import layers, ops

from towers.config import choices
from towers.data.augment import TUTORIAL_SIZE
from towers.errors import ConfigError
from towers.evaluation import RestoredRun
from towers.models import keras_settings
from towers.models.activations import Gelu
from towers.models.check import IMAGES
from towers.models.convolution import PointwiseConv2D, SameConv2D
from towers.models.layers import (
    BatchNormalization,
    Dropout,
    GroupedConv2D,
    LocalResponseNormalization,
    PadChannels,
    channel_bands,
)
from towers.models.stock_layers import LayerScale, ReverseChannels
from towers.models.whitening import Whitening

# Of a tensor of a network that is being built.
Call = Callable[[keras.KerasTensor], keras.KerasTensor]


def stock_network(model: keras.Model) -> keras.Model:
    """The same network in float32, its layers of towers replaced by stock ones.

    Dropout draws its own noise, so that images are the only input. Names, regularizers,
    trained values, and whether a layer is `trainable`, stay. What is fixed here and
    there, the filters of a whitening with their bias, and the sums of a local response
    normalization, are convolutions that are not trained. Layers of the user stay as
    they are.

    Args:
        model: from preprocessed images, and noise, to logits, as
            `RestoredRun.network` gives it.
    """
    made: dict[int, Call] = {}  # a layer may be called several times

    def call(layer, *args, **kwargs):
        if not isinstance(layer, layers.Layer):
            return layer(*args, **kwargs)  # an operation of keras.ops
        if id(layer) not in made:
            made[id(layer)] = _replacement(layer)
        if isinstance(layer, Dropout):
            [[x, _]] = args
            return made[id(layer)](x)
        return made[id(layer)](*args, **kwargs)

    with keras_settings():
        clone = keras.models.clone_model(
            model,
            input_tensors=model.input,
            clone_function=lambda layer: layer,
            call_function=call,
        )
        [images] = [x for x in clone.inputs if x.name == IMAGES]
        [logits] = clone.outputs
        return keras.Model(images, logits, name=model.name)


def _replacement(layer: layers.Layer) -> Call:
    """What to call in place of a layer; its variables get the layer's values."""
    make = _MAKE.get(type(layer))
    if make is not None:
        return make(layer)
    if _is_stock(layer):
        return _with_values(
            type(layer).from_config(_settings(layer)), layer.get_weights()
        )
    return layer


def _with_values(layer: layers.Layer, values: list[np.ndarray]) -> Call:
    """A layer that takes its values when it is first called, which makes its
    variables."""

    def call(*args, **kwargs):
        is_built = layer.built
        outputs = layer(*args, **kwargs)
        if not is_built:
            layer.set_weights(values)
        return outputs

    return call


def _settings(layer, *left_out):
    """The config of a layer in float32, without initializers that are not stock ones:
    the values are known."""
    settings = layer.get_config() | {"dtype": "float32"}
    for name in list(settings):
        is_initializer = name.endswith("_initializer")
        if name in left_out or (is_initializer and _is_ours(settings[name])):
            del settings[name]
    return settings


def _is_ours(serialized):
    return str(serialized.get("registered_name") or "").startswith("towers>")


def _batch_normalization(layer):
    stock = layers.BatchNormalization.from_config(_settings(layer, "is_frozen"))
    stock.trainable = layer.trainable and not layer.is_frozen
    return _with_values(stock, layer.get_weights())


def _pointwise_convolution(layer):
    stock = layers.Conv2D.from_config(_settings(layer))
    return _with_values(stock, layer.get_weights())


def _same_convolution(layer):
    settings = _settings(layer, "before_pool", "device_kind")
    return _with_values(layers.Conv2D(padding="same", **settings), layer.get_weights())


def _grouped_convolution(layer):
    """As many groups as channels are a depthwise convolution, fewer are convolutions
    side by side: what Keras makes of groups on a CPU, only XLA can execute."""
    filters, groups = layer.filters, layer.groups
    settings, [kernel, *bias] = (
        _settings(layer, "filters", "groups"),
        layer.get_weights(),
    )
    if groups == filters and kernel.shape[2] == 1:
        for name in ("initializer", "regularizer", "constraint"):
            settings[f"depthwise_{name}"] = settings.pop(f"kernel_{name}", None)
        kernel = kernel.reshape(*kernel.shape[:2], filters, 1)
        return _with_values(
            layers.DepthwiseConv2D.from_config(settings), [kernel, *bias]
        )
    names = [f"{layer.name}_{i}" for i in range(1, groups + 1)]
    if groups == 1:
        names = [layer.name]
    parts = zip(
        *(np.split(values, groups, -1) for values in (kernel, *bias)), strict=True
    )
    calls = [
        _with_values(
            layers.Conv2D.from_config(
                settings | {"filters": filters // groups, "name": name}
            ),
            list(values),
        )
        for name, values in zip(names, parts, strict=True)
    ]
    return lambda x: ops.concatenate(
        [call(y) for call, y in zip(calls, ops.split(x, groups, -1), strict=True)], -1
    )


def _whitening(layer):
    bias, kernel = layer.get_weights()
    stock = layers.Conv2D(
        kernel.shape[-1], layer.size, trainable=False, name=layer.name
    )
    return _with_values(stock, [kernel, bias])


def _local_response_normalization(layer):
    """The sums over neighboring channels are a 1x1 convolution."""
    channels = layer.output.shape[-1]
    sizes = [channels], 0, layer.depth_radius, layer.groups
    [band] = channel_bands(*sizes, "float32")
    kernel = layer.alpha * band.numpy()[None, None]
    sums = _with_values(
        layers.Conv2D(channels, 1, trainable=False, name=f"{layer.name}_sums"),
        [kernel, np.full(channels, layer.bias, np.float32)],
    )
    return lambda x: ops.multiply(x, ops.power(sums(ops.square(x)), -layer.beta))


def _pad_channels(layer):
    return lambda x: ops.pad(x, [[0, 0]] * 3 + [[layer.before, layer.after]])


def _layer_scale(layer):
    """A factor for every channel is a depthwise convolution of one pixel."""
    [gamma] = layer.get_weights()
    settings = {"name": layer.name, "trainable": layer.trainable}
    stock = layers.DepthwiseConv2D(1, use_bias=False, **settings)
    return _with_values(stock, [gamma.reshape(1, 1, -1, 1)])


_MAKE = {
    BatchNormalization: _batch_normalization,
    Dropout: lambda layer: layers.Dropout(layer.rate, name=layer.name),
    Gelu: lambda layer: layers.Activation("gelu", name=layer.name),
    GroupedConv2D: _grouped_convolution,
    LayerScale: _layer_scale,
    LocalResponseNormalization: _local_response_normalization,
    PadChannels: _pad_channels,
    PointwiseConv2D: _pointwise_convolution,
    ReverseChannels: lambda layer: lambda x: ops.flip(x, -1),
    SameConv2D: _same_convolution,
    Whitening: _whitening,
}


def with_preprocessing(network: keras.Model, run: RestoredRun) -> keras.Model:
    """From uint8 images [n, *run.image_shape] to logits, of stock layers alone.

    The network, from preprocessed images, is one layer of it under its own name.

    Raises:
        ConfigError: a layer, or the preprocessing, is in a file of the user.
    """
    if choices.find("augment", run.config.augment).is_in_a_file:
        raise ConfigError(
            f"format=keras: the preprocessing of augment={run.config.augment} is no "
            "stock layer of Keras; --format=saved_model, tflite and onnx can hold it"
        )
    for layer in network._flatten_layers():
        if not _is_stock(layer) or isinstance(layer, layers.Lambda):
            raise ConfigError(
                f"format=keras: layer {layer.name!r} of model={run.config.model} is "
                f"{type(layer).__name__}, no stock layer of Keras, so that the file "
                "would not load elsewhere; --format=saved_model, tflite and onnx can "
                "hold it"
            )
    with keras_settings():
        images = keras.Input(run.image_shape, dtype="uint8", name=IMAGES)
        preprocess = _each_by_itself if run.config.augment == "tutorial" else _alike
        return keras.Model(images, network(preprocess(images, run)), name="classifier")


def _alike(images, run):
    """`augment.standardize`, with the moments of the training images."""
    return layers.Normalization(
        mean=run.mean,
        variance=[(x or 1) ** 2 for x in run.deviation],
        name="standardize",
    )(images)


def _each_by_itself(images, run):
    """The middle of an image as `tf.image.per_image_standardization` gives it."""
    edges = [length - TUTORIAL_SIZE for length in run.image_shape[:2]]
    edges = [(edge // 2, edge - edge // 2) for edge in edges]
    x = layers.Cropping2D(edges, name="crop")(images)
    x = ops.cast(x, "float32")
    mean = ops.mean(x, [1, 2, 3], keepdims=True)
    deviation = ops.std(x, [1, 2, 3], keepdims=True)
    return (x - mean) / ops.maximum(deviation, 1 / math.sqrt(math.prod(x.shape[1:])))


def _is_stock(layer):
    return type(layer).__module__.partition(".")[0] == "keras"
