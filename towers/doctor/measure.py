"""Times of the parts of a run; nothing is written into its folder."""

import dataclasses
import itertools
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from towers import build, build_trainer, console
from towers.config import Config
from towers.data import streams
from towers.data.batches import Batch
from towers.data.resident import Resident
from towers.data.sources import num_bytes
from towers.errors import NumericError
from towers.evaluation.comparison import t_quantile
from towers.parallel.devices import HOST, Devices
from towers.parallel.loop import Loop
from towers.parallel.reduce import shares
from towers.parallel.trainer import SynchronousTrainer, Trainer
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer
from towers.threads import Background
from towers.training.dry_run import evaluation_secs

# Small enough that no parameter moves, however many steps are timed.
LEARNING_RATE = 1e-12

# For all rounds together, and the share of it for evaluations and checkpoints each.
MEASURE_SECS, OTHERS = 40.0, 0.1
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
MOST_STEPS = 500  # in a round
LEAST_CHECKPOINTS = 5

# Batches that a stream may have made ahead: in two stages, and behind them.
NUM_AHEAD = 2 * streams.NUM_CALLS + 4
MOST_AHEAD_SECS = 10.0

INPUT, CONSTANT, GRADIENTS, DOUBLE = (
    "steps on the run's own input",
    "steps on a batch in memory",
    "the gradients of this batch alone",
    "the gradients of twice the images",
)

# Takes a number of steps.
Run = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times in seconds, and what else the verdict depends on."""

    kind: str  # of the devices, CPU or GPU
    num_towers: int
    images: int  # of a step, all towers together
    step_secs: float  # on the run's own input
    ready_secs: float  # a step on a batch in memory
    gradients_secs: float  # the gradients of all towers, on a batch in memory
    double_secs: float  # the same with twice the images; not less
    eval_secs: float
    checkpoint_secs: float  # how much longer steps take with a checkpoint
    num_steps: int  # of the whole run
    num_evaluations: int
    error_secs: float = 0.0  # of the parts of a step
    data_mb: float = 0.0  # of decoded training images; 0 where crops are decoded
    in_memory: bool = True  # whether the images are in memory from the start
    is_resident: bool = False  # whether GPUs hold them
    is_cached: bool = False  # whether they are decoded in the first epoch alone


def without_learning(config: Config) -> Config:
    """The config of the trainers that are timed."""
    return dataclasses.replace(config, learning_rate=LEARNING_RATE)


def measure(
    config: Config,
    parts: build.Parts,
    devices: Devices,
    trainer: Trainer,
    folder: pathlib.Path,
    secs: float = MEASURE_SECS,
) -> Measured:
    """Times a trainer of a config `without_learning`, and checkpoints that are written
    into `folder` and removed. The rounds take `secs`, and are at least LEAST_ROUNDS.

    The parts are timed in turn, so that a machine that slows down affects them alike.
    """
    with tf.device(HOST):
        batch = parts.train_batches(tf.constant(0, tf.int64))
    runs, counts = create_runs(config, parts, devices, trainer, batch), {}
    for name, run in runs.items():
        console.line(f"tracing {name}")
        run(1)
        run_secs = secs / MOST_ROUNDS / len(runs)
        count = min(MOST_STEPS, int(run_secs / timed(run, streams.NUM_CALLS)))
        # Batches that are made at the same time come at the same time.
        counts[name] = max(streams.NUM_CALLS if name == INPUT else 1, count)
    console.line(f"timing them in turn, for about {secs:.0f} s")
    times = {name: [] for name in runs}
    until = time.perf_counter() + secs
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > until:
            break
        for name in list(runs) if number % 2 else reversed(runs):
            if name == INPUT:  # without the batches that it has made in the pause
                pause_end = time.perf_counter() + MOST_AHEAD_SECS
                for _ in range(NUM_AHEAD):
                    if time.perf_counter() < pause_end:
                        runs[INPUT](1)
            times[name].append(timed(runs[name], counts[name]))
            if name == INPUT:
                _wait_for_reading()
    medians, error_secs = {CONSTANT: statistics.median(times[CONSTANT])}, 0.0
    for name, base in {INPUT: CONSTANT, GRADIENTS: CONSTANT, DOUBLE: GRADIENTS}.items():
        # What slows a whole round down does not count.
        ratios = [x / y for x, y in zip(times[name], times[base], strict=True)]
        medians[name] = statistics.median(ratios) * medians[base]
        error = t_quantile(len(ratios) - 1) * statistics.stdev(ratios)
        error /= len(ratios) ** 0.5
        error_secs = max(error_secs, error * medians[base])

    console.line("timing an evaluation and checkpoints")
    eval_secs = 0.0
    if config.eval_every_epochs:
        eval_secs = evaluation_secs(config, parts, trainer, secs=OTHERS * secs)
    checkpoint_secs = _checkpoint_secs(
        config, trainer, runs[CONSTANT], medians[CONSTANT], folder, OTHERS * secs
    )
    source = parts.train_batches.source
    data_mb = float(parts.num_examples * np.prod(source.image_shape) / 1e6)
    if parts.augment.train_on_crops and getattr(source, "reads_crops", False):
        data_mb = 0.0
    in_memory = num_bytes(source) is not None
    decodes = getattr(source, "decodes", False)
    is_cached = decodes and 0 < data_mb <= config.image_cache_mb
    return Measured(
        kind=devices.kind,
        num_towers=len(devices.towers) // config.devices_per_network,
        images=config.images_per_step,
        step_secs=medians[INPUT],
        ready_secs=medians[CONSTANT],
        gradients_secs=medians[GRADIENTS],
        double_secs=max(medians[GRADIENTS], medians[DOUBLE]),
        eval_secs=eval_secs,
        checkpoint_secs=checkpoint_secs,
        num_steps=parts.last_step,
        num_evaluations=parts.periods.num_evaluations(0, parts.last_step),
        error_secs=error_secs,
        data_mb=data_mb,
        in_memory=in_memory,
        is_resident=config.input == "auto" and build_trainer.fits_on_gpus(source),
        is_cached=is_cached and not in_memory,
    )


def timed(run: Run, num_steps: int) -> float:
    """Mean seconds per step."""
    started = time.perf_counter()
    run(num_steps)
    return (time.perf_counter() - started) / num_steps


def create_runs(
    config: Config, parts: build.Parts, devices: Devices, trainer: Trainer, batch: Batch
) -> dict[str, Run]:
    """The timed runs on a step's batch: INPUT, CONSTANT, GRADIENTS and DOUBLE."""
    leads = devices.towers[:: config.devices_per_network]
    sizes = [n * config.accumulate_steps for n in shares(config.batch_size, len(leads))]
    constant = ConstantFeed(batch, sizes, leads)
    twice = ConstantFeed(batch, [2 * n for n in sizes], leads)
    if isinstance(trainer, SynchronousTrainer):
        first, in_memory = _steps(trainer, trainer.loop), trainer.create_loop(constant)
        runs = {INPUT: first, CONSTANT: _steps(trainer, in_memory)}
    else:
        in_memory = build_trainer.create_trainer(config, parts, devices, feed=constant)
        runs = {INPUT: trainer.train, CONSTANT: in_memory.train}
        config = dataclasses.replace(config, strategy="towers")
        trainer = build_trainer.create_trainer(config, parts, devices, feed=constant)
    gradients, double = _gradients(trainer, constant), _gradients(trainer, twice)
    return runs | {GRADIENTS: gradients, DOUBLE: double}


def _steps(trainer: SynchronousTrainer, loop: Loop) -> Run:
    """Steps of a loop, in the last phase of the run."""
    phase, taken = len(trainer.phases) - 1, 0

    def run(num_steps):
        nonlocal taken
        begun, *_ = loop(phase, taken, num_steps)
        taken += begun
        if begun < num_steps or trainer.guard.stopped:
            raise NumericError(
                "the loss or a gradient is not finite before any parameter has moved; "
                "check the data set, --augment and --init_from"
            )

    return run


def _gradients(trainer: SynchronousTrainer, feed: Resident) -> Run:
    """The gradients of a trainer's towers; no parameters travel, no mean, no update."""
    fetched, home = trainer.strategy.fetch(), trainer.strategy.home

    def compute(phase, batches, before):
        results = trainer.train_step.tower_fn(phase)(fetched, batches)
        losses = []
        for device, result in zip(trainer.devices, results, strict=True):
            everything = tf.nest.flatten(result)
            with tf.device(device), tf.control_dependencies(everything):
                losses.append(tf.identity(result.loss))
        with tf.device(home):
            return tf.constant(True), before + tf.cast(tf.add_n(losses), before.dtype)

    def zero():
        with tf.device(home):
            return tf.zeros([])

    return _steps(trainer, trainer.create_loop(feed, compute, zero))


def _wait_for_reading() -> None:
    """Waits until the processor is idle, because the next batches are made ahead."""
    for _ in range(20):
        used = time.process_time()
        time.sleep(0.05)
        if time.process_time() - used < 0.01:
            break


def _checkpoint_secs(config, trainer, run, step_secs, folder, most_secs):
    """Seconds by which a checkpoint, written in the background, delays the steps."""
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory(prefix=".towers-doctor-", dir=folder) as inside,
        Background() as background,
    ):
        path = pathlib.Path(inside, "checkpoints")
        checkpointer = Checkpointer(path, keep=config.keep_checkpoints)

        def timed_save(num_steps):
            started = time.perf_counter()
            tensors = trainer.state()
            for array in tensors.values():
                np.isfinite(array.astype(np.float64, copy=False)).all()  # as a run does
            values = {"best": None, "config": dataclasses.asdict(config)}
            snapshot = Snapshot(next(numbers), tensors, values)
            background.submit(lambda: checkpointer.save(snapshot))
            if num_steps:
                run(num_steps)
            background.wait()  # as the next checkpoint does
            return time.perf_counter() - started

        num_steps = math.ceil(2 * timed_save(0) / step_secs)
        num_steps = min(num_steps, config.checkpoint_every_steps or num_steps)
        costs, until = [], time.perf_counter() + most_secs
        while len(costs) < LEAST_CHECKPOINTS or time.perf_counter() < until:
            without_secs = num_steps * timed(run, num_steps)
            costs.append(timed_save(num_steps) - without_secs)
    return max(0.0, statistics.mean(costs))


class ConstantFeed(Resident):
    """The same batch again and again, in the memory of the towers' devices: `sizes` are
    the images of each tower, in all micro-batches together."""

    def __init__(self, batch: Batch, sizes: Sequence[int], devices: Sequence[str]):
        self.devices, self._batches = devices, []
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
