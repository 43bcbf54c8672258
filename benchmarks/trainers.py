"""Trainers to measure, in this process and in processes of their own.

As a program it builds one trainer and takes steps on command. For `python -m
benchmarks.step --against=COMMIT` that is a process for each of two commits, each with
its own `towers` and its own version of this file.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure
from towers.build import assembly, builder
from towers.config import Config
from towers.data.batches import Batch
from towers.data.resident import Resident
from towers.data.share import shares
from towers.errors import TowersError
from towers.models.create import without_noise
from towers.parallel import devices
from towers.parallel.devices import HOST
from towers.parallel.evaluator import create_predictor
from towers.parallel.trainer import Trainer

ROOT = pathlib.Path(__file__).resolve().parent.parent

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


class ConstantFeed(Resident):
    """The same batch again and again, in the memory of the towers' devices: `sizes` are
    the images of each tower, in all micro-batches together."""

    def __init__(self, batch: Batch, sizes: Sequence[int], devices: Sequence[str]):
        self.devices, self._batches, self._orders = devices, [], {}
        for size, device in zip(sizes, devices, strict=True):
            with tf.device(HOST):
                rows = tf.range(size) % batch["images"].shape[0]
                piece = {name: tf.gather(x, rows) for name, x in batch.items()}
                # int32 tensors of a GPU are in host memory.
                if "GPU" in device and piece["labels"].dtype == tf.int32:
                    piece["labels"] = tf.cast(piece["labels"], tf.int64)
            with tf.device(device):
                piece = {name: tf.identity(x) for name, x in piece.items()}
            self._batches.append(piece)

    def start(self, step: int, num_steps: int) -> None:
        """There are no orders."""

    def batch(self, tower: int, awaited: tuple, step: tf.Tensor) -> Batch:
        """The batch of a tower; nothing is computed before the turn of the step."""
        with tf.device(self.devices[tower]), tf.control_dependencies([step]):
            return tf.nest.map_structure(tf.identity, self._batches[tower])


def create_trainer(
    config: Config, parts: builder.Parts, chosen: devices.Devices, **options
) -> Trainer:
    """The trainer of a config on the first `num_towers` of the devices.

    Args:
        **options: others of `build.assembly.create_trainer`.
    """
    first = chosen.towers[: config.num_towers or None]
    chosen = dataclasses.replace(chosen, towers=first)
    return assembly.create_trainer(config, parts, chosen, **options)


def create_on_constant_batch(
    config: Config, parts: builder.Parts, chosen: devices.Devices, **options
) -> Trainer:
    """The same, whose every step has the first batch, which lies in the memory of the
    devices: a batch from the host would be copied from pageable memory in each step."""
    leads = chosen.towers[: config.num_towers or None][:: config.devices_per_network]
    batch, turns = first_batch(parts), config.accumulate_steps
    num_images = batch["images"].shape[0] // turns
    sizes = [turns * size for size in shares(num_images, len(leads))]
    feed = ConstantFeed(batch, sizes, leads)
    return create_trainer(config, parts, chosen, feed=feed, **options)


def first_batch(parts: builder.Parts) -> dict[str, tf.Tensor]:
    with tf.device(devices.HOST):
        return parts.train_batches(tf.constant(0, tf.int64))


class ChildProcess:
    """A program that answers each line with a number, after the work that it asks for.

    Args:
        command: the program.
        options: of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence, env: Mapping[str, str], **options):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
            **options,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, line: object) -> None:
        """Sends a line."""
        with contextlib.suppress(BrokenPipeError):  # the answer will be missing
            print(line, file=self._process.stdin, flush=True)

    def answer(self) -> float:
        """Waits for an answer.

        Raises:
            TowersError: the process has ended; with the last line of its errors.
        """
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines() or ["killed"]
            raise TowersError(lines[-1])
        return float(answer)

    def close(self) -> None:
        """Ends the process and waits for it."""
        with contextlib.suppress(BrokenPipeError):  # what it was sent is lost
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class TrainerProcess(ChildProcess):
    """The trainer of a checkout's `benchmarks.trainers`, which takes steps on command.

    It starts by itself; several may do so at a time.

    Args:
        fields: of its Config.
        device: auto, cpu or gpu.
        steps: how many it takes to warm up, at least one.
        checkout: the folder with its `towers` and `benchmarks`.
        options: "predicts", if a step is the prediction of a batch; "tells_memory".

    Attributes:
        first_step_secs: time of the first step, with tracing it; None before `wait`.
        processor: seconds of processor time of each round.
    """

    def __init__(
        self,
        fields: dict,
        device: str,
        steps: int,
        checkout: pathlib.Path = ROOT,
        **options,
    ):
        self.first_step_secs, self.processor = None, []
        environ = os.environ | {"PYTHONPATH": str(checkout)}
        command = [sys.executable, "-P", "-m", "benchmarks.trainers"]
        super().__init__(command, environ, cwd=checkout)
        # Older commits ask whether the batch lies ready.
        first = {"fields": fields, "device": device, "steps": steps, "ready": True}
        self.say(json.dumps(first | options))

    def wait(self) -> None:
        """Waits for the steps that warm up."""
        self.first_step_secs = self.answer()

    def train(self, num_steps: int) -> None:
        self.say(num_steps)
        self.processor.append(self.answer())


def predictions(parts: builder.Parts, chosen: devices.Devices):
    """The function that predicts the first batch so many times."""
    predictor = create_predictor(without_noise(parts.model), chosen.towers, ())
    images = first_batch(parts)["images"]
    batch = {"images": images, "mask": tf.ones(images.shape[0])}
    return lambda count: list(predictor.predictions([batch] * count))


def serve() -> None:
    """Builds the trainer of the first line; takes as many steps as each later one says.

    The first line is JSON: "fields" of Config, "device", "steps" to warm up. The batch
    lies ready. It is answered with the seconds of the first step, and before that,
    where it has "tells_memory", with the bytes of the process. Each later line is
    answered, when its steps are done, with their seconds of processor time.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorFlow or a trainer prints is not an answer
    first = json.loads(sys.stdin.readline())
    config = Config(**first["fields"])
    chosen = devices.configure(first["device"], config.num_towers)
    parts = builder.build(config, device_kind=chosen.kind)
    if first.get("predicts"):
        take = predictions(parts, chosen)
    else:
        take = create_on_constant_batch(config, parts, chosen).train
    if first.get("tells_memory"):
        print(measure.process_bytes("VmRSS"), file=answers, flush=True)
    started = time.perf_counter()
    take(1)
    secs = time.perf_counter() - started
    if first["steps"] > 1:
        take(first["steps"] - 1)
    print(secs, file=answers, flush=True)
    for line in sys.stdin:
        used = time.process_time()
        take(int(line))
        print(time.process_time() - used, file=answers, flush=True)


if __name__ == "__main__":
    serve()
