"""Steps, and parts of them, that are timed; the trainers write nothing."""

import dataclasses
import time

import tensorflow as tf

from towers import build
from towers.config import Config
from towers.data import streams
from towers.data.batches import Batch
from towers.doctor.constant_feed import ConstantFeed
from towers.doctor.timing import Timed
from towers.errors import NumericError
from towers.parallel.devices import Devices
from towers.parallel.loop import Loop
from towers.parallel.reduce import shares
from towers.parallel.step import accumulate
from towers.parallel.trainer import SynchronousTrainer, Trainer

# With it no parameter moves, however many steps are timed.
LEARNING_RATE = 1e-12

# Batches that a stream may have made ahead: in two stages, and behind them.
NUM_AHEAD = 2 * streams.NUM_CALLS + 4
MOST_AHEAD_SECS = 10.0

INPUT, CONSTANT, GRADIENTS, ONE, TOWER, DOUBLE = (
    "steps on the run's own input",
    "steps on a batch in memory",
    "the gradients of all towers alone",
    "steps of one tower alone",
    "the gradients of one tower alone",
    "the same with twice the images",
)


def without_learning(config: Config) -> Config:
    """The config of the trainers that are timed."""
    return dataclasses.replace(config, learning_rate=LEARNING_RATE)


def create_steps(
    config: Config,
    parts: build.Parts,
    devices: Devices,
    trainer: Trainer,
    batch: Batch,
) -> dict[str, Timed]:
    """INPUT, CONSTANT and so on -> steps of it. There are no GRADIENTS of asynchronous
    towers.

    Args:
        config: `without_learning`.
        parts, devices, trainer: made of it.
        batch: of a step.
    """
    leads = devices.towers[:: config.devices_per_network]
    sizes = [n * config.accumulate_steps for n in shares(config.batch_size, len(leads))]
    constant = ConstantFeed(batch, sizes, leads)
    steps = {INPUT: _on_stream(trainer)}
    if isinstance(trainer, SynchronousTrainer):
        steps[CONSTANT] = _steps(trainer, trainer.create_loop(constant))
        steps[GRADIENTS] = _gradients(trainer, constant)
    else:
        in_memory = build.create_trainer(config, parts, devices, feed=constant)
        steps[CONSTANT] = Timed(in_memory.train)
    share = ConstantFeed(batch, sizes[:1], leads[:1])
    twice = ConstantFeed(batch, [2 * sizes[0]], leads[:1])
    one, one_devices = _one_tower(config, devices)
    alone = build.create_trainer(one, parts, one_devices, feed=share)
    steps[ONE] = _steps(alone, alone.loop)
    steps[TOWER] = _gradients(alone, share)
    steps[DOUBLE] = _gradients(alone, twice)
    return steps


def _one_tower(config, devices):
    """The config and the devices of the first tower alone, with its share of a
    batch."""
    size = config.devices_per_network
    num_images = shares(config.batch_size, len(devices.towers) // size)[0]
    changes = {"num_towers": size, "device_order": "", "batch_size": num_images}
    changes["repeats"] = 1  # of a batch that lies ready
    if config.choice_of("strategy").asynchronous:
        changes["strategy"] = "towers"
    if config.all_reduce == "nccl":
        changes["all_reduce"] = "auto"
    one = dataclasses.replace(config, **changes)
    return one, dataclasses.replace(devices, towers=devices.towers[:size])


def _steps(trainer: SynchronousTrainer, loop: Loop) -> Timed:
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

    return Timed(run)


def _gradients(trainer: SynchronousTrainer, feed: ConstantFeed) -> Timed:
    """The gradients of a trainer's towers, with parameters that lie on their devices;
    no mean, no update."""
    fetched, home = trainer.strategy.fetch(), trainer.strategy.home

    def compute(phase, batches, before):
        def gradients(values, pieces):
            scale = trainer.guard.read_scale()
            return trainer.network.gradients(phase, values, pieces, loss_scale=scale)

        accumulated = trainer.task.accumulate_steps
        if accumulated == 1:
            results = gradients(fetched, batches)
        else:
            results = accumulate(gradients, fetched, batches, accumulated)
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


def _on_stream(trainer: Trainer) -> Timed:
    """Steps on the run's input, after what was read ahead in a pause is used up."""
    run = trainer.train
    if isinstance(trainer, SynchronousTrainer):
        run = _steps(trainer, trainer.loop).run

    def use_up():
        until = time.perf_counter() + MOST_AHEAD_SECS
        for _ in range(NUM_AHEAD):
            run(1)
            if time.perf_counter() > until:
                break

    # As many batches as are made at the same time come at the same time.
    return Timed(run, use_up, _wait_for_reading, least_steps=streams.NUM_CALLS)


def _wait_for_reading() -> None:
    """Waits until the processor is idle, because the next batches are made ahead."""
    for _ in range(20):
        used = time.process_time()
        time.sleep(0.05)
        if time.process_time() - used < 0.01:
            break
