"""Gradients of a network over a grid of devices.

Two cases must inspect a network: synchronized batch normalization (towers share moments
in every normalization) and the channel split (a group of devices holds one network).
The devices form a grid: groups, data-parallel to each other, by shards, each with its
slice of one network. A tower on one device is a group of one.
"""

import dataclasses
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


@dataclasses.dataclass(eq=False)
class SplitTowers:
    """A network over a grid of devices, [group][shard], with the interface of `Towers`.

    With `sync_batch_norm` the groups share the moments of batch normalization.
    `batch_size` counts the images of a micro-batch over all workers. ConfigError if a
    layer cannot be split, or normalized so.
    """

    phases: Sequence[Phase]
    loss_fn: LossFn
    layouts: Sequence[NetworkLayout]
    grid: Sequence[Sequence[str]]
    sync_batch_norm: bool = False
    workers: Workers = SINGLE_WORKER
    batch_size: int = 0
    teacher: Teacher | None = None
    recompute: bool = False

    def __post_init__(self):
        options = {"workers": self.workers, "batch_size": self.batch_size}
        combine = functools.partial(slices.combined_moments, **options)
        combines = self.sync_batch_norm and len(self.grid) * self.workers.size > 1
        self._combine_moments = combine if combines else None
        models = dict.fromkeys(phase.model for phase in self.phases)
        for layer in (x for model in models for x in model.layers):
            is_norm = isinstance(layer, keras.layers.BatchNormalization)
            if self._combine_moments and is_norm and not is_frozen(layer):
                split.check_channel_axis(layer, "batch_norm=sync")
        self._shards = {model: Shards(model, len(self.grid[0])) for model in models}
        cut = segments if self.recompute else single_segment
        self._segments = {model: cut(model) for model in models}
        # Bytes of activations and gradients that cross devices, maximum over phases.
        self.transferred_bytes = 0

    def gradients(
        self, phase, fetched, batches, loss_scale=None, first_tower=0
    ) -> list[TowerResult]:
        """Return the part of each device in the results, see `Towers.gradients`."""
        model, frozen = self.phases[phase].model, self.phases[phase].frozen
        tape, batches = DeviceTape(), list(batches)
        walk = self._walk(model, fetched, tape, training=True)
        for group, devices in enumerate(self.grid):
            with tf.device(devices[0]):
                if self.teacher:
                    batches[group] = self.teacher(batches[group], group)
                batches[group] = resize_to_phase(batches[group], model)
        with tf.device(self.grid[0][0]):
            limit = fetched[0].ramp()
        with ramping(limit):
            logits = walk.forward(batches)

        # The loss of each group, on its first device.
        factors = self._loss_factors(batches, loss_scale)
        targets, losses, correct = [], [], []
        for group, batch in enumerate(batches):
            device = self.grid[group][0]
            with tf.device(device):
                labels = tf.identity(batch["labels"])

            def loss_of(logits, batch=batch | {"labels": labels}):
                losses = self.loss_fn(logits, *loss_targets(batch))
                return mean_loss(losses, logits, batch.get("sample_weights"))

            [loss] = tape.apply(device, loss_of, [logits[group]])
            with tf.device(device):
                targets.append((loss, in_dtype(factors[group], loss.tensor.dtype)))
                right = count_correct(self.loss_fn, logits[group].tensor, labels)
                correct.append(right)
            losses.append(loss.tensor)

        # Backward through all groups at once.
        tape.backward(targets)
        num_bytes = sum(x.shape.num_elements() * x.dtype.size for x in tape.moved)
        self.transferred_bytes = max(self.transferred_bytes, num_bytes)
        results = []
        for group, devices in enumerate(self.grid):
            for shard, device in enumerate(devices):
                layout, state = self.layouts[shard], walk.state[group][shard]
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
        walk = self._walk(self.phases[-1].model, fetched, DeviceTape(), training=False)
        return [value.tensor for value in walk.forward(batches)]

    def _walk(self, model, fetched, tape, training):
        shards, combine = self._shards[model], self._combine_moments
        parts = self._segments[model] if training else single_segment(model)
        grid, layouts = self.grid, self.layouts
        return Walk(
            model, parts, shards, grid, layouts, fetched, combine, tape, training
        )

    def _loss_factors(self, batches, loss_scale):
        """Return the factor on the loss of each group; gradients are divided by it.

        It is the weight in the mean over groups, 1 if they are equal, times the scale.
        """
        sizes = [batch["labels"].shape[0] for batch in batches]
        num_images = sum(sizes) if self.workers.size == 1 else self.batch_size
        num_groups = len(sizes) * self.workers.size
        factors = [size / num_images * num_groups for size in sizes]
        if loss_scale is None:
            return factors
        leads = [devices[0] for devices in self.grid]
        return on_each(lambda factor: factor * loss_scale, leads, factors)
