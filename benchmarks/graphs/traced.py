"""Trainers traced for GPUs, whether they are there or not."""

import dataclasses
from unittest import mock

import tensorflow as tf

from benchmarks.graphs.crossings import Crossing, crossings
from benchmarks.graphs.placement import Call
from towers.build import assembly, builder
from towers.config import Config
from towers.data.resident import Resident
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.devices import Devices
from towers.parallel.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Traced:
    """A trainer for GPUs, with the config that it was made from."""

    config: Config
    trainer: Trainer

    @property
    def num_gpus(self) -> int:
        """The GPUs of the trainer."""
        return len(self.trainer.devices)

    def calls(self) -> list[Call]:
        """The compiled calls of training."""
        graphs = self.trainer.trace()
        if not isinstance(self.trainer, AsynchronousTrainer):
            return [Call(graph) for graph in graphs]
        # Fetches on the devices of the towers, the others at home.
        devices = [
            *self.trainer.devices,
            *(self.trainer.strategy.primary_device for _ in graphs),
        ]
        return [Call(*call) for call in zip(graphs, devices, strict=False)]

    def crossings(self) -> list[Crossing]:
        """Everything that crosses devices in a step; asynchronous towers fetch and
        compute once each."""
        found, turns = [], self.config.accumulate_steps - 1
        for call in self.calls():
            homes = self._homes() | self._iterators(call.graph)
            found += crossings(call.graph, homes, inner_turns=turns, device=call.device)
        return found

    def _iterators(self, graph):
        """Id of an argument -> the device of the iterator."""
        captured = {id(placeholder) for _, placeholder in graph.captures}
        resources = (x for x in graph.inputs if x.dtype == tf.resource)
        iterators = [id(x) for x in resources if id(x) not in captured]
        return dict(zip(iterators, self.trainer.feed.devices, strict=False))

    def _homes(self):
        """Id of a variable's handle -> the device that it was asked onto."""
        trainer, homes = self.trainer, {}
        feed = trainer.feed
        for copy in trainer.strategy.copies:
            homes |= {id(v.handle): copy.device for v in copy.variables()}
        for value in vars(trainer.guard).values():
            if isinstance(value, tf.Variable):
                homes[id(value.handle)] = trainer.guard.device
        if isinstance(feed, Resident):
            orders = feed._orders.items()
            homes |= {id(v.handle): home for home, pair in orders for v in pair}
            for batches in feed._batches:
                source = batches.source
                homes |= {id(v.handle): source._device for v in source.variables}
        return homes


def on_gpus(config: Config) -> Traced:
    """A trainer for `num_towers` GPUs."""
    # Where they are not, its variables fall back to the CPU. Soft placement is off
    # where a process traced a function before it computed anything.
    tf.config.set_soft_device_placement(True)
    names = tuple(f"/GPU:{i}" for i in range(config.num_towers))
    # Which tries the augmentation on the device; the registry of kernels tells as much.
    with (
        mock.patch.object(assembly, "runs_on", return_value=True),
        mock.patch.object(assembly, "why_not_xla", return_value=""),
    ):
        trainer = assembly.create_trainer(
            config, builder.build(config, device_kind="GPU"), Devices("GPU", names)
        )
    return Traced(config, trainer)
