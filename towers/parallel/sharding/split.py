"""The channel split of a network over the devices of a group.

Every convolution and dense layer computes a share of its output channels on each
device; channelwise layers act on the local slice. The layer of a shard is built from
the `get_config()` of the full one, with its share of the outputs.
"""

import keras
import tensorflow as tf
from keras import layers, tree

from towers.errors import ConfigError
from towers.models.layers import core, normalization
from towers.models.layers.attention import Attention, Prefix, Tokens
from towers.parallel.reduce import shares

# Layers whose outputs are split, and the field with the number of outputs.
SPLIT = {
    layers.Conv2D: "filters",
    core.Conv2D: "filters",
    core.SameConv2D: "filters",
    core.StandardizedConv2D: "filters",
    core.StandardizedSameConv2D: "filters",
    core.GroupedConv2D: "filters",
    layers.Dense: "units",
    core.Dense: "units",
}

# Layers that compute every channel independently.
CHANNELWISE = (
    layers.ReLU,
    layers.LeakyReLU,
    layers.MaxPooling2D,
    layers.AveragePooling2D,
    layers.Cropping1D,
    layers.Cropping2D,
    layers.GlobalAveragePooling1D,
    layers.GlobalAveragePooling2D,
    layers.GlobalMaxPooling2D,
    layers.ZeroPadding2D,
    layers.BatchNormalization,
    layers.Add,
    layers.Multiply,
    core.Dropout,
    core.Gelu,
)

# Layers for which `Walk` fetches channels of other shards.
WALKED = (
    normalization.LocalResponseNormalization,
    core.PadChannels,
    layers.Flatten,
    layers.Concatenate,
)

# Elementwise activation functions.
ELEMENTWISE = frozenset(
    "linear relu relu6 leaky_relu gelu silu hard_silu elu selu tanh sigmoid "
    "hard_sigmoid softplus".split()
)


def channel_slice(tensor, shard: int, num_shards: int):
    """Return a shard's slice of the last axis of a tensor or array."""
    if num_shards == 1:
        return tensor
    sizes = shares(tensor.shape[-1], num_shards)
    first = sum(sizes[:shard])
    return tensor[..., first : first + sizes[shard]]


def _name_of_activation(layer):
    function = layer.activation
    return getattr(function, "__name__", type(function).__name__)


def check_channel_axis(layer: keras.Operation, option: str) -> None:
    """Raise ConfigError if batch normalization is not over the last axis."""
    axes = layer.axis if isinstance(layer.axis, list) else [layer.axis]
    if axes not in ([-1], [len(layer.input.shape) - 1]):
        why = f"layer {layer.name} normalizes over axis {layer.axis}, not the channels"
        raise ConfigError(f"{option}: {why}")


def normalizes_channels(layer: keras.Operation) -> bool:
    """Return whether a layer needs moments over all channels; a subclass may differ."""
    kinds = layers.LayerNormalization, normalization.FusedLayerNormalization
    return type(layer) in kinds and not layer.rms_scaling


class Shards:
    """The layers of each shard of a model; ConfigError if one cannot be split."""

    def __init__(self, model: keras.Model, num_shards: int):
        self.num_shards = num_shards
        self._layers: dict[str, list[keras.Operation]] = {}
        if num_shards == 1:
            return
        unsplit = {id(x) for x in model.inputs}
        with tf.device("CPU:0"):
            for layer in model.operations:
                if isinstance(layer, layers.InputLayer):
                    continue
                if _acts_on(layer, unsplit):
                    self._layers[layer.name] = [layer] * num_shards
                    unsplit |= {id(x) for x in tree.flatten(layer.output)}
                else:
                    self._layers[layer.name] = self._split(layer)

    def of(self, layer: keras.Operation, shard: int) -> keras.Operation:
        """Return the layer of a shard for a layer of the full network."""
        if self.num_shards == 1:
            return layer
        return self._layers[layer.name][shard]

    def _split(self, layer):
        if field := SPLIT.get(type(layer)):
            return self._split_outputs(layer, field)
        if isinstance(layer, layers.BatchNormalization) or normalizes_channels(layer):
            check_channel_axis(layer, f"group_size={self.num_shards}")
            return self._split_variables(layer)
        if isinstance(layer, core.LayerScale | Prefix | Tokens):
            return self._split_variables(layer)
        if type(layer) is layers.GroupNormalization:
            check_channel_axis(layer, f"group_size={self.num_shards}")
            _check_columns(layer, layer.groups, self.num_shards)
            return self._split_variables(layer, groups=layer.groups // self.num_shards)
        if isinstance(layer, Attention):
            heads, rest = divmod(layer.heads, self.num_shards)
            if rest:
                why = f"has {layer.heads} heads, which the devices do not divide"
                raise _refusal(layer, self.num_shards, why)
            return [_built(layer, None, heads=heads)] * self.num_shards
        is_local = isinstance(layer, normalization.LocalResponseNormalization)
        if is_local and layer.groups > 1:
            # The groups of channels are divided among the shards.
            _check_columns(layer, layer.groups, self.num_shards)
            groups = layer.groups // self.num_shards
            return [_built(layer, layer.input.shape, groups=groups)] * self.num_shards
        if isinstance(layer, layers.Activation):
            is_channelwise = _name_of_activation(layer) in ELEMENTWISE
        else:
            is_channelwise = isinstance(layer, (*CHANNELWISE, *WALKED))
        if is_channelwise:
            return [layer] * self.num_shards
        why = f"({type(layer).__name__}) cannot be split by channels; choose another"
        raise _refusal(layer, self.num_shards, f"{why} --model or --strategy")

    def _split_outputs(self, layer, field):
        count, shape = self.num_shards, list(layer.input.shape)
        outputs, groups = getattr(layer, field), getattr(layer, "groups", 1)
        if outputs < count:
            raise _refusal(layer, count, f"has {outputs} outputs, fewer than devices")
        is_depthwise = groups == outputs == shape[-1]
        if not is_depthwise:
            _check_columns(layer, groups, count)
        activation = _name_of_activation(layer)
        if activation not in ELEMENTWISE:
            why = f"has the activation {activation}, which needs all channels"
            raise _refusal(layer, count, why)
        _check_regularizers(layer, count)
        shards = []
        for size in shares(outputs, count):
            changes = {field: size}
            if groups > 1:
                changes["groups"] = size if is_depthwise else groups // count
                shape[-1] = size if is_depthwise else layer.input.shape[-1] // count
            shards.append(_built(layer, shape, **changes))
        return shards

    def _split_variables(self, layer, **changes):
        """Split variables that have an entry for each channel."""
        *outer, channels = layer.input.shape
        sizes, shards = shares(channels, self.num_shards), []
        for shard, size in enumerate(sizes):
            if isinstance(layer, Tokens):
                changes = {"first": sum(sizes[:shard]), "channels": channels}
            shards.append(_built(layer, [*outer, size], **changes))
        return shards


def _refusal(layer, num_shards, why):
    return ConfigError(f"group_size={num_shards}: layer {layer.name} {why}")


def _built(layer, input_shape, **changes):
    """Build a layer of the same configuration but for some changes."""
    built = type(layer).from_config(layer.get_config() | changes)
    built.build(input_shape)
    return built


def _acts_on(layer, unsplit):
    """Return whether a layer has no variables, and its inputs are not split."""
    has_variables = isinstance(layer, keras.Layer) and layer.variables
    inputs = tree.flatten(layer.input)
    return not has_variables and all(id(x) in unsplit for x in inputs)


def _check_columns(layer, groups, count):
    if groups > 1 and groups % count:
        why = f"has {groups} groups of channels, which the devices do not divide"
        raise _refusal(layer, count, why)


def _check_regularizers(layer, count):
    """Raise ConfigError if penalties of shards do not add up to the whole penalty."""
    sums = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    for variable in layer.trainable_variables:
        penalty = variable.regularizer
        if penalty is not None and not isinstance(penalty, sums):
            why = f"has the regularizer {type(penalty).__name__} of {variable.name}"
            raise _refusal(layer, count, f"{why}, which needs the whole variable")
