"""Dry runs: what a run would do and need, tried without writing anything."""

import collections
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from towers import build_trainer, console
from towers.build import Parts
from towers.cluster.cluster_spec import Cluster
from towers.config import Config
from towers.data.batches import EvalBatches
from towers.data.sets.arrays import Data
from towers.data.sources import num_bytes
from towers.errors import NumericError
from towers.evaluation.restored import evaluated_weights
from towers.models.summary import activation_bytes, flops_per_image
from towers.optim.phases import image_size, phase_at
from towers.parallel.trainer import Trainer
from towers.reporting.display import duration
from towers.run.progress import Lap, Stopwatch
from towers.run.restore import checkpointer_of, load_trainer, validate_changes
from towers.run.standardization import with_resize_of_weights
from towers.training.banner import print_banner, print_entry
from towers.training.ending import how_to_continue
from towers.training.linear_probe import probe_secs
from towers.training.setup import (
    build_run,
    folder_of_trial,
    take_steps,
    watched,
    with_given,
)

# The steps of a phase are timed for so long, in calls of so long.
TIMED_SECS, CALL_SECS = 5.0, 1.0

# Batches of an evaluation that are timed.
TIMED_BATCHES = 4

# Share of the time of a run from which on a part is worth a try.
MIN_SHARE = 0.1


def dry_run(
    workdir: str | os.PathLike,
    config: Config,
    *,
    model: Any = None,
    data: Data | None = None,
    class_names: Sequence[str | int] = (),
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Prints what `train`, with the same arguments, would do and need, and tries some
    steps. A run in the folder is continued in this process alone: nothing is written.

    Raises:
        TowersError: as `train`, for errors that are known before a run.
    """
    config, _ = with_given(config, model, data, class_names)
    folder = folder_of_trial("dry_run", workdir, config, cluster, allow_public_address)
    checkpointer = checkpointer_of(folder)
    checkpoint = checkpointer.read() if not overwrite else None
    validate_changes(config, folder, checkpoint, allow_change)
    config = with_resize_of_weights(config, checkpoint)
    devices = build_trainer.configure_devices(config)
    parts, trainer = build_run(
        config, devices, checkpoint=checkpoint, allow_change=allow_change
    )
    print_banner(config, folder, devices, parts, trainer, origins)
    new = load_trainer(trainer, config, checkpoint, parts.data.class_names)
    if checkpoint is not None:
        print_entry("continues", f"from step {trainer.step}")
    elif steps := checkpointer.steps():
        print_entry("overwrites", f"a run at step {steps[-1]}")
    num_worse = checkpoint.trainer_state["num_worse"] if checkpoint else 0
    is_early = 0 < config.patience <= num_worse
    is_early &= trainer.step < parts.last_step
    run = functools.partial(_try, config, parts, trainer, new, is_early)
    watched(run, trainer, config)
    console.line("dry run: all is in order, and nothing was written")


def _try(config, parts, trainer, new, is_early, heartbeat):
    """Describes the run, and takes steps until its time is known."""
    started = time.monotonic()
    batch = parts.train_batches(tf.constant(trainer.step, tf.int64))
    images = batch["images"].numpy()
    secs = time.monotonic() - started
    print_entry(
        "images",
        f"{'x'.join(map(str, images.shape))} {images.dtype}, {images.min():.3g} to "
        f"{images.max():.3g}, mean {images.mean():.3f}: the next batch, read in "
        f"{secs:.2f} s",
    )
    heartbeat()
    _print_operations(config, trainer)
    _print_memory(trainer)
    if trainer.step < parts.last_step and not is_early:
        head_secs = 0.0
        if config.linear_probe:
            head_secs = probe_secs(trainer, parts, config.batch_size, new, heartbeat)
        _time(config, parts, trainer, head_secs, heartbeat)
    else:
        hint = how_to_continue(config, trainer.step, parts.total_steps, is_early)
        print_entry("finished", f"the run takes no step. {hint}")


def _print_operations(config, trainer):
    """Print the floating-point operations of a step in the phase of the next step."""
    phase = trainer.phases[phase_at(trainer.phases, trainer.step)]
    try:
        flops = flops_per_image(phase.model)
    except ValueError as error:
        print_entry("operations", f"not counted: {error}")
        return
    print_entry(
        "operations",
        f"{flops / 1e6:,.1f} MFLOP for one image forward; a step about "
        f"{3 * flops * config.images_per_step / 1e9:,.1f} GFLOP, three times "
        f"the forward pass of {config.images_per_step} images",
    )


def _print_memory(trainer):
    """Bytes of the variables on each device, and an estimate of the activations."""
    sizes = collections.defaultdict(collections.Counter)
    for copy in trainer.strategy.copies:
        sizes[copy.device].update(copy.num_bytes())
    if trainer.teacher:
        for device, count in trainer.teacher.variable_bytes().items():
            sizes[device]["teacher"] += count
    image_bytes = max(activation_bytes(phase.model) for phase in trainer.phases)
    num_shards = trainer.strategy.num_shards
    for number, device in enumerate(trainer.devices):
        images = trainer.sizes[number // num_shards]
        sizes[device]["activations about"] += images * image_bytes // num_shards
    for device, counter in sizes.items():
        listed = (f"{kind} {n / 1e6:,.2f}" for kind, n in counter.items() if n > 5000)
        total = counter.total() / 1e6
        print_entry("memory", f"{device} {total:,.2f} MB: {', '.join(listed)}")


def _time(config, parts, trainer, head_secs, heartbeat):
    """The speed in each phase that is left, and the time of the run, which begins with
    a linear probe of `head_secs`, or 0."""
    begin, last_step = trainer.step, parts.last_step
    first = begin
    train_secs = start_secs = input_secs = 0.0
    lap = None
    for phase in trainer.phases:
        end = int(min(phase.end_step, last_step))
        if first >= end:
            continue
        trainer.load(trainer.state() | {"step": np.array(first, np.int64)})
        height, width = image_size(phase.model)
        try:
            stopwatch = _time_steps(trainer, first, end)
        except NumericError as error:
            if first == begin:
                raise
            # The steps before it were not taken. The speed is taken as before.
            print_entry("speed", f"not known on {height}x{width}: {error}")
        else:
            lap = stopwatch.speed() or Lap(1 / stopwatch.start_secs, 0.0)
            start_secs += stopwatch.start_secs
            print_entry(
                "speed",
                f"{lap.steps_per_sec * config.images_per_step:,.0f} images/s on "
                f"{height}x{width}, {1000 / lap.steps_per_sec:,.1f} ms a step, input "
                f"wait {lap.input_wait_percent:.0f}%",
            )
        secs = (end - first) / lap.steps_per_sec
        train_secs += secs
        input_secs += secs * lap.input_wait_percent / 100
        first = end
    for device in trainer.devices:
        if "GPU" in device:
            peak = tf.config.experimental.get_memory_info(device.strip("/"))["peak"]
            print_entry("peak memory", f"{device} {peak / 1e6:,.0f} MB")

    num_evaluations = parts.periods.num_evaluations(begin, last_step)
    secs = {"linear probe": head_secs, "compiling": start_secs}
    secs |= {"input": input_secs, "steps": train_secs - input_secs, "evaluations": 0.0}
    if num_evaluations:
        once = evaluation_secs(config, parts, trainer, heartbeat)
        secs["evaluations"] = num_evaluations * once
    started = time.monotonic()
    trainer.state()
    secs["checkpoints"] = (time.monotonic() - started) * max(
        train_secs / (config.checkpoint_every_secs or math.inf),
        (last_step - begin) / (config.checkpoint_every_steps or math.inf),
    )
    total = sum(secs.values())
    listed = (
        f"{name} {duration(x)} ({x / total:.0%})"
        for name, x in secs.items()
        if x >= 0.005 * total
    )
    print_entry(
        "whole run",
        f"about {duration(total)}: {last_step - begin:,} steps, {num_evaluations:,} "
        f"evaluations; {', '.join(listed)}",
    )
    ways = _ways_out(config, trainer, parts)
    name = max(ways, key=secs.get)
    if secs[name] >= MIN_SHARE * total:
        part = f"{name} {'takes' if name == 'input' else 'take'}"
        print_entry("try", f"{ways[name]}: {part} {secs[name] / total:.0%}")


def _ways_out(config, trainer, parts):
    """Return part of a run -> the flag to try if it takes much of the time."""
    source = parts.train_batches.source
    decoded_mb = parts.num_examples * math.prod(source.image_shape) / 1e6
    if "GPU" in trainer.devices[0] and num_bytes(source) and config.input != "resident":
        input_way = "--input=resident"
    elif getattr(source, "decodes", False) and decoded_mb > config.image_cache_mb:
        input_way = f"--image_cache_mb={math.ceil(decoded_mb)}"
    else:
        input_way = "a cheaper --augment, or more processor cores"
    every = config.eval_every_epochs * 10
    return {
        "input": input_way,
        "evaluations": f"--eval_every_epochs={min(every, config.num_epochs):g}",
        "checkpoints": "--checkpoint_every_steps=0 --checkpoint_every_secs=600",
    }


def _time_steps(trainer, first, end):
    """The times of a step, which is compiled, and of those that follow."""
    stopwatch, step = Stopwatch(), first
    while step < end and stopwatch.timed_secs < TIMED_SECS:
        started = time.monotonic()
        num_steps = min(stopwatch.steps_in(CALL_SECS), end - step)
        metrics = take_steps(trainer, num_steps)
        secs = time.monotonic() - started
        stopwatch.add(metrics["step"] - step, secs, metrics["input_wait_secs"])
        if not stopwatch.timed_steps:
            print_entry(
                f"step {metrics['step']}",
                f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}, "
                f"gradient norm {metrics['gradient_norm']:.3g}, learning rate "
                f"{metrics['learning_rate']:.3g}",
            )
        step = metrics["step"]
    return stopwatch


def evaluation_secs(
    config: Config, parts: Parts, trainer: Trainer, heartbeat: Callable[[], None]
) -> float:
    """Return the seconds of an evaluation during training, from TIMED_BATCHES of its
    batches."""
    _, source = parts.eval_split
    batches = EvalBatches(source, parts.augment, config.batch_size, parts.share)
    feed = build_trainer.create_eval_feed(batches, trainer)
    weights = evaluated_weights(config)
    trainer.evaluate(feed, 1, weights, heartbeat)  # compiles
    count, started = min(len(batches), TIMED_BATCHES), time.perf_counter()
    trainer.evaluate(feed, count, weights, heartbeat)
    return (time.perf_counter() - started) * len(batches) / count
