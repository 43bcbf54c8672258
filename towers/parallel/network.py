"""The compute of a step: a whole network on every tower, or a sharded one.

`WholeNetwork` needs nothing of a network but `stateless_call`. The other one,
`sharding.network.ShardedNetwork`, has the same two functions and inspects the network:
for channel splits and for synchronized batch normalization.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from towers.models.variables import variable_names
from towers.optim.phases import Phase, resize_to_phase
from towers.parallel.tower import (
    LossFn,
    TowerResult,
    checked_gradients,
    tower_gradients,
    tower_logits,
)
from towers.parallel.variables import Fetched


class Network(Protocol):
    """Computes on all devices.

    Attributes:
        transferred_bytes: bytes of activations, and of their gradients, that cross
            devices in `gradients`.
    """

    transferred_bytes: int

    def gradients(
        self,
        phase: int,
        fetched: Sequence[Fetched],
        batches: Sequence[Mapping[str, tf.Tensor]],
        loss_scale: tf.Tensor | None = None,
    ) -> list[TowerResult]:
        """Per device the result of its tower's share of a batch.

        Args:
            phase: index of the phase of the run.
            fetched: per device parameters and model state, there.
            batches: per tower its share.
            loss_scale: factor on the loss while it is differentiated.

        Raises:
            ValueError: a loss does not depend on a parameter.
        """

    def logits(
        self, fetched: Sequence[Fetched], batches: Sequence[Mapping[str, tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Per tower the logits of its share in inference, in the last phase.

        A small batch may be cut into fewer shares than there are towers.
        """


class WholeNetwork:
    """Implements the protocol `Network`: a whole network on every tower's device.

    `gradients` also takes `first_tower`, the tower of the first entry, where only some
    towers compute.

    Args:
        phases: those of the run.
        loss_fn: the loss of each image.
        devices: one per tower.
        compile_towers: whether XLA compiles the forward and backward part of each
            tower, and nothing that crosses devices.
    """

    transferred_bytes = 0

    def __init__(
        self,
        phases: Sequence[Phase],
        loss_fn: LossFn,
        devices: Sequence[str],
        compile_towers: bool = False,
    ):
        self._phases, self._loss_fn, self._devices = phases, loss_fn, devices
        self._names = variable_names(phases[-1].model.trainable_variables)
        self._tower_fn = self._tower
        if compile_towers:
            self._tower_fn = tf.function(self._tower, autograph=False, jit_compile=True)

    def gradients(self, phase, fetched, batches, loss_scale=None, first_tower=0):
        results = []
        for tower, (variables, batch) in enumerate(
            zip(fetched, batches, strict=True), start=first_tower
        ):
            with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
                batch = resize_to_phase(batch, self._phases[phase].model)
                results.append(self._tower_fn(phase, *variables, batch, loss_scale))
        return results

    def logits(self, fetched, batches):
        model, logits = self._phases[-1].model, []
        for tower, batch in enumerate(batches):
            with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
                logits.append(tower_logits(model, *fetched[tower], batch))
        return logits

    def _tower(self, phase, params, state, batch, loss_scale):
        model, frozen = self._phases[phase].model, self._phases[phase].frozen
        result = tower_gradients(model, self._loss_fn, params, state, batch, loss_scale)
        gradients = checked_gradients(result.gradients, self._names, frozen)
        return result._replace(gradients=gradients)
