#!/usr/bin/env python3
"""Trains an image classifier on every GPU of the machine.

    python run_train.py --config=quickstart
    python run_train.py --config=cifar10_cnn --data_dir=data --num_towers=4

The same command continues a run that was stopped. See docs/runs.md.
"""

from towers.run.signals import exit_on_signals

if __name__ == "__main__":  # before the imports that take time
    exit_on_signals()

import functools
import pathlib

from absl import flags

from towers import console, dry_run, train
from towers.config import flags as config_flags
from towers.config.recipes import config_of_flags
from towers.data.photos import photo_options
from towers.errors import ConfigError
from towers.run import cluster_spec
from towers.run.folder import config_to_continue

RECIPES = pathlib.Path(__file__).resolve().parent / "configs"
CONFIG = flags.DEFINE_string("config", None, "Recipe: its name in configs/ or a path.")
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder; default: runs/<recipe>.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Remove the earlier run and restart.")
ALLOW_CHANGE = flags.DEFINE_list(
    "allow_change", [], "Options that may differ from those the run began with."
)
PROGRESS = flags.DEFINE_enum(
    "progress",
    "auto",
    ["auto", "live", "plain", "off"],
    "Bars at the end of a terminal (live), lines by the clock (plain) or none (off); "
    "auto: live on a terminal, else plain.",
)
PROFILE_STEPS = flags.DEFINE_list(
    "profile_steps",
    [],
    "Trace the steps between two, such as 100,110, for TensorBoard, and sum them up.",
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Check everything, try some steps, and write nothing."
)
flags.DEFINE_bool(
    "list", False, "Print networks, data sets, strategies, optimizers and recipes."
)
cluster_spec.define_cluster_flags()
config_flags.define_config_flags()


def main(_):
    stored = functools.partial(config_to_continue, overwrite=OVERWRITE.value)
    given = config_flags.given_flags()
    command = config_of_flags(
        CONFIG.value, RECIPES, given, WORKDIR.value, stored, photo_options
    )
    if command.remark:
        console.line(command.remark)
    if not all(map(str.isdecimal, PROFILE_STEPS.value)):
        raise ConfigError("--profile_steps takes two numbers, such as 100,110")
    arguments = {
        "overwrite": OVERWRITE.value,
        "allow_change": tuple(ALLOW_CHANGE.value),
        "origins": command.origins,
        **cluster_spec.cluster_of_flags(),
    }
    if DRY_RUN.value:
        dry_run(command.workdir, command.config, **arguments)
    else:
        train(
            command.workdir,
            command.config,
            progress=PROGRESS.value,
            profile_steps=tuple(map(int, PROFILE_STEPS.value)),
            **arguments,
        )


if __name__ == "__main__":
    config_flags.run(main)
