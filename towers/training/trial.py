"""Trials of a run in this process: dry runs, which write nothing, and range tests."""

import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import tensorflow as tf

from towers import console, store
from towers.build import assembly
from towers.build.builder import Parts, with_given
from towers.build.restored import evaluated_weights
from towers.cluster.agreement import refuse_workers
from towers.cluster.spec import Cluster
from towers.config import Config
from towers.data.batches import EvalBatches
from towers.data.sets.arrays import Data
from towers.data.sources import num_bytes
from towers.errors import ConfigError, Preempted, data_errors_of_tensorflow
from towers.messages import duration
from towers.optim.phases import image_size, phase_at
from towers.optim.schedules import Schedule
from towers.parallel.loop import ACTIVITIES
from towers.parallel.trainer import Trainer
from towers.pretrained.standardization import with_options_of_weights
from towers.run.checkpoint import Checkpoint
from towers.run.folder import RunFolder
from towers.run.progress import Lap, Stopwatch
from towers.run.restore import checkpointer_of
from towers.training import linear_probe, lr_range
from towers.training.banner import print_banner, print_entry
from towers.training.display import Status, create_display
from towers.training.ending import how_to_continue
from towers.training.restore import load_trainer, validate_changes
from towers.training.setup import build_run, cluster_of
from towers.training.watchdog import Watchdog

# Time for which steps are timed, and duration of a call, in seconds.
TIMED_SECS, CALL_SECS = 5.0, 1.0

TIMED_BATCHES = 4  # number of batches of an evaluation that are timed
MIN_SHARE = 0.1  # minimum share of the time of a run for which a flag is suggested


def dry_run(
    workdir: str | os.PathLike,
    config: Config,
    *,
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Print what `train`, with the same arguments, would do and need, and try steps.

    A run in the folder is continued in this process alone: nothing is written.

    `options` are `model`, `data`, `class_names`, `cluster`, `allow_public_address` and
    `origins`. Raises the errors of `train` that are known before a run.
    """
    options |= {"continues": not overwrite, "allow_change": allow_change}
    trial = begin_trial("dry_run", workdir, config, **options)
    if trial.checkpoint is not None:
        print_entry("continues", f"from step {trial.trainer.step}")
    elif steps := checkpointer_of(trial.folder).steps():
        print_entry("overwrites", f"a run at step {steps[-1]}")
    trial.watched(functools.partial(_try, trial))
    console.line("dry run: all is in order, and nothing was written")


def lr_range_test(
    workdir: str | os.PathLike,
    config: Config,
    *,
    progress: str = "auto",
    **options: Any,
) -> lr_range.LrRange:
    """Take the first steps of a run with a growing learning rate, and suggest one.

    The loss diverges in the end. The run itself is not begun, nor is a run in the
    folder touched: `lr_range_test.png` is written there. Arguments are as in `train`,
    and `options` as in `dry_run`.

    Returns:
        `rates`, `losses` and `smoothed`, float64 [steps], and the `suggestion`, None
        if the loss does not fall.

    Raises:
        TowersError: such as a ConfigError if the folder cannot be written.
    """
    # A step that is not finite ends the test without an error.
    config = dataclasses.replace(config, on_nonfinite="skip", ema_decay=0.0)
    scale_free = config.choice_of("optimizer").scale_free
    images = config.images_per_step
    rate_fn = functools.partial(lr_range.growing_rate, images, scale_free)
    trial = begin_trial(lr_range.NAME, workdir, config, schedule_fn=rate_fn, **options)
    parts, trainer = trial.parts, trial.trainer
    if config.linear_probe:
        linear_probe.fit_head(trainer, parts, config, trial.new)
    count = lr_range.num_steps(images, parts.num_examples)
    per_step = images / parts.num_examples
    status = Status(count, count * per_step, epochs_per_step=per_step)
    rates = f"{trainer.learning_rate(0):g} to {lr_range.HIGHEST:g}"
    console.line(f"learning rates from {rates} in {count} steps")
    with create_display(progress, status) as display:
        losses = trial.losses(count)
        result = trial.watched(lambda _: lr_range.range_test(losses), display.tick)
    lowest = result.smoothed.argmin()
    console.line(
        f"{len(result.rates)} steps, to {result.rates[-1]:.2g}; the smoothed loss is "
        f"lowest, {result.smoothed[lowest]:.3f}, at {result.rates[lowest]:.2g}"
    )
    trial.folder.create()
    picture = trial.folder.path / f"{lr_range.NAME}.png"
    try:
        store.write_aside(picture, lr_range.draw(result))
    except OSError as error:
        raise ConfigError(f"{picture} cannot be written: {error.strerror}") from None
    console.line(f"picture: {picture}")
    if result.suggestion is None:
        console.line("the loss does not fall, so no learning rate is suggested")
    return result


class Trial(NamedTuple):
    """The parts of a run that is tried, and its trainer with the first parameters."""

    config: Config
    folder: RunFolder
    parts: Parts
    trainer: Trainer
    checkpoint: Checkpoint | None  # from which the run would go on
    new: Mapping[str, Sequence[int]]  # see `start_from`

    def watched(
        self,
        function: Callable[[Callable[[], None]], Any],
        tick: Callable[[int, str], None] = lambda step, activity: None,
    ) -> Any:
        """Call a function, which gets a heartbeat, until a signal abandons it."""
        secs = self.config.stuck_after_secs
        watchdog = Watchdog(self.trainer, ACTIVITIES, stuck_after_secs=secs, tick=tick)

        def call():
            with watchdog.training() as heartbeat:
                return function(heartbeat)

        try:
            with watchdog, data_errors_of_tensorflow():
                result = watchdog.call(call)
                if watchdog.stop_requested:
                    raise Preempted
                return result
        except Preempted:
            signal = watchdog.stopped_by
            raise Preempted(f"stopped by {signal}; nothing was written") from None

    def take_steps(self, num_steps: int) -> dict[str, Any]:
        """Call `Trainer.train`, inside of `watched`."""
        metrics = self.trainer.train(num_steps)
        if not metrics:
            raise Preempted
        return metrics

    def losses(self, num_steps: int) -> Iterator[tuple[float, float]]:
        """Take steps; yield learning rate and loss, NaN if it is not finite."""
        for _ in range(num_steps):
            metrics = self.take_steps(1)
            loss = math.nan if metrics["skipped_steps"] else float(metrics["loss"])
            yield float(metrics["learning_rate"]), loss


def begin_trial(
    flag: str,
    workdir: str | os.PathLike,
    config: Config,
    *,
    model: Any = None,
    data: Data | None = None,
    class_names: Sequence[str | int] = (),
    continues: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
    schedule_fn: Callable[[int], Schedule] | None = None,
    banner: bool = True,
) -> Trial:
    """Build what `flag` tries, as `train` does, and print the start banner."""
    config, _ = with_given(config, model, data, class_names)
    refuse_workers(cluster_of(config, cluster, allow_public_address), f"--{flag}")
    folder = RunFolder(workdir)
    folder.validate_not_inside_data(config.teacher, config.dataset, config.data_dir)
    folder.validate()
    checkpoint = checkpointer_of(folder).read() if continues else None
    validate_changes(config, folder, checkpoint, allow_change)
    config = with_options_of_weights(config, checkpoint)
    devices = assembly.configure_devices(config)
    parts, trainer = build_run(
        config, devices, checkpoint, allow_change, schedule_fn=schedule_fn
    )
    if banner:
        print_banner(config, folder, devices, parts, trainer, origins)
    new = load_trainer(trainer, config, checkpoint, parts.data.class_names)
    return Trial(config, folder, parts, trainer, checkpoint, new)


# Dry runs.


def _try(trial: Trial, heartbeat: Callable[[], None]) -> None:
    """Describe the next batch, and take steps until the time of the run is known."""
    config, parts, trainer = trial.config, trial.parts, trial.trainer
    started = time.monotonic()
    batch = parts.train_batches(tf.constant(trainer.step, tf.int64))
    images = batch["images"].numpy()
    print_entry(
        "images",
        f"{'x'.join(map(str, images.shape))} {images.dtype}, {images.min():.3g} to "
        f"{images.max():.3g}, mean {images.mean():.3f}: the next batch, read in "
        f"{time.monotonic() - started:.2f} s",
    )
    heartbeat()
    saved = trial.checkpoint
    num_worse = saved.run_state["num_worse"] if saved else 0
    is_early = 0 < config.patience <= num_worse and trainer.step < parts.last_step
    if is_early or trainer.step >= parts.last_step:
        hint = how_to_continue(config, trainer.step, parts.total_steps, is_early)
        print_entry("finished", f"the run takes no step. {hint}")
        return
    begin = trainer.step
    num_evaluations = parts.periods.num_evaluations(begin, parts.last_step)
    secs_of, _ = time_run(trial, heartbeat)
    for device, size in trainer.variable_bytes().items():
        text = f"{device} {size / 1e6:,.2f} MB of variables"
        if "GPU" in device:
            peak = tf.config.experimental.get_memory_info(device.strip("/"))["peak"]
            text += f", {peak / 1e6:,.0f} MB at the peak"
        print_entry("memory", text)
    total = sum(secs_of.values())
    listed = (
        f"{name} {duration(x)} ({x / total:.0%})"
        for name, x in secs_of.items()
        if x >= 0.005 * total
    )
    print_entry(
        "whole run",
        f"about {duration(total)}: {parts.last_step - begin:,} steps, "
        f"{num_evaluations:,} evaluations; {', '.join(listed)}",
    )
    ways = _ways_out(config, trainer, parts)
    name = max(ways, key=secs_of.__getitem__)
    if secs_of[name] >= MIN_SHARE * total:
        part = f"{name} {'takes' if name == 'input' else 'take'}"
        print_entry("try", f"{ways[name]}: {part} {secs_of[name] / total:.0%}")


def time_run(trial: Trial, heartbeat: Callable[[], None]) -> tuple[dict, float]:
    """Print the speed; return part of a run -> seconds, and those of an evaluation."""
    config, parts, trainer = trial.config, trial.parts, trial.trainer
    begin, last_step = trainer.step, parts.last_step
    phase = trainer.phases[phase_at(trainer.phases, begin)]
    height, width = image_size(phase.model)
    start_secs, lap = _time_steps(trial, int(min(phase.end_step, last_step)))
    print_entry(
        "speed",
        f"{lap.steps_per_sec * config.images_per_step:,.0f} images/s on "
        f"{height}x{width}, {1000 / lap.steps_per_sec:,.1f} ms a step, input wait "
        f"{lap.input_wait_percent:.0f}%",
    )
    # The time of a step is about proportional to its pixels.
    pixels, first, num_phases = 0, begin, 0
    for phase in trainer.phases:
        end = max(first, int(min(phase.end_step, last_step)))
        pixels += (end - first) * math.prod(image_size(phase.model))
        num_phases += end > first  # each is compiled
        first = end
    train_secs = pixels / (height * width * lap.steps_per_sec)
    waited = train_secs * lap.input_wait_percent / 100
    secs_of = {"linear probe": 0.0, "compiling": num_phases * start_secs}
    secs_of |= {"input": waited, "steps": train_secs - waited, "evaluations": 0.0}
    once, num_evaluations = 0.0, parts.periods.num_evaluations(begin, last_step)
    if num_evaluations or config.linear_probe:
        compile_secs, once = time_evaluation(trial, heartbeat)
        secs_of["compiling"] += compile_secs
        secs_of["evaluations"] = num_evaluations * once
        if config.linear_probe and linear_probe.is_fitted(parts.model, trial.new):
            secs_of["linear probe"] = _time_features(trial, heartbeat)
    started = time.monotonic()
    trainer.state()
    secs_of["checkpoints"] = (time.monotonic() - started) * max(
        train_secs / (config.checkpoint_every_secs or math.inf),
        (last_step - begin) / (config.checkpoint_every_steps or math.inf),
    )
    return secs_of, once


def _time_steps(trial: Trial, end: int) -> tuple[float, Lap]:
    """Return the seconds of the first step, which is compiled, and the speed."""
    stopwatch, step = Stopwatch(), trial.trainer.step
    while step < end and stopwatch.timed_secs < TIMED_SECS:
        started = time.monotonic()
        metrics = trial.take_steps(min(stopwatch.steps_in(CALL_SECS), end - step))
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
    return stopwatch.start_secs, stopwatch.speed() or Lap(1 / stopwatch.start_secs, 0.0)


def time_evaluation(trial: Trial, heartbeat: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a first batch, and of an evaluation, from TIMED_BATCHES."""
    config, parts, trainer = trial.config, trial.parts, trial.trainer
    _, source = parts.eval_split
    batches = EvalBatches(source, parts.augment, config.batch_size, parts.share)
    feed = assembly.create_eval_feed(batches, trainer)
    weights = evaluated_weights(config)
    begun = time.perf_counter()
    trainer.evaluate(feed, 1, weights, heartbeat)  # compiles
    count, started = min(len(batches), TIMED_BATCHES), time.perf_counter()
    trainer.evaluate(feed, count, weights, heartbeat)
    secs = (time.perf_counter() - started) * len(batches) / count
    return started - begun, secs


def _time_features(trial: Trial, heartbeat: Callable[[], None]) -> float:
    """Return the seconds of the features for the linear probe."""
    config, parts = trial.config, trial.parts
    batches, count = linear_probe.features_of_images(trial.trainer, parts, config), 0
    next(batches)  # compiles
    started = time.perf_counter()
    for features, _ in itertools.islice(batches, TIMED_BATCHES):
        count += len(features)
        heartbeat()
    images = linear_probe.num_images(parts) * linear_probe.num_views(parts, config)
    return (time.perf_counter() - started) * images / max(1, count)


def _ways_out(config: Config, trainer: Trainer, parts: Parts) -> dict[str, str]:
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
