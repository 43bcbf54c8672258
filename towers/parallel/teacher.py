"""A trained network whose logits the towers are trained towards (distillation)."""

import collections
import zlib
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers.parallel import compilation
from towers.parallel.copies import copies_on
from towers.parallel.tower import tower_logits


class Teacher:
    """Adds the logits of a trained network, in inference, to the batches of the towers.

    Args:
        model: from images to logits, with its trained values; each device gets a copy.
        devices: one per tower.

    Attributes:
        checksum: a CRC-32 of the model's values.
    """

    def __init__(self, model: keras.Model, devices: Sequence[str]):
        layout, self._copies = copies_on(model, devices)
        self._devices, self.checksum = devices, 0
        for variable in model.weights:
            self.checksum = zlib.crc32(variable.numpy().tobytes(), self.checksum)
        on_cpus = compilation.choose(devices, [model]).optimizes_towers

        def logits(_, values, batch):
            return tower_logits(model, layout, values, batch)

        self._logits = compilation.TracedOnce(
            logits, compilation.optimized_for_cpu if on_cpus else None
        )

    def __call__(
        self, batch: Mapping[str, tf.Tensor], tower: int
    ) -> dict[str, tf.Tensor]:
        """The batch of a tower with "teacher_logits", on the device in scope."""
        values, images = self._copies[tower].read(), {"images": batch["images"]}
        logits = self._logits(None, values, images, name=f"teacher_{tower}")
        return {**batch, "teacher_logits": logits}

    def variable_bytes(self) -> collections.Counter[str]:
        """Device -> bytes of the copies there."""
        sizes = collections.Counter()
        for device, copy in zip(self._devices, self._copies, strict=True):
            for variable in sum(copy, []):
                sizes[device] += variable.shape.num_elements() * variable.dtype.size
        return sizes
