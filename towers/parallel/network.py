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
from towers.parallel import grappler
from towers.parallel.tower import (
    LossFn,
    TowerResult,
    checked_gradients,
    tower_gradients,
    tower_logits,
)
from towers.parallel.traced import TracedOnce
from towers.parallel.variables import Fetched


class Network(Protocol):
    """Computes on all devices.

    Attributes:
        transferred_bytes: bytes of activations, and of their gradients, that cross
            devices in `gradients`.
        is_optimized: whether a graph needs no Grappler for its part.
    """

    transferred_bytes: int
    is_optimized: bool

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
        # What XLA compiles cannot be pruned afterwards.
        self._prunes = not compile_towers
        kinds = [(p.model, None if self._prunes else p.frozen) for p in phases]
        self._first_alike = [kinds.index(kind) for kind in kinds]
        tower = self._tower
        if compile_towers:
            tower = tf.function(tower, autograph=False, jit_compile=True)
        # Shared by towers with as many images, and by phases that are alike.
        # TensorFlow executes fused operations in 16 bits, and refuses to copy them.
        dtypes = {layer.compute_dtype for p in phases for layer in p.model.layers}
        self.is_optimized = dtypes <= {"float32", "float64"} and all(
            "CPU" in device for device in devices
        )
        optimize = None
        if self.is_optimized and self._prunes:
            optimize = grappler.optimized_for_cpu
        self._tower_gradients = TracedOnce(tower, optimize)
        self._tower_logits = TracedOnce(tower_logits, optimize)

    def gradients(self, phase, fetched, batches, loss_scale=None, first_tower=0):
        model, frozen = self._phases[phase].model, self._phases[phase].frozen
        learning = [name not in frozen for name in self._names]

        def select(result):
            pairs = zip(result.gradients, learning, strict=True)
            return result._replace(gradients=[x for x, learns in pairs if learns])

        results = []
        for tower, ((params, state), batch) in enumerate(
            zip(fetched, batches, strict=True), start=first_tower
        ):
            with tf.device(self._devices[tower]):
                batch = resize_to_phase(batch, model)
                result = self._tower_gradients(
                    self._first_alike[phase],
                    params,
                    state,
                    batch,
                    loss_scale,
                    name=f"tower_{tower}",
                    select=select,
                )
                gradients = iter(result.gradients)
                gradients = [
                    next(gradients) if learns else tf.zeros_like(param)
                    for param, learns in zip(params, learning, strict=True)
                ]
                results.append(result._replace(gradients=gradients))
        return results

    def logits(self, fetched, batches):
        model, logits = self._phases[-1].model, []
        for tower, batch in enumerate(batches):
            with tf.device(self._devices[tower]):
                inputs = {
                    x.name: batch[x.name] for x in model.inputs if x.name in batch
                }
                logits.append(
                    self._tower_logits(
                        model, *fetched[tower], inputs, name=f"tower_{tower}"
                    )
                )
        return logits

    def _tower(self, phase, params, state, batch, loss_scale):
        model, frozen = self._phases[phase].model, self._phases[phase].frozen
        result = tower_gradients(model, self._loss_fn, params, state, batch, loss_scale)
        frozen = frozenset() if self._prunes else frozen
        gradients = checked_gradients(result.gradients, self._names, frozen)
        return result._replace(gradients=gradients)
