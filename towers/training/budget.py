"""A time budget: the length of a run that is to end after a number of minutes."""

import bisect
import dataclasses
import functools
import os
import time
from typing import Any

from towers import console
from towers.config import Config
from towers.errors import ConfigError
from towers.messages import duration
from towers.run.folder import RunFolder
from towers.run.stored_config import config_to_continue
from towers.training.trial import begin_trial, time_run

# Share of the time that is kept for what is not measured, and seconds for the report.
RESERVE, REPORT_SECS = 0.03, 5.0


def with_budget(
    workdir: str | os.PathLike,
    config: Config,
    minutes: float,
    *,
    overwrite: bool = False,
    **options: Any,
) -> Config:
    """Return the config with as many epochs as fit into `minutes` from now.

    Steps and evaluations are tried first, and that time counts, too. A run in the
    folder that is continued keeps its length. `options` are those of `dry_run`.

    Raises:
        ConfigError: there is no time for a step, or there are several workers.
    """
    started, folder = time.monotonic(), RunFolder(workdir)
    continues = not overwrite or folder.is_restarted()
    if continues and (stored := config_to_continue(workdir)) is not None:
        names = "num_epochs", "warmup_epochs"
        return dataclasses.replace(config, **{x: getattr(stored, x) for x in names})
    console.line(f"minutes={minutes:g}: steps and evaluations are timed first")
    trial = begin_trial("minutes", workdir, config, banner=False, **options)
    secs_of, evaluation_secs = trial.watched(functools.partial(time_run, trial))
    parts = trial.parts
    once = secs_of["linear probe"] + secs_of["compiling"]
    in_steps = secs_of["input"] + secs_of["steps"] + secs_of["checkpoints"]
    secs_per_step = in_steps / parts.last_step
    # The report predicts the images of an evaluation again.
    left = 60 * minutes * (1 - RESERVE) - (time.monotonic() - started)
    left -= once + REPORT_SECS + evaluation_secs

    def secs(num_steps):
        periods = dataclasses.replace(parts.periods, total_steps=num_steps)
        count = periods.num_evaluations(0, num_steps)
        return num_steps * secs_per_step + count * evaluation_secs

    most = max(1, int(left / secs_per_step))
    num_steps = bisect.bisect(range(1, most + 1), left, key=secs)
    if not num_steps:
        raise ConfigError(
            f"minutes={minutes:g} is too short: to start, an evaluation and the report "
            f"take {duration(60 * minutes - left)}"
        )
    num_epochs = num_steps * config.images_per_step / parts.num_examples
    num_epochs = max(float(f"{num_epochs * 0.9995:.4g}"), 1e-6)
    console.line(
        f"minutes={minutes:g}: num_epochs={num_epochs:g}, {num_steps:,} steps of "
        f"{1000 * secs_per_step:.0f} ms; an evaluation takes "
        f"{duration(evaluation_secs)}, to start {duration(once)}"
    )
    warmup = config.warmup_for(num_epochs)
    return dataclasses.replace(config, num_epochs=num_epochs, warmup_epochs=warmup)
