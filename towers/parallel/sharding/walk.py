"""A walk through a network, layer by layer, on a grid of devices."""

import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf
from keras import layers, tree

from towers.models.layers.core import Dropout, PadChannels
from towers.models.layers.normalization import LocalResponseNormalization, is_frozen
from towers.parallel.copies import NetworkLayout, Values
from towers.parallel.recompute import Segment, barrier
from towers.parallel.sharding import slices, split
from towers.parallel.sharding.device_tape import DeviceTape, Value
from towers.parallel.sharding.split import Shards
from towers.parallel.towers import model_input


@dataclasses.dataclass(frozen=True, eq=False)
class GridTensor:
    """A tensor of the network on all devices: `values` are [group][shard].

    If `replicated`, every shard has all channels, otherwise a slice of the last axis.
    """

    values: list[list[Value]]
    replicated: bool


def _each(function, grid):
    """Apply a function to each entry, [group][shard]."""
    return [list(map(function, group)) for group in grid]


class Walk:
    """A walk through a model in topological order, forward on a tape.

    `params` are values on the tape, [group][shard], and `state` is the new model state
    after the walk. `combine_moments` is None if groups do not share moments.
    """

    def __init__(
        self,
        model: keras.Model,
        segments: Sequence[Segment],
        shards: Shards,
        grid: Sequence[Sequence[str]],
        layouts: Sequence[NetworkLayout],
        fetched: Sequence[Values],
        combine_moments: Callable[..., list[Value]] | None,
        tape: DeviceTape,
        training: bool,
    ):
        self._model, self._shards, self._tape = model, shards, tape
        self._segments = segments
        self._devices = grid[: len(fetched) // len(layouts)]
        self._training, self._combine_moments = training, combine_moments
        variables = model.trainable_variables, model.non_trainable_variables
        index = {id(v): i for part in variables for i, v in enumerate(part)}
        # Layer name -> indices of its parameters, and of its state, in the model.
        self._indices = {
            layer.name: [
                [index[id(v)] for v in part]
                for part in (layer.trainable_variables, layer.non_trainable_variables)
            ]
            for layer in model.layers
        }
        self.params: list[list[list[Value]]] = []
        self.state: list[list[list[tf.Tensor]]] = []
        per_device = iter(fetched)
        for devices in self._devices:
            self.params.append([])
            self.state.append([])
            for device, layout in zip(devices, layouts, strict=True):
                values = next(per_device)
                with tf.device(device):
                    views = layout.params.views(values.params)
                    self.state[-1].append(layout.state_views(values))
                params = [Value(x, device, differentiable=training) for x in views]
                self.params[-1].append(params)

    def forward(self, batches: Sequence[Mapping[str, tf.Tensor]]) -> list[Value]:
        """Return the logits of each group, on its first device."""
        tensors = {id(x): self._load(x, batches) for x in self._model.inputs}
        for segment in self._segments:
            call = self._run if segment is self._segments[-1] else self._recomputed
            inputs = [tensors[id(x)] for x in segment.inputs]
            logits = tensors[id(segment.output)] = call(segment, inputs)
        return [self._gather(logits, group, [0])[0] for group in range(len(batches))]

    def _run(self, segment, inputs):
        return segment(inputs, lambda layer: functools.partial(self._visit, layer))

    def _recomputed(self, segment, inputs):
        """Return the output of a segment without keeping its activations."""
        before = self.state

        def again(read, differentiable):
            """Walk again on another tape; return pairs of values here and there."""
            pairs, walk = [], copy.copy(self)

            def renew(value, tensor):
                kept = differentiable and value.differentiable
                pairs.append((value, Value(tensor, value.device, kept)))
                return pairs[-1][1]

            walk._tape, walk.state = DeviceTape(), _each(list, before)
            walk.params = _each(lambda x: [renew(v, v.tensor) for v in x], self.params)
            tensors = [
                GridTensor(_each(lambda v: renew(v, read(v)), x.values), x.replicated)
                for x in inputs
            ]
            result = walk._run(segment, tensors)
            self._tape.moved += walk._tape.moved
            return walk, result, pairs

        walk, result, _ = again(lambda value: value.tensor, differentiable=False)
        self.state = walk.state
        values = _each(lambda v: Value(v.tensor, v.device, True), result.values)

        def backward():
            outputs = [value for group in values for value in group if value.gradients]
            upstream = {value.device: value.gradient() for value in outputs}
            if not outputs:
                return

            def after(value):
                with tf.device(value.device):
                    first = upstream.get(value.device, outputs[0].gradient())
                    return barrier(first, [value.tensor])[0]

            walk, result, pairs = again(after, differentiable=True)
            results = [value for group in result.values for value in group]
            for value, there in zip(itertools.chain(*values), results, strict=True):
                there.gradients = value.gradients
            moved = len(walk._tape.moved)
            walk._tape.backward([])
            self._tape.moved += walk._tape.moved[moved:]
            for value, there in pairs:
                if there.gradients:
                    value.gradients.append(there.gradient())

        self._tape.record(backward)
        return GridTensor(values, result.replicated)

    def _load(self, x, batches):
        values = []
        for batch, devices in zip(batches, self._devices, strict=True):
            tensor = model_input(batch, x)
            values.append([])
            for device in devices:
                with tf.device(device):
                    copy = tf.cast(tf.identity(tensor), x.dtype)
                    values[-1].append(Value(copy, device))
        return GridTensor(values, replicated=True)

    def _visit(self, layer, *args, **kwargs):
        tensors = [x for x in tree.flatten((args, kwargs)) if isinstance(x, GridTensor)]
        is_local = type(layer) is LocalResponseNormalization and layer.groups == 1
        if type(layer) in split.SPLIT:
            reads_all = getattr(layer, "groups", 1) == 1
            tensors = [(self._replicate if reads_all else self._shard)(tensors[0])]
            replicated = self._shards.num_shards == 1
        elif isinstance(layer, layers.Flatten | layers.Concatenate | PadChannels):
            # Slices of channels are not contiguous afterwards.
            tensors, replicated = [self._replicate(x) for x in tensors], True
        elif is_local and not tensors[0].replicated:  # it reads neighboring channels
            normalize = slices.local_response_normalization
            values = [normalize(self._tape, layer, x) for x in tensors[0].values]
            return GridTensor(values, replicated=False)
        else:
            is_whole = self._shards.of(layer, 0) is layer
            replicated = is_whole and all(x.replicated for x in tensors)
            if not replicated:
                split_tensors, whole = tensors, []
                if isinstance(layer, Dropout) and layer.input[1].shape[-1] == 1:
                    # Noise per image, [n, 1, 1, 1], is broadcast to every slice.
                    split_tensors, whole = tensors[:1], tensors[1:]
                tensors = [*map(self._shard, split_tensors), *whole]
        if split.normalizes_channels(layer) and not replicated:
            return self._normalize_channels(layer, tensors[0])
        is_norm = isinstance(layer, layers.BatchNormalization) and self._training
        if is_norm and self._combine_moments is not None and not is_frozen(layer):
            return self._synchronize(layer, tensors[0])
        values = [
            [
                self._call(layer, group, shard, args, kwargs, tensors)
                for shard in range(len(devices))
            ]
            for group, devices in enumerate(self._devices)
        ]
        return GridTensor(values, replicated)

    def _call(self, layer, group, shard, args, kwargs, tensors):
        layer_shard = self._shards.of(layer, shard)
        param_indices, state_indices = self._indices.get(layer.name, ([], []))
        params = [self.params[group][shard][i] for i in param_indices]
        state = [self.state[group][shard][i] for i in state_indices]
        inputs = [tensor.values[group][shard] for tensor in tensors]

        def function(*values):
            inputs = iter(values[len(params) :])
            call_args, call_kwargs = tree.map_structure(
                lambda x: next(inputs) if isinstance(x, GridTensor) else x,
                (args, kwargs),
            )
            if not isinstance(layer_shard, keras.Layer):
                return layer_shard(*call_args, **call_kwargs)
            if "training" in inspect.signature(layer_shard.call).parameters:
                call_kwargs["training"] = self._training
            # Not `stateless_call`, which omits casts to the precision of the layer.
            state_variables = layer_shard.non_trainable_variables
            pairs = zip(
                [*layer_shard.trainable_variables, *state_variables],
                [*values[: len(params)], *state],
                strict=True,
            )
            with keras.StatelessScope(pairs) as scope:
                output = layer_shard(*call_args, **call_kwargs)
                return [output, *map(scope.get_current_value, state_variables)]

        device = self._devices[group][shard]
        output, *new_state = self._tape.apply(device, function, params + inputs)
        for index, value in zip(state_indices, new_state, strict=True):
            self.state[group][shard][index] = value.tensor
        return output

    def _replicate(self, tensor):
        """Return the tensor with all channels on every device."""
        if tensor.replicated:
            return tensor
        return GridTensor(
            [
                self._gather(tensor, group, range(len(devices)))
                for group, devices in enumerate(self._devices)
            ],
            replicated=True,
        )

    def _gather(self, tensor, group, shards):
        """Return all channels of a group's tensor on some of its devices."""
        if tensor.replicated:
            return [tensor.values[group][shard] for shard in shards]
        gathered = []
        for shard in shards:
            device = self._devices[group][shard]
            slices_here = [self._tape.move(x, device) for x in tensor.values[group]]
            gathered += self._tape.apply(device, slices.concatenated, slices_here)
        return gathered

    def _shard(self, tensor):
        """Return the tensor with a slice of the channels on every device."""
        count = self._shards.num_shards
        if not tensor.replicated or count == 1:
            return tensor
        values = []
        for group_values in tensor.values:
            values.append([])
            for shard, value in enumerate(group_values):
                cut = functools.partial(
                    split.channel_slice, shard=shard, num_shards=count
                )
                values[-1] += self._tape.apply(value.device, cut, [value])
        return GridTensor(values, replicated=False)

    # Normalization with moments from several devices.

    def _normalize_channels(self, layer, tensor):
        """Normalize with moments over the channels of all shards."""
        values = []
        for group, shards in enumerate(tensor.values):
            moments = slices.channel_moments(self._tape, shards)
            values.append([])
            for shard, value in enumerate(shards):
                values[group] += self._normalize(
                    layer, group, shard, value, moments[shard]
                )
        return GridTensor(values, replicated=False)

    def _synchronize(self, layer, tensor):
        """Normalize with moments of the whole batch."""
        values: list[list[Value]] = [[] for _ in self._devices]
        for shard, home in enumerate(self._devices[0]):
            groups = [group[shard] for group in tensor.values]
            moments = self._combine_moments(self._tape, groups, home)
            for group, value in enumerate(groups):
                device = value.device
                here = [self._tape.move(moment, device) for moment in moments]
                self._move_averages(layer, group, shard, here)
                values[group] += self._normalize(layer, group, shard, value, here)
        return GridTensor(values, tensor.replicated)

    def _move_averages(self, layer, group, shard, moments):
        """Update moving averages as Keras does, once per device."""
        _, state_indices = self._indices[layer.name]
        state = self.state[group][shard]
        with tf.device(self._devices[group][shard]):
            for index, moment in zip(state_indices, moments, strict=True):
                after = moment.tensor * (1 - layer.momentum)
                state[index] = state[index] * layer.momentum + after

    def _normalize(self, layer, group, shard, value, moments):
        param_indices, _ = self._indices[layer.name]
        params = [self.params[group][shard][i] for i in param_indices]

        def normalize(x, mean, variance, *params):
            params = list(params)
            scale = params.pop(0) if layer.scale else None
            offset = params.pop(0) if layer.center else None
            normal = tf.nn.batch_normalization(
                tf.cast(x, mean.dtype), mean, variance, offset, scale, layer.epsilon
            )
            return tf.cast(normal, layer.compute_dtype)

        return self._tape.apply(value.device, normalize, [value, *moments, *params])
