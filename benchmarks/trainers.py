"""Trainers to measure: the one place where the benchmarks call `towers.build`.

As a program it builds one trainer and takes steps on command, for `python -m
benchmarks.step --against=CHECKOUT`: in one process for each of two checkouts, each with
its own `towers` and its own version of this file.
"""

import dataclasses
import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

import towers  # noqa: F401  (before Keras: settles its backend)
from towers import build
from towers.config import Config
from towers.data.batches import TrainBatches
from towers.data.streams import without_tuning
from towers.parallel import devices

# A step by itself: images of noise, which a larger rate would soon make not finite.
STEP_ALONE = {
    "dataset": "synthetic",
    "augment": "none",
    "optimizer": "nesterov",
    "momentum": 0.9,
    "learning_rate": 1e-6,
    "ema_decay": 0.0,
    "input": "stream",
}


class StillBatches:
    """The first batch for ever, in memory."""

    source = None

    def __init__(self, batches: TrainBatches):
        self._batches = batches

    def split(self, sizes: Sequence[int]) -> list["StillBatches"]:
        """Those of several towers, as of `TrainBatches`."""
        return [StillBatches(batches) for batches in self._batches.split(sizes)]

    @functools.cached_property
    def batch(self) -> dict[str, tf.Tensor]:
        return self._batches(tf.constant(0, tf.int64))

    def stream(self, first_step: int, share: Callable | None = None) -> tf.data.Dataset:
        batch = self.batch if share is None else tuple(share(self.batch))
        return without_tuning(tf.data.Dataset.from_tensors(batch).repeat())

    stored_stream = stream

    def process(self, step: tf.Tensor, batch: dict[str, tf.Tensor]):
        return batch


def on_still_batch(parts: build.Parts) -> build.Parts:
    """The same parts whose training batches are the first one for ever."""
    return dataclasses.replace(parts, train_batches=StillBatches(parts.train_batches))


def create_trainer(
    config: Config, parts: build.Parts, chosen: devices.Devices, **options
):
    """The trainer of a config on the first `num_towers` of the devices.

    Args:
        **options: others of `build.create_trainer`.
    """
    first = chosen.towers[: config.num_towers or None]
    chosen = dataclasses.replace(chosen, towers=first)
    return build.create_trainer(config, parts, chosen, **options)


def serve() -> None:
    """Builds the trainer of the first line; takes as many steps as each later one says.

    The first line is JSON: "fields" of Config, "device", "steps" to warm up, "ready",
    whether they are on a batch that lies ready, and perhaps "tf32" and "grappler",
    options of TensorFlow's optimizer. It is answered with the seconds of the first
    step. Each later line is answered, when its steps are done,
    with their seconds of processor time.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorFlow or a trainer prints is no answer
    first = json.loads(sys.stdin.readline())
    tf.config.experimental.enable_tensor_float_32_execution(first.get("tf32", True))
    tf.config.optimizer.set_experimental_options(first.get("grappler", {}))
    config = Config(**first["fields"])
    chosen = devices.configure(first["device"], config.num_towers)
    options = {"device_kind": chosen.kind}
    if "device_kind" not in inspect.signature(build.build).parameters:
        options = {}  # of an older checkout
    parts = build.build(config, **options)
    if first["ready"]:
        parts = on_still_batch(parts)
    trainer = create_trainer(config, parts, chosen)
    started = time.perf_counter()
    trainer.train(1)
    secs = time.perf_counter() - started
    if first["steps"] > 1:
        trainer.train(first["steps"] - 1)
    print(secs, file=answers, flush=True)
    for line in sys.stdin:
        used = time.process_time()
        trainer.train(int(line))
        print(time.process_time() - used, file=answers, flush=True)


if __name__ == "__main__":
    serve()
