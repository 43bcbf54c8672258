"""Options that are chosen by trial: the length for a time budget, the largest batch."""

import bisect
import dataclasses
import functools
import gc
import os
import time
from typing import Any

from towers import console
from towers.build import assembly
from towers.config import Config
from towers.errors import ConfigError, out_of_memory
from towers.messages import duration
from towers.run.folder import RunFolder
from towers.run.stored_config import config_to_continue
from towers.training.trial import begin_trial, time_evaluation, time_run

# Share of the time that is kept for what is not measured, and seconds for the report.
RESERVE, REPORT_SECS = 0.03, 5.0

AUTO = "batch_size=auto"


def chosen_by_trial(
    workdir: str | os.PathLike,
    config: Config,
    minutes: float,
    largest_batch: bool,
    *,
    overwrite: bool = False,
    **options: Any,
) -> Config:
    """Return the config with the length and the batch that `train` is to choose.

    A run that is continued keeps its own. `options` are those of `dry_run`. ConfigError
    if time, memory or a GPU is missing, or there are several workers.
    """
    started, folder = time.monotonic(), RunFolder(workdir)
    names = ["batch_size"] if largest_batch else []
    names += ["num_epochs", "warmup_epochs", "compile"] if minutes else []
    continues = not overwrite or folder.is_restarted()
    if continues and (stored := config_to_continue(workdir)) is not None:
        kept = {name: getattr(stored, name) for name in names}
        listed = ", ".join(f"{name}={value}" for name, value in kept.items())
        console.line(f"the run in {folder.path} continues with its {listed}")
        return dataclasses.replace(config, **kept)

    def begin(flag, config):
        gc.collect()  # The variables of an earlier trial are in cycles.
        return begin_trial(flag, workdir, config, banner=False, **options)

    if largest_batch:
        config = _with_largest_batch(config, begin)
    if minutes:
        config = _with_budget(config, begin, minutes, started)
    gc.collect()
    return config


def _with_budget(config, begin, minutes, started):
    """Return the config with as many epochs as fit into `minutes` from `started`."""
    console.line(f"minutes={minutes:g}: steps and evaluations are timed first")
    # max_steps does not shorten the schedule, and one step would only be compiled.
    num_epochs, begun = max(config.num_epochs, 10.0), time.monotonic()
    tried = dataclasses.replace(config, max_steps=0, num_epochs=num_epochs)
    trial = begin("minutes", tried)
    build_secs = time.monotonic() - begun
    secs_of, evaluation_secs = trial.watched(functools.partial(time_run, trial))
    parts = trial.parts
    once = build_secs + secs_of["linear probe"] + secs_of["compiling"]
    in_steps = secs_of["input"] + secs_of["steps"] + secs_of["checkpoints"]
    secs_per_step = in_steps / parts.last_step
    left = 60 * minutes * (1 - RESERVE) - (time.monotonic() - started)
    left -= once + REPORT_SECS

    def secs(num_steps):
        periods = dataclasses.replace(parts.periods, total_steps=num_steps)
        count = periods.num_evaluations(0, num_steps)
        return num_steps * secs_per_step + count * evaluation_secs

    most = max(1, int(left / secs_per_step))
    num_steps = bisect.bisect(range(1, most + 1), left, key=secs)
    if not num_steps:
        needed = duration(60 * minutes - left + secs(1))
        why = f"trials, a start, a step, an evaluation and the report take {needed}"
        raise ConfigError(f"minutes={minutes:g} is too short: {why}")
    num_epochs = num_steps * config.images_per_step / parts.num_examples
    num_epochs = max(float(f"{num_epochs * 0.9995:.4g}"), 1e-6)
    console.line(
        f"minutes={minutes:g}: num_epochs={num_epochs:g}, about {num_steps:,} steps of "
        f"{1000 * secs_per_step:.0f} ms; an evaluation takes "
        f"{duration(evaluation_secs)}, a start {duration(once)}"
    )
    return dataclasses.replace(
        config,
        num_epochs=num_epochs,
        warmup_epochs=config.warmup_for(num_epochs),
        # A shorter run, with compile=auto, would be slower than the trial.
        compile="xla" if trial.trainer.compilation.xla else config.compile,
    )


def _with_largest_batch(config, begin):
    """Return the config with the largest batch that fits, a power of two a tower."""
    devices = assembly.configure_devices(config)
    if devices.kind != "GPU":
        why = "the towers run on the CPU, where memory does not limit the batch"
        raise ConfigError(f"{AUTO}: {why}; give a number, such as --batch_size=128")
    # Images of full size; without XLA, which compiles long and saves memory as a rule.
    changes = {"early_sizes": "", "compile": "none"}
    if not config.choice_of("strategy").processes:
        # In NCCL towers wait forever for one that has no memory left.
        changes["all_reduce"] = "star"

    def why_not(size):
        """Return why a batch is too large; None if it fits."""
        console.line(f"{AUTO}: {size} images are tried")
        tried = dataclasses.replace(config, batch_size=size, **changes)
        try:
            trial = begin(AUTO, tried)
            if tried.images_per_step > (count := trial.parts.num_examples):
                return f"there are {count:,} images to train on"
            trial.watched(lambda heartbeat: trial.take_steps(2))
            trial.watched(functools.partial(time_evaluation, trial))
        except Exception as error:
            if why := out_of_memory(error):
                return why
            raise

    num_towers = max(1, len(devices.towers) // config.devices_per_network)
    per_tower = max(1, config.batch_size // num_towers)
    first = size = 2 ** (per_tower.bit_length() - 1) * num_towers
    while why := why_not(size):
        if size == num_towers:
            way = "set --precision=bfloat16 or --recompute, or take a smaller network"
            raise ConfigError(f"{AUTO}: {size} is too large: {why}; {way}")
        size, limit = size // 2, why
    while size >= first and not (limit := why_not(2 * size)):
        size *= 2
    rate = config.learning_rate
    console.line(
        f"{AUTO}: batch_size={size} ({2 * size} is too large: {limit}); learning_rate "
        f"stays {rate:g}; scaled linearly from batch_size={config.batch_size} it would "
        f"be {rate * size / config.batch_size:g}"
    )
    return dataclasses.replace(config, batch_size=size)
