"""Gradients of a network over a grid of devices.

This is for the two cases that must inspect a network: synchronized batch normalization
(groups meet in every normalization) and the channel split (a group of devices holds one
network). The devices form a grid: groups, data-parallel to each other, by shards, each
with its slice of one network. A tower on one device is a group of one.
"""

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from towers.cluster.workers import ALONE, Workers
from towers.models.layers.normalization import is_frozen, ramping
from towers.optim.losses import mean_loss
from towers.optim.phases import Phase, resize_to_phase
from towers.parallel.copies import NetworkLayout
from towers.parallel.reduce import in_dtype
from towers.parallel.sharding.device_tape import DeviceTape
from towers.parallel.sharding.slices import combined_moments
from towers.parallel.sharding.split import Shards, check_channel_axis
from towers.parallel.sharding.walker import Walk
from towers.parallel.tower import (
    LossFn,
    TowerResult,
    check_complete,
    count_correct,
    loss_targets,
    unscaled,
)


class ShardedNetwork:
    """A network over a grid of devices, [group][shard], in each of the workers; it has
    the functions of `WholeNetwork`. With `sync_batch_norm` the groups share the moments
    of batch normalization. `batch_size` are the images of a (micro-)batch over all
    workers. A layer that cannot be split, or normalized so, is a ConfigError."""

    def __init__(
        self,
        phases: Sequence[Phase],
        loss_fn: LossFn,
        layouts: Sequence[NetworkLayout],
        grid: Sequence[Sequence[str]],
        sync_batch_norm: bool = False,
        workers: Workers = ALONE,
        batch_size: int = 0,
        teach: Callable = lambda batch, tower: batch,
    ):
        self._phases, self._loss_fn, self._teach = phases, loss_fn, teach
        self._layouts, self._grid = layouts, grid
        self._workers, self._batch_size = workers, batch_size
        self._combine_moments = None
        if sync_batch_norm and len(grid) * workers.size > 1:
            self._combine_moments = functools.partial(
                combined_moments, workers=workers, batch_size=batch_size
            )
        models = dict.fromkeys(phase.model for phase in phases)
        for layer in (x for model in models for x in model.layers):
            is_norm = isinstance(layer, keras.layers.BatchNormalization)
            if self._combine_moments and is_norm and not is_frozen(layer):
                check_channel_axis(layer, "batch_norm=sync")
        self._shards = {model: Shards(model, len(grid[0])) for model in models}
        # Activations and their gradients that cross devices in the phase with most.
        self.transferred_bytes = 0

    def gradients(self, phase, fetched, batches, loss_scale=None):
        model, frozen = self._phases[phase].model, self._phases[phase].frozen
        tape, batches = DeviceTape(), list(batches)
        walk = self._walk(model, fetched, tape, training=True)
        for group, devices in enumerate(self._grid):
            with tf.device(devices[0]):
                batch = self._teach(batches[group], group)
                batches[group] = resize_to_phase(batch, model)
        with tf.device(self._grid[0][0]):
            limit = fetched[0].ramp()
        with ramping(limit):
            logits = walk.forward(batches)

        # The loss of each group, on its first device.
        factors = self._loss_factors(batches, loss_scale)
        targets, losses, correct = [], [], []
        for group, batch in enumerate(batches):
            device = self._grid[group][0]
            with tf.device(device):
                labels = tf.identity(batch["labels"])

            def loss_of(logits, batch=batch | {"labels": labels}):
                losses = self._loss_fn(logits, *loss_targets(batch))
                return mean_loss(losses, logits, batch.get("sample_weights"))

            [loss] = tape.apply(device, loss_of, [logits[group]])
            with tf.device(device):
                targets.append((loss, in_dtype(factors[group], loss.tensor.dtype)))
                correct.append(
                    count_correct(self._loss_fn, logits[group].tensor, labels)
                )
            losses.append(loss.tensor)

        # Backward through all groups at once.
        tape.backward(targets)
        num_bytes = sum(x.shape.num_elements() * x.dtype.size for x in tape.moved)
        self.transferred_bytes = max(self.transferred_bytes, num_bytes)
        results = []
        for group, devices in enumerate(self._grid):
            for shard, device in enumerate(devices):
                layout, state = self._layouts[shard], walk.state[group][shard]
                with tf.device(device):
                    gradients = [x.gradient() for x in walk.params[group][shard]]
                    check_complete(gradients, layout, frozen)
                    gradients = [
                        tf.zeros(place.shape, layout.params.specs[place.vector].dtype)
                        if name in frozen
                        else gradient
                        for (name, place), gradient in zip(
                            layout.params.places.items(), gradients, strict=True
                        )
                    ]
                    vectors = layout.params.pack(gradients)
                    factor = factors[group]
                    if isinstance(factor, tf.Tensor) or factor != 1:
                        vectors = unscaled(vectors, factor)
                    state = layout.pack_state(state)
                results.append(
                    TowerResult(vectors, *state, losses[group], correct[group])
                )
        return results

    def logits(self, fetched, batches):
        walk = self._walk(self._phases[-1].model, fetched, DeviceTape(), training=False)
        return [value.tensor for value in walk.forward(batches)]

    def _walk(self, model, fetched, tape, training):
        size, variables = len(self._grid[0]), []
        for group in range(len(fetched) // size):
            variables.append([])
            for shard, layout in enumerate(self._layouts):
                values = fetched[group * size + shard]
                with tf.device(self._grid[group][shard]):
                    params = layout.params.views(values.params)
                    variables[-1].append((params, layout.state_views(values)))
        shards, combine_moments = self._shards[model], self._combine_moments
        return Walk(
            model, shards, self._grid, combine_moments, variables, tape, training
        )

    def _loss_factors(self, batches, loss_scale):
        """Per group the factor on its loss: its weight in the mean over the groups, 1
        where they are equal, times the loss scale. The gradients are divided by it."""
        sizes = [batch["labels"].shape[0] for batch in batches]
        whole = sum(sizes) if self._workers.size == 1 else self._batch_size
        num_groups = len(sizes) * self._workers.size
        factors = [size / whole * num_groups for size in sizes]
        for group, devices in enumerate(self._grid):
            if loss_scale is not None:
                with tf.device(devices[0]):
                    factors[group] *= loss_scale
        return factors
