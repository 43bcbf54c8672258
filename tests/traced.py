"""Trainers traced for GPUs that are not there."""

import dataclasses

import tensorflow as tf

from towers import build
from towers.config import Config
from towers.parallel.devices import Devices
from towers.parallel.placement import Call
from towers.parallel.trainer import Trainer

SMALL = {"dataset": "synthetic", "augment": "none", "batch_size": 8, "num_towers": 2}


@dataclasses.dataclass(frozen=True)
class Traced:
    """A trainer for GPUs, with the config that it was made from."""

    config: Config
    trainer: Trainer

    def calls(self) -> list[Call]:
        """Those of training, and of an evaluation of one batch."""
        calls = [*self.trainer.calls(), self.evaluation()]
        if self.config.strategy != "async_towers":
            calls.append(self.inspection())
        return calls

    def evaluation(self) -> Call:
        size = self.config.batch_size
        batch = self._batch() | {
            "labels": tf.TensorSpec([size], tf.int32),
            "weights": tf.TensorSpec([size]),
        }
        batch = {name: batch[name] for name in ("images", "labels", "weights")}
        count_batch = self.trainer.evaluator._count_batch
        return Call(count_batch.get_concrete_function(batch, False).graph)

    def inspection(self) -> Call:
        """Of the gradients for histograms."""
        inspect = self.trainer.inspect_step
        return Call(inspect.get_concrete_function(0, self._batch(whole=True)).graph)

    def _batch(self, whole=False):
        spec = dict(self.trainer._stream(0).element_spec)
        if whole:
            return spec
        shape = [self.config.batch_size, *spec["images"].shape[1:]]
        return spec | {"images": tf.TensorSpec(shape, spec["images"].dtype)}


def on_gpus(devices: Devices | None = None, **fields) -> Traced:
    """A trainer with `num_towers` GPUs, a small synthetic data set by default."""
    # Variables then fall back to the CPU. It is off where a process traced a function
    # before it computed anything.
    tf.config.set_soft_device_placement(True)
    config = Config(**SMALL | fields)
    names = tuple(f"/GPU:{i}" for i in range(config.num_towers))
    devices = devices or Devices("GPU", names)
    trainer = build.create_trainer(
        config, build.build(config, device_kind=devices.kind), devices
    )
    return Traced(config, trainer)
