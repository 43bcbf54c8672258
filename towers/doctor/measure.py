"""Times of the parts of a run, on trainers that write nothing into its folder."""

import dataclasses
import itertools
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers import build
from towers.config import Config
from towers.data.sources import num_bytes
from towers.doctor import steps, timing
from towers.doctor.verdict import Measured
from towers.evaluation.duration import evaluation_secs
from towers.parallel.devices import HOST, Devices
from towers.parallel.trainer import Trainer
from towers.run.background import Background
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer

# For all rounds together, after tracing; the part of it for one thing in a round, and
# for evaluations and checkpoints each.
MEASURE_SECS, PART, OTHERS = 40.0, 0.01, 0.1
LEAST_CHECKPOINTS, MOST_CHECKPOINTS, PAIR = 5, 50, 5


def measure(
    config: Config,
    parts: build.Parts,
    devices: Devices,
    trainer: Trainer,
    folder: pathlib.Path,
    *,
    secs: float = MEASURE_SECS,
    say: Callable[[str], None],
) -> Measured:
    """Times the parts of a run.

    Args:
        config: `steps.without_learning`.
        parts, devices, trainer: made of it.
        folder: for checkpoints, which are removed.
        secs: for the rounds, of which there are three at least, however long they take.
        say: takes a line about what is being done.

    Raises:
        NumericError: the first step is not finite.
        DataError: an image cannot be read.
        OSError, CheckpointError: the folder cannot be written.
    """
    with tf.device(HOST):
        batch = parts.train_batches(tf.constant(0, tf.int64))
    timed, counts = steps.create_steps(config, parts, devices, trainer, batch), {}
    for name, of_name in timed.items():
        say(f"tracing and warming up {name}")
        counts[name] = timing.warm_up(of_name, PART * secs)
    say(f"timing them in turn, for about {secs:.0f} s")
    times = timing.in_rounds(timed, counts, secs)
    ready, tower = times[steps.CONSTANT], times[steps.TOWER]
    ready_secs, tower_secs = statistics.median(ready), statistics.median(tower)
    step_secs = timing.scaled(ready, times[steps.INPUT])
    errors = [
        timing.error(ready, times[steps.INPUT]) * ready_secs / step_secs,
        timing.error(tower, times[steps.DOUBLE]),
    ]
    gradients_secs = None
    if steps.GRADIENTS in times:
        gradients_secs = timing.scaled(ready, times[steps.GRADIENTS])
        errors.append(timing.error(ready, times[steps.GRADIENTS]))

    say("timing an evaluation")
    eval_secs = 0.0
    if config.eval_every_epochs:
        eval_secs = evaluation_secs(config, parts, trainer, secs=OTHERS * secs)
    say("timing checkpoints")
    checkpoint_secs = _checkpoint_secs(
        config, trainer, timed[steps.INPUT], step_secs, folder, OTHERS * secs
    )
    num_steps = build.last_step_of(config, parts)
    return Measured(
        kind=devices.kind,
        num_towers=len(devices.towers) // config.devices_per_network,
        images=config.images_per_step,
        step_secs=step_secs,
        ready_secs=ready_secs,
        gradients_secs=gradients_secs,
        tower_secs=tower_secs,
        double_secs=max(tower_secs, timing.scaled(tower, times[steps.DOUBLE])),
        one_secs=statistics.median(times[steps.ONE]),
        eval_secs=eval_secs,
        checkpoint_secs=checkpoint_secs,
        num_steps=num_steps,
        num_evaluations=build.create_periods(config, parts).num_evaluations(
            0, num_steps
        ),
        error=max(errors),
        **_input(config, parts),
    )


def _input(config, parts):
    """Where the training images lie."""
    source = parts.train_batches.source
    data_mb = float(parts.num_examples * np.prod(source.image_shape) / 1e6)
    if parts.augment.train_on_crops and getattr(source, "reads_crops", False):
        data_mb = 0.0
    in_memory = num_bytes(source) is not None
    decodes = config.dataset == "image_folder" or config.dataset.startswith("tfds:")
    is_cached = decodes and 0 < data_mb <= config.image_cache_mb
    return {
        "data_mb": data_mb,
        "in_memory": in_memory,
        "is_resident": config.input == "auto" and build.fits_on_gpus(source),
        "is_cached": is_cached and not in_memory,
    }


def _checkpoint_secs(config, trainer, timed, step_secs, folder, most_secs):
    """How much longer steps on the run's own input take with a checkpoint, which is
    written while they go on; the next one waits for its end. It also ends a call."""
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory(prefix=".towers-doctor-", dir=folder) as inside,
        Background() as background,
    ):
        checkpointer = Checkpointer(
            pathlib.Path(inside, "checkpoints"), keep=config.keep_checkpoints
        )

        def save():
            tensors = trainer.state()
            for array in tensors.values():
                np.isfinite(array.astype(np.float64, copy=False)).all()
            values = {"best": None, "config": dataclasses.asdict(config)}
            snapshot = Snapshot(next(numbers), tensors, values)
            background.submit(lambda: checkpointer.save(snapshot))

        started = time.perf_counter()
        save()
        background.wait()
        write_secs = time.perf_counter() - started
        num_steps = math.ceil(2 * write_secs / step_secs)
        num_steps = min(num_steps, config.checkpoint_every_steps or num_steps)

        timed.run(num_steps)
        with_saving, without = [], []
        started = time.perf_counter()
        while len(with_saving) < LEAST_CHECKPOINTS or (
            len(with_saving) < MOST_CHECKPOINTS
            and time.perf_counter() - started < most_secs
        ):
            timed.prepare()
            save()
            for _ in range(PAIR):
                before = time.perf_counter()
                timed.run(num_steps)
                trainer.learning_rate(0)  # of the metrics of a call
                save()
                with_saving.append(time.perf_counter() - before)
            background.wait()
            without.append(num_steps * timed.secs(PAIR * num_steps))
    return max(0.0, statistics.mean(with_saving) - statistics.mean(without))
