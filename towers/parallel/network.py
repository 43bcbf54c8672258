"""The compute of a step: a whole network on every tower, or a sharded one.

`WholeNetwork` needs nothing of a network but `stateless_call`. The other one,
`sharding.network.ShardedNetwork`, has the same two functions and inspects the network:
for channel splits and for synchronized batch normalization.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from towers.optim.phases import Phase, resize_to_phase
from towers.parallel.compilation import Compilation, optimized_for_cpu
from towers.parallel.copies import NetworkLayout, Values
from towers.parallel.tower import LossFn, TowerResult, tower_gradients, tower_logits
from towers.parallel.traced import TracedOnce


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
        fetched: Sequence[Values],
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
        self, fetched: Sequence[Values], batches: Sequence[Mapping[str, tf.Tensor]]
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
        layout: of the vectors.
        devices: one per tower.
        compilation: of the step.
    """

    transferred_bytes = 0

    def __init__(
        self,
        phases: Sequence[Phase],
        loss_fn: LossFn,
        layout: NetworkLayout,
        devices: Sequence[str],
        compilation: Compilation,
    ):
        self._devices = devices
        # Phases that are alike but for their end share a trace.
        self._phases = [phase._replace(end_step=0) for phase in phases]
        gradients = functools.partial(tower_gradients, loss_fn=loss_fn, layout=layout)
        if compilation.xla:
            gradients = _compiled(gradients)
        # Shared by towers with as many images.
        optimize = optimized_for_cpu if compilation.optimizes_towers else None
        self._tower_gradients = TracedOnce(gradients, optimize)
        logits = functools.partial(tower_logits, phases[-1].model, layout)
        self._tower_logits = TracedOnce(lambda _, *args: logits(*args), optimize)

    def gradients(self, phase, fetched, batches, loss_scale=None, first_tower=0):
        phase, results = self._phases[phase], []
        for tower, (values, batch) in enumerate(
            zip(fetched, batches, strict=True), start=first_tower
        ):
            with tf.device(self._devices[tower]):
                batch = resize_to_phase(batch, phase.model)
                name = f"tower_{tower}"
                results.append(
                    self._tower_gradients(phase, values, batch, loss_scale, name=name)
                )
        return results

    def logits(self, fetched, batches):
        names = {x.name for x in self._phases[-1].model.inputs}
        logits = []
        for tower, batch in enumerate(batches):
            with tf.device(self._devices[tower]):
                inputs = {name: x for name, x in batch.items() if name in names}
                name = f"tower_{tower}"
                logits.append(
                    self._tower_logits(None, fetched[tower], inputs, name=name)
                )
        return logits


def _compiled(gradients):
    """The same function, compiled by XLA."""

    def compiled(phase, *args):
        call = functools.partial(gradients, phase)
        return tf.function(call, autograph=False, jit_compile=True)(*args)

    return compiled
