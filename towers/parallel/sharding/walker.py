"""Gradients of a model over a grid of devices.

This is for the two cases that must look inside a model: synchronised batch
normalisation (groups meet in every normalisation) and the channel split (a group of
devices holds one network). The devices form a grid: groups, data-parallel to each
other, by shards, each with its slice of one network. A tower of its own is a group of
one.
"""

import functools
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers.optim.phases import Phase
from towers.parallel.gradients import in_dtype
from towers.parallel.sharding import split
from towers.parallel.sharding.device_tape import DeviceTape
from towers.parallel.sharding.walk import ShardValues, Walk
from towers.parallel.tower import LossFn, TowerResult, count_correct, unscaled


class Walker:
    """Runs a model over a grid of devices, forward and backward.

    Args:
        model: a Functional model.
        loss_fn: the loss of each image.
        devices: [group][shard] names.
        sync_batch_norm: whether groups share the moments of batch normalisation.

    Attributes:
        shards: how the layers are split inside a group.
        moved_bytes: bytes that crossed devices in the last `gradients` that was traced:
            activations forward and their gradients back.

    Raises:
        ConfigError: a layer cannot be split.
    """

    def __init__(
        self,
        model: keras.Model,
        loss_fn: LossFn,
        devices: Sequence[Sequence[str]],
        sync_batch_norm: bool = False,
    ):
        self._loss_fn = loss_fn
        self._devices = devices
        self.shards = split.Shards(model, len(devices[0]))
        is_sync = sync_batch_norm and len(devices) > 1
        self._walk = functools.partial(Walk, model, self.shards, devices, is_sync)
        self.moved_bytes = 0

    def gradients(
        self,
        variables: Sequence[Sequence[ShardValues]],
        batches: Sequence[Mapping[str, tf.Tensor]],
        weights: Sequence[float],
        loss_scale: tf.Tensor | None = None,
    ) -> list[list[TowerResult]]:
        """Losses and gradients of all groups.

        Args:
            variables: [group][shard].
            batches: per group its share of the batch.
            weights: per group its share of the images.
            loss_scale: what the losses are multiplied with before they are
                differentiated, and the gradients divided by.

        Returns:
            [group][shard] results. The weighted mean of the groups' gradients is that
            of the mean loss. Losses and counts are those of the group, on its first
            device, the same in all of its shards.
        """
        tape = DeviceTape()
        walk = self._walk(variables, tape, training=True)
        scales = [weight * len(weights) for weight in weights]  # 1 where equal
        if loss_scale is not None:
            scales = [scale * loss_scale for scale in scales]
        logits = walk.forward(batches)
        targets, group_metrics = [], []
        for group, batch in enumerate(batches):
            device = self._devices[group][0]
            with tf.device(device):
                labels = tf.identity(batch["labels"])

            def mean_loss(x, labels=labels):
                return tf.reduce_mean(self._loss_fn(x, labels))

            [loss] = tape.apply(device, mean_loss, [logits[group]])
            with tf.device(device):
                targets.append((loss, in_dtype(scales[group], loss.tensor.dtype)))
                correct = count_correct(logits[group].tensor, labels)
            group_metrics.append((loss.tensor, correct))
        tape.backward(targets)
        self.moved_bytes = sum(
            tensor.shape.num_elements() * tensor.dtype.size for tensor in tape.moved
        )
        return [
            [
                self._result(walk, group, shard, scales[group], *group_metrics[group])
                for shard in range(len(self._devices[group]))
            ]
            for group in range(len(batches))
        ]

    def _result(self, walk, group, shard, scale, loss, correct):
        with tf.device(self._devices[group][shard]):
            gradients = [param.gradient() for param in walk.params[group][shard]]
            if isinstance(scale, tf.Tensor) or scale != 1:
                gradients = unscaled(gradients, scale)
        state = walk.state[group][shard]
        return TowerResult(gradients, state, loss, correct)

    def logits(
        self,
        variables: Sequence[Sequence[ShardValues]],
        batches: Sequence[Mapping[str, tf.Tensor]],
    ) -> list[tf.Tensor]:
        """The logits of each group in inference, on its first device."""
        # The last images of an evaluation may not reach every group.
        walk = self._walk(variables[: len(batches)], DeviceTape(), training=False)
        return [value.tensor for value in walk.forward(batches)]


def walkers_of(stages: Sequence[Phase], *args, **kwargs) -> list[Walker]:
    """One for every stage; the same where the network is. Arguments as of `Walker`."""
    walkers = {}
    for stage in stages:
        if id(stage.model) not in walkers:
            walkers[id(stage.model)] = Walker(stage.model, *args, **kwargs)
    return [walkers[id(stage.model)] for stage in stages]
