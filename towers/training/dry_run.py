"""Dry runs: what a run would do and need, tried without writing anything."""

import collections
import dataclasses
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
import tensorflow as tf

from towers import build, console
from towers.config import Config
from towers.data.batches import EvalBatches
from towers.data.paths import data_folder, shown
from towers.errors import ConfigError, NumericError
from towers.evaluation.restored import kinds_of_parameters
from towers.models.flops import flops_per_image
from towers.models.summary import activation_bytes, parameter_table
from towers.optim.epochs import num_images
from towers.optim.phases import Phase, image_size, phase_at
from towers.parallel.trainer import Trainer
from towers.run.banner import entry, start_banner
from towers.run.cluster_spec import Cluster
from towers.run.display import Status, create_display, duration
from towers.run.folder import RunFolder
from towers.run.periods import Periods
from towers.run.restore import checkpointer_of, load_trainer, validate_changes
from towers.run.stopwatch import Stopwatch
from towers.run.watchdog import Watchdog
from towers.training.ending import how_to_continue
from towers.training.setup import (
    configure_devices,
    create_trainer,
    take_steps,
    validate_alone,
    watched,
)

# Steps are timed for so long, or so many of them; and so many batches of an evaluation.
TIMED_SECS, MOST_TIMED_STEPS, TIMED_BATCHES = 5.0, 100, 4

# A call of several steps takes about so long.
CALL_SECS = 1.0

# Classes that are named.
_MOST_NAMED = 10


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run that is tried, from the step that it has reached to its last."""

    config: Config
    parts: build.Parts
    trainer: Trainer
    step: int
    last_step: int


def dry_run(
    workdir: str | os.PathLike,
    config: Config,
    *,
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """See `towers.dry_run`."""
    validate_alone("dry_run", config, cluster, allow_public_address)
    folder = RunFolder(workdir)
    if config.dataset == "image_folder":
        folder.validate_outside_of(data_folder(config.data_dir))
    checkpointer, checkpoint = checkpointer_of(folder), None
    has_checkpoints = os.path.isdir(folder.checkpoints)
    if has_checkpoints and not overwrite:
        checkpoint = checkpointer.restore()
    validate_changes(config, folder, checkpoint, allow_change)

    # Build.
    devices = configure_devices(config)
    parts, trainer = create_trainer(
        config, devices, checkpoint=checkpoint, allow_change=allow_change
    )
    for line in start_banner(
        config,
        folder,
        devices,
        trainer,
        data=parts.data,
        image_shape=parts.augment.image_shape,
        num_examples=parts.num_examples,
        total_steps=parts.total_steps,
        origins=origins,
    ):
        console.line(line)
    load_trainer(trainer, config, checkpoint)
    last_step = min(config.max_steps or parts.total_steps, parts.total_steps)
    trial = Trial(config, parts, trainer, trainer.step, last_step)

    # Inspect, and take steps.
    if checkpoint is not None:
        _print("continues", f"from step {trial.step} of {last_step} in {folder.path}")
    elif has_checkpoints and (steps := checkpointer.steps()):
        _print("overwrites", f"the run in {folder.path}, which is at step {steps[-1]}")
    _print_data(trial)
    _print_network(trial)
    _print_memory(trial)
    if trial.step < last_step:
        display = create_display("off", Status(last_step, config.num_epochs))
        watched(lambda watchdog: _try(trial, watchdog), trainer, config, display)
    else:
        way_on = how_to_continue(config, trial.step, parts.total_steps)
        _print("finished", f"the run takes no step. {way_on}")
    if config.choice_of("strategy").processes:
        _print("not tried", "other workers, and what travels between them")

    # What else would end the run at its start.
    folder.validate()
    if (holder := folder.holder()) is not None:
        raise ConfigError(
            f"another process trains in {folder.path}: process {holder.get('pid', '?')}"
            "; wait for it, stop it, or choose another --workdir"
        )
    console.line("dry run: all is in order, and nothing was written")


def _print(name: str, text: str) -> None:
    for line in entry(name, text):
        console.line(line)


def _print_data(trial: Trial) -> None:
    """Classes, and a batch that is read."""
    names = [shown(name, 40) for name in trial.parts.data.class_names]
    text = f"{len(names)}: {', '.join(names[:_MOST_NAMED])}"
    _print("classes", f"{text}, ..." if names[_MOST_NAMED:] else text)
    split, source = trial.parts.eval_split
    _print("evaluations", f"on {source.num_examples:,} {split} images")
    started = time.monotonic()
    batch = trial.parts.train_batches(tf.constant(trial.step, tf.int64))
    images = batch["images"].numpy()
    secs = time.monotonic() - started
    shape = "x".join(map(str, images.shape))
    _print(
        "batch",
        f"read in {secs:.2f} s: images {shape} {images.dtype.name}, "
        f"{images.min():.3g} to {images.max():.3g}, mean {images.mean():.2f}",
    )


def _print_network(trial: Trial) -> None:
    """Parameters and operations."""
    trainer, config = trial.trainer, trial.config
    phase = trainer.phases[phase_at(trainer.phases, trial.step)]
    console.line("")
    for line in parameter_table(phase.model, phase.frozen):
        console.line(line)
    console.line("")
    try:
        flops = flops_per_image(phase.model)
    except ValueError as error:
        _print("operations", f"not counted: {error}")
        return
    _print(
        "operations",
        f"{_with_prefix(flops)}FLOP an image forward; a step about "
        f"{_with_prefix(3 * flops * config.images_per_step)}FLOP, three times that of "
        f"{config.images_per_step} images",
    )


def _print_memory(trial: Trial) -> None:
    """Variables by device, and an estimate of the activations."""
    trainer = trial.trainer
    sizes: dict[str, collections.Counter] = {}
    for copy in trainer.strategy.copies:
        counter = sizes.setdefault(copy.device, collections.Counter())
        counter.update(copy.num_bytes())
    networks = {id(phase.model): phase.model for phase in trainer.phases}
    image = max(map(activation_bytes, networks.values()))
    size = trainer.strategy.num_shards
    for tower, num_local in enumerate(trainer.strategy.sizes):
        for device in trainer.devices[tower * size : (tower + 1) * size]:
            counter = sizes.setdefault(device, collections.Counter())
            counter["activations about"] += num_local * image // size
    name = "memory"
    for device, counter in sizes.items():
        parts = ", ".join(
            f"{kind} {_mb(size)}" for kind, size in counter.items() if size >= 1000
        )
        _print(name, f"{device} {_mb(counter.total())} MB: {parts}")
        name = ""


# Steps.


def _try(trial: Trial, watchdog: Watchdog) -> None:
    """Takes steps and evaluates, and prints how long the run takes."""
    config, trainer, parts = trial.config, trial.trainer, trial.parts
    train_secs = compile_secs = secs_per_step = 0.0
    for first, last, phase in _spans(trial):
        height, width = image_size(phase.model)
        try:
            stopwatch = _time_steps(trial, watchdog, first, phase)
            lap = stopwatch.speed()
        except NumericError as error:
            if first == trial.step:
                raise
            _print("speed", f"not known on {height}x{width}: {error}")
        else:
            compile_secs += stopwatch.start_secs
            secs_per_step = 1 / lap.steps_per_sec if lap else stopwatch.start_secs
            _print(
                "speed",
                f"{config.images_per_step / secs_per_step:,.0f} images/s on "
                f"{height}x{width}, {1000 * secs_per_step:,.1f} ms a step"
                + (f", input wait {lap.input_wait_percent:.0f}%" if lap else ""),
            )
        train_secs += (last - first) * secs_per_step
    _print_peak(trainer)
    periods = Periods(
        total_steps=parts.total_steps,
        images_per_step=config.images_per_step,
        log_every_steps=0,
        summary_every_steps=0,
        checkpoint_every_steps=0,
        images_per_eval=num_images(config.eval_every_epochs, parts.num_examples),
    )
    count = periods.num_evaluations(trial.step, trial.last_step)
    eval_secs = _time_evaluation(trial, watchdog) if count else 0.0
    _print(
        "whole run",
        f"about {duration(train_secs + compile_secs + count * eval_secs)}: "
        f"{trial.last_step - trial.step:,} steps in {duration(train_secs)}, "
        f"{count} evaluation{'s' * (count != 1)} of {eval_secs:.1f} s, "
        f"{compile_secs:.1f} s to compile; what is written comes on top",
    )


def _spans(trial: Trial) -> Iterator[tuple[int, int, Phase]]:
    """Of each phase that is left the first step, the one after it, and the phase."""
    first = trial.step
    for phase in trial.trainer.phases:
        last = int(min(phase.end_step, trial.last_step))
        if first < last:
            yield first, last, phase
            first = last


def _time_steps(
    trial: Trial, watchdog: Watchdog, first: int, phase: Phase
) -> Stopwatch:
    """The times of a step, which is compiled, and of those that follow in a phase."""
    trainer, stopwatch = trial.trainer, Stopwatch()
    if first > trial.step:
        trainer.load(trainer.state() | {"step": np.array(first, np.int64)})
    step = first
    while (
        step < phase.end_step
        and stopwatch.timed_secs < TIMED_SECS
        and stopwatch.timed_steps < MOST_TIMED_STEPS
    ):
        num_steps = min(stopwatch.steps_in(CALL_SECS), phase.end_step - step)
        started = time.monotonic()
        metrics = take_steps(trainer, watchdog, num_steps)
        secs = time.monotonic() - started
        stopwatch.add(metrics["step"] - step, secs, metrics["input_wait_secs"])
        if step == trial.step:
            _print(
                "first step",
                f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}, "
                f"gradient norm {metrics['gradient_norm']:.3g}, learning rate "
                f"{metrics['learning_rate']:.3g}",
            )
        step = metrics["step"]
    return stopwatch


def _time_evaluation(trial: Trial, watchdog: Watchdog) -> float:
    """Seconds of an evaluation, from some of its batches."""
    (_, source), config = trial.parts.eval_split, trial.config
    batches = EvalBatches(
        source, trial.parts.augment, config.batch_size, trial.parts.part
    )
    feed = build.create_eval_feed(batches, trial.trainer)
    kinds, count = kinds_of_parameters(config), min(len(batches), TIMED_BATCHES)
    with watchdog.activity("evaluating") as beat:
        trial.trainer.evaluate(feed, 1, kinds, beat)  # which compiles
        started = time.monotonic()
        trial.trainer.evaluate(feed, count, kinds, beat)
        return (time.monotonic() - started) * len(batches) / count


def _print_peak(trainer: Trainer) -> None:
    """The most memory that was taken."""
    gpus = [device for device in trainer.devices if "GPU" in device]
    for gpu in gpus:
        peak = tf.config.experimental.get_memory_info(gpu.strip("/"))["peak"]
        _print("peak memory", f"{gpu} {_mb(peak)} MB")
    if not gpus:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        text = "of this process, with TensorFlow and the data"
        _print("peak memory", f"{_mb(peak)} MB {text}")


def _mb(num_bytes: int) -> str:
    """Megabytes in two significant digits or more."""
    size = num_bytes / 1e6
    return f"{size:,.0f}" if size >= 10 else f"{size:.2g}"


def _with_prefix(number: float) -> str:
    """Such as "40.8 M"."""
    for prefix, size in (("T", 1e12), ("G", 1e9)):
        if number >= size:
            return f"{number / size:,.1f} {prefix}"
    return f"{number / 1e6:,.1f} M"
