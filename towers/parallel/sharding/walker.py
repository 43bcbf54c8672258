"""A model's operations in topological order, with one value per device of the grid
that `walker` describes."""

import functools
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf
from keras import layers, tree

from towers.models.layers import LocalResponseNormalization, PadChannels
from towers.parallel.sharding import slices, split
from towers.parallel.sharding.device_tape import DeviceTape, Value
from towers.parallel.sharding.sync_batch_norm import combined_moments, normalized

# What one shard of one group computes with: parameters and model state, in the model's
# order, on the shard's device.
ShardValues = tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]


def _places_of(model):
    """Layer name -> the places of its parameters and of its state in the model's."""
    places = {id(v): i for i, v in enumerate(model.trainable_variables)}
    state_places = {id(v): i for i, v in enumerate(model.non_trainable_variables)}
    return {
        layer.name: (
            [places[id(v)] for v in layer.trainable_variables],
            [state_places[id(v)] for v in layer.non_trainable_variables],
        )
        for layer in model.layers
    }


class Spread:
    """A tensor of the network in all groups.

    Attributes:
        values: [group][shard].
        whole: whether every shard has all channels, or each its slice of the last axis.
    """

    def __init__(self, values: list[list[Value]], whole: bool):
        self.values = values
        self.whole = whole


class Walk:
    """One walk through a model: forward on a tape, collecting the new state.

    Args:
        model: a Functional model.
        shards: how its layers are split inside a group.
        devices: [group][shard] names.
        sync_batch_norm: whether groups share the moments of batch normalisation.
        variables: [group][shard], of as many of the groups as have images.
        tape: what records, for the gradients.
        training: whether layers behave as in training.

    Attributes:
        params: [group][shard] the parameters as values on the tape.
        state: [group][shard] the model state, after the walk the new one.
    """

    def __init__(
        self,
        model: keras.Model,
        shards: split.Shards,
        devices: Sequence[Sequence[str]],
        sync_batch_norm: bool,
        variables: Sequence[Sequence[ShardValues]],
        tape: DeviceTape,
        training: bool,
    ):
        self._model, self._shards, self._tape = model, shards, tape
        self._devices = devices[: len(variables)]
        self._training, self._sync = training, sync_batch_norm
        self._places = _places_of(model)
        self.params = [
            [
                [Value(param, device, differentiable=training) for param in params]
                for (params, _), device in zip(of_group, devices, strict=True)
            ]
            for of_group, devices in zip(variables, self._devices, strict=True)
        ]
        self.state = [[list(state) for _, state in of_group] for of_group in variables]

    def forward(self, batches: Sequence[Mapping[str, tf.Tensor]]) -> list[Value]:
        """The logits of each group, as values on its first device."""
        inputs = [self._load(x, batches) for x in self._model.inputs]
        # Keras' own traversal: the same that runs the model on one device.
        logits = self._model._run_through_graph(
            inputs, operation_fn=lambda layer: functools.partial(self._visit, layer)
        )
        return [self._gathered(logits, group, [0])[0] for group in range(len(batches))]

    def _load(self, x, batches):
        """An input of the model, on every device."""
        values = []
        for batch, devices in zip(batches, self._devices, strict=True):
            tensor = batch.get(x.name)
            if tensor is None:  # an evaluation has no noise, and needs none
                tensor = tf.zeros([tf.shape(batch["images"])[0], *x.shape[1:]], x.dtype)
            values.append([])
            for device in devices:
                with tf.device(device):
                    own = tf.cast(tf.identity(tensor), x.dtype)
                    values[-1].append(Value(own, device))
        return Spread(values, whole=True)

    # One operation.

    def _visit(self, layer, *args, **kwargs):
        spreads = [x for x in tree.flatten((args, kwargs)) if isinstance(x, Spread)]
        if type(layer) in split.SPLIT:
            if split.needs_all_inputs(layer):
                spreads = [self._whole(spreads[0])]
            else:
                spreads = [self._sliced(spreads[0])]
            whole = self._shards.num_shards == 1
        elif isinstance(layer, layers.Flatten):
            # Slices of channels are not neighbours once flattened.
            spreads, whole = [self._whole(spreads[0])], True
        elif split.reads_neighbours(layer) and not spreads[0].whole:
            function = _ON_SLICES[type(layer)]
            values = [function(self._tape, layer, x) for x in spreads[0].values]
            return Spread(values, whole=False)
        else:
            whole = all(x.whole for x in spreads)
            if self._shards.of(layer, 0) is not layer:  # made for slices
                whole = False
            if not whole:
                spreads = [self._sliced(x) for x in spreads]
        if isinstance(layer, layers.BatchNormalization) and self._sync:
            if self._training:
                return self._synchronized(layer, spreads[0])
        values = [
            [
                self._call(layer, group, shard, args, kwargs, spreads)
                for shard in range(len(devices))
            ]
            for group, devices in enumerate(self._devices)
        ]
        return Spread(values, whole)

    def _call(self, layer, group, shard, args, kwargs, spreads):
        """A layer on one device, on the tape."""
        own = self._shards.of(layer, shard)
        param_places, state_places = self._places.get(layer.name, ([], []))
        params = [self.params[group][shard][i] for i in param_places]
        state = [self.state[group][shard][i] for i in state_places]
        inputs = [spread.values[group][shard] for spread in spreads]

        def function(*tensors):
            given = iter(tensors[len(params) :])
            own_args, own_kwargs = tree.map_structure(
                lambda x: next(given) if isinstance(x, Spread) else x, (args, kwargs)
            )
            if not isinstance(own, keras.Layer):
                return own(*own_args, **own_kwargs)
            if split.takes_training(own):
                own_kwargs["training"] = self._training
            # Not `stateless_call`, which leaves out the casts to the layer's precision.
            variables = [*own.trainable_variables, *own.non_trainable_variables]
            values = [*tensors[: len(params)], *state]
            with keras.StatelessScope(zip(variables, values, strict=True)) as scope:
                output = own(*own_args, **own_kwargs)
                new_state = map(scope.get_current_value, own.non_trainable_variables)
                return [output, *new_state]

        device = self._devices[group][shard]
        output, *new_state = self._tape.apply(device, function, params + inputs)
        for place, value in zip(state_places, new_state, strict=True):
            self.state[group][shard][place] = value.tensor
        return output

    # Channels: whole tensors and slices of them.

    def _whole(self, spread):
        """The same tensor with all channels on every device."""
        if spread.whole:
            return spread
        return Spread(
            [
                self._gathered(spread, group, range(len(devices)))
                for group, devices in enumerate(self._devices)
            ],
            whole=True,
        )

    def _gathered(self, spread, group, shards):
        """All channels of a group's tensor on some of its devices."""
        if spread.whole:
            return [spread.values[group][shard] for shard in shards]
        found = []
        for shard in shards:
            device = self._devices[group][shard]
            moved = [self._tape.move(x, device) for x in spread.values[group]]
            found += self._tape.apply(device, slices.concatenated, moved)
        return found

    def _sliced(self, spread):
        """The same tensor with its own slice of the channels on every device."""
        if not spread.whole or self._shards.num_shards == 1:
            return spread
        values = []
        for of_group, devices in zip(spread.values, self._devices, strict=True):
            values.append([])
            for shard, (value, device) in enumerate(
                zip(of_group, devices, strict=True)
            ):
                cut = functools.partial(self._shards.slice, shard=shard)
                values[-1] += self._tape.apply(device, cut, [value])
        return Spread(values, whole=False)

    # Batch normalisation over all groups.

    def _synchronized(self, layer, spread):
        """Normalises with the moments of the whole batch; statistics move as in Keras,
        once."""
        values = [[] for _ in self._devices]
        for shard, home in enumerate(self._devices[0]):
            of_shard = [of_group[shard] for of_group in spread.values]
            combined = combined_moments(self._tape, of_shard, home)
            for group, value in enumerate(of_shard):
                values[group].append(
                    self._normalized(layer, group, shard, value, combined)
                )
        return Spread(values, spread.whole)

    def _normalized(self, layer, group, shard, value, moments):
        device = self._devices[group][shard]
        own = self._shards.of(layer, shard)
        param_places, state_places = self._places[layer.name]
        params = [self.params[group][shard][i] for i in param_places]
        moments = [self._tape.move(moment, device) for moment in moments]
        with tf.device(device):
            for place, moment in zip(state_places, moments, strict=True):
                before = self.state[group][shard][place]
                after = before * own.momentum + moment.tensor * (1 - own.momentum)
                self.state[group][shard][place] = after
        return normalized(self._tape, own, value, moments, params)


# Layers that read the slices of other devices, but not all channels.
_ON_SLICES = {
    LocalResponseNormalization: slices.local_response_normalization,
    PadChannels: slices.pad_channels,
}
