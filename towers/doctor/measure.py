"""Times of the parts of a run, on trainers that write nothing into its folder."""

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers import build
from towers.config import Config
from towers.data.batches import EvalBatches
from towers.data.sources import num_bytes
from towers.doctor import steps, timing
from towers.doctor.verdict import Measured
from towers.evaluation.restored import kinds_of_parameters
from towers.optim.epochs import num_images
from towers.parallel.devices import HOST, Devices
from towers.parallel.trainer import Trainer
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer
from towers.run.periods import Periods
from towers.run.pictures import confusion_matrix

# For all rounds together, after tracing; the part of it for one thing in a round, and
# for an evaluation.
MEASURE_SECS, PART, EVALUATION = 40.0, 0.01, 0.1
NUM_CHECKPOINTS = 3


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
        secs: for the rounds; each part is timed at least twice, however long it takes.
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
    still, tower = times[steps.STILL], times[steps.TOWER]
    tower_secs = statistics.median(tower)
    pairs = [(still, times[steps.INPUT]), (tower, times[steps.DOUBLE])]
    gradients_secs = None
    if steps.GRADIENTS in times:
        gradients_secs = timing.scaled(still, times[steps.GRADIENTS])
        pairs.append((still, times[steps.GRADIENTS]))

    say("timing an evaluation")
    eval_secs = _evaluation_secs(config, parts, trainer, EVALUATION * secs)
    say(f"timing checkpoints in {folder}")
    held_secs, write_secs = _checkpoint_secs(trainer, folder)
    num_steps = min(config.max_steps or parts.total_steps, parts.total_steps)
    return Measured(
        kind=devices.kind,
        num_towers=len(devices.towers) // config.devices_per_network,
        images=config.images_per_step,
        step_secs=timing.scaled(still, times[steps.INPUT]),
        ready_secs=statistics.median(still),
        gradients_secs=gradients_secs,
        tower_secs=tower_secs,
        double_secs=max(tower_secs, timing.scaled(tower, times[steps.DOUBLE])),
        one_secs=statistics.median(times[steps.ONE]),
        eval_secs=eval_secs,
        held_secs=held_secs,
        write_secs=write_secs,
        num_steps=num_steps,
        num_evaluations=_num_evaluations(config, parts, num_steps),
        spread=max(timing.spread(*pair) for pair in pairs),
        **_input(config, parts),
    )


def _input(config, parts):
    """Where the training images lie."""
    source = parts.train_batches.source
    data_mb = float(parts.num_examples * np.prod(source.image_shape) / 1e6)
    in_memory = num_bytes(source) is not None
    decodes = config.dataset == "image_folder" or config.dataset.startswith("tfds:")
    crops = parts.augment.train_on_crops and getattr(source, "reads_crops", False)
    is_cached = decodes and not crops and data_mb <= config.image_cache_mb
    return {
        "data_mb": data_mb,
        "in_memory": in_memory,
        "is_cached": is_cached and not in_memory,
    }


def _num_evaluations(config, parts, num_steps):
    periods = Periods(
        total_steps=parts.total_steps,
        images_per_step=config.images_per_step,
        log_every_steps=config.log_every_steps,
        summary_every_steps=config.summary_every_steps,
        checkpoint_every_steps=config.checkpoint_every_steps,
        images_per_eval=num_images(config.eval_every_epochs, parts.num_examples),
    )
    return periods.num_evaluations(0, num_steps)


def _evaluation_secs(config, parts, trainer, most_secs):
    """Seconds of a whole evaluation, from the batches of `most_secs`, and of the
    picture of its confusion matrix."""
    if not config.eval_every_epochs:
        return 0.0
    _, source = parts.eval_split
    batches = EvalBatches(source, parts.augment, config.batch_size, parts.part)
    feed = build.create_eval_feed(batches, trainer)
    kinds = kinds_of_parameters(config)

    def evaluate(num_batches):
        started = time.perf_counter()
        trainer.evaluate(feed, num_batches, kinds)
        return time.perf_counter() - started

    evaluate(1)  # traces
    count = min(len(batches), 4)
    count = min(len(batches), max(count, int(most_secs * count / evaluate(count))))
    secs = evaluate(count) * len(batches) / count
    names, started = parts.data.class_names, time.perf_counter()
    confusion_matrix(np.eye(len(names), dtype=int), names)
    return secs + time.perf_counter() - started


def _checkpoint_secs(trainer, folder):
    """How long a step waits for a copy of the state, and how long that is written."""
    held, written = [], []
    with tempfile.TemporaryDirectory(prefix=".towers-doctor-", dir=folder) as inside:
        checkpointer = Checkpointer(pathlib.Path(inside, "checkpoints"))
        for step in range(1, 1 + NUM_CHECKPOINTS):
            started = time.perf_counter()
            tensors = trainer.state()
            for array in tensors.values():
                np.isfinite(array.astype(np.float64, copy=False)).all()
            held.append(time.perf_counter() - started)
            started = time.perf_counter()
            checkpointer.save(Snapshot(step, tensors, {"best": None}))
            written.append(time.perf_counter() - started)
    return statistics.median(held), statistics.median(written)
