"""Gradients of a network over a grid of devices.

Two cases must inspect a network: synchronized batch normalization (towers share moments
in every normalization) and the channel split (a group of devices holds one network).
The devices form a grid: groups, data-parallel to each other, by shards, each with its
slice of one network. A tower on one device is a group of one.
"""

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.models.layers.normalization import is_frozen, ramping
from towers.optim.losses import LossFn, mean_loss
from towers.optim.phases import Phase, resize_to_phase
from towers.parallel.copies import NetworkLayout
from towers.parallel.recompute import segments, single_segment
from towers.parallel.reduce import in_dtype, on_each
from towers.parallel.sharding import slices, split
from towers.parallel.sharding.device_tape import DeviceTape
from towers.parallel.sharding.split import Shards
from towers.parallel.sharding.walk import Walk
from towers.parallel.towers import (
    Teacher,
    TowerResult,
    check_complete,
    count_correct,
    loss_targets,
    unscaled,
)
from towers.parallel.workers import SINGLE_WORKER, Workers


class SplitTowers:
    """A network over a grid of devices, [group][shard], with the interface of `Towers`.

    With `sync_batch_norm` the groups share the moments of batch normalization.
    `batch_size` counts the images of a micro-batch over all workers. ConfigError if a
    layer cannot be split, or normalized so.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        loss_fn: LossFn,
        layouts: Sequence[NetworkLayout],
        grid: Sequence[Sequence[str]],
        sync_batch_norm: bool = False,
        workers: Workers = SINGLE_WORKER,
        batch_size: int = 0,
        teacher: Teacher | None = None,
        recompute: bool = False,
    ):
        self._phases, self._loss_fn, self._teacher = phases, loss_fn, teacher
        self._layouts, self._grid = layouts, grid
        self._workers, self._batch_size = workers, batch_size
        self._combine_moments = None
        if sync_batch_norm and len(grid) * workers.size > 1:
            self._combine_moments = functools.partial(
                slices.combined_moments, workers=workers, batch_size=batch_size
            )
        models = dict.fromkeys(phase.model for phase in phases)
        for layer in (x for model in models for x in model.layers):
            is_norm = isinstance(layer, keras.layers.BatchNormalization)
            if self._combine_moments and is_norm and not is_frozen(layer):
                split.check_channel_axis(layer, "batch_norm=sync")
        self._shards = {model: Shards(model, len(grid[0])) for model in models}
        cut = segments if recompute else single_segment
        self._segments = {model: cut(model) for model in models}
        # Bytes of activations and gradients that cross devices, maximum over phases.
        self.transferred_bytes = 0

    def gradients(
        self, phase, fetched, batches, loss_scale=None, first_tower=0
    ) -> list[TowerResult]:
        """Return the part of each device in the results, see `Towers.gradients`."""
        model, frozen = self._phases[phase].model, self._phases[phase].frozen
        tape, batches = DeviceTape(), list(batches)
        walk = self._walk(model, fetched, tape, training=True)
        for group, devices in enumerate(self._grid):
            with tf.device(devices[0]):
                if self._teacher:
                    batches[group] = self._teacher(batches[group], group)
                batches[group] = resize_to_phase(batches[group], model)
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
                right = count_correct(self._loss_fn, logits[group].tensor, labels)
                correct.append(right)
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
                    for index, (name, place) in enumerate(layout.params.places.items()):
                        if name in frozen:
                            dtype = layout.params.specs[place.vector].dtype
                            gradients[index] = tf.zeros(place.shape, dtype)
                    vectors = layout.params.pack(gradients)
                    factor = factors[group]
                    if isinstance(factor, tf.Tensor) or factor != 1:
                        vectors = unscaled(vectors, factor)
                    state = layout.pack_state(state)
                result = TowerResult(vectors, *state, losses[group], correct[group])
                results.append(result)
        return results

    def logits(self, fetched, batches) -> list[tf.Tensor]:
        """Return the logits of each group's share, see `Towers.logits`."""
        walk = self._walk(self._phases[-1].model, fetched, DeviceTape(), training=False)
        return [value.tensor for value in walk.forward(batches)]

    def _walk(self, model, fetched, tape, training):
        shards, combine = self._shards[model], self._combine_moments
        parts = self._segments[model] if training else single_segment(model)
        grid, layouts = self._grid, self._layouts
        return Walk(
            model, parts, shards, grid, layouts, fetched, combine, tape, training
        )

    def _loss_factors(self, batches, loss_scale):
        """Return the factor on the loss of each group; gradients are divided by it.

        It is the weight in the mean over groups, 1 if they are equal, times the scale.
        """
        sizes = [batch["labels"].shape[0] for batch in batches]
        num_images = sum(sizes) if self._workers.size == 1 else self._batch_size
        num_groups = len(sizes) * self._workers.size
        factors = [size / num_images * num_groups for size in sizes]
        if loss_scale is None:
            return factors
        leads = [devices[0] for devices in self._grid]
        return on_each(lambda factor: factor * loss_scale, leads, factors)
