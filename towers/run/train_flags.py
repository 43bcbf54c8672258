"""The flags of a training, which `run_train.py` and `towers.doctor` share."""

import functools
import pathlib
from typing import Any

from absl import flags

from towers.config import flags as config_flags
from towers.config.recipes import CommandLine, config_of_flags
from towers.data.photos import photo_options
from towers.errors import ConfigError
from towers.run import cluster_spec
from towers.run.folder import config_to_continue

flags.disclaim_key_flags()  # they are of the program that defines them


def define_train_flags() -> None:
    """Defines them, with one for each field of Config."""
    flags.DEFINE_string("config", None, "Recipe: its name in configs/ or a path.")
    flags.DEFINE_string("workdir", None, "Run folder; default: runs/<recipe>.")
    flags.DEFINE_bool("overwrite", False, "Remove the earlier run and restart.")
    flags.DEFINE_list(
        "allow_change", [], "Options that may differ from those the run began with."
    )
    flags.DEFINE_enum(
        "progress",
        "auto",
        ["auto", "live", "plain", "off"],
        "Bars at the end of a terminal (live), lines by the clock (plain) or none "
        "(off); auto: live on a terminal, else plain.",
    )
    flags.DEFINE_list(
        "profile_steps",
        [],
        "Trace the steps between two, such as 100,110, for TensorBoard, and sum them "
        "up.",
    )
    flags.DEFINE_bool(
        "list", False, "Print networks, data sets, strategies, optimizers and recipes."
    )
    cluster_spec.define_cluster_flags()
    config_flags.define_config_flags()


def command_of_flags(recipes: pathlib.Path) -> CommandLine:
    """What the flags ask for; `recipes` is the folder of the recipes.

    Raises:
        ConfigError: there is no such recipe, or the options do not fit.
    """
    values = flags.FLAGS
    stored = functools.partial(config_to_continue, overwrite=values.overwrite)
    given = config_flags.given_flags()
    return config_of_flags(
        values.config, recipes, given, values.workdir, stored, photo_options
    )


def arguments_of_flags() -> dict[str, Any]:
    """The arguments of `towers.train` that are no options of the Config; ConfigError
    where one is wrong."""
    values = flags.FLAGS
    if not all(map(str.isdecimal, values.profile_steps)):
        raise ConfigError("--profile_steps takes two numbers, such as 100,110")
    return {
        "overwrite": values.overwrite,
        "allow_change": tuple(values.allow_change),
        "progress": values.progress,
        "profile_steps": tuple(map(int, values.profile_steps)),
        **cluster_spec.cluster_of_flags(),
    }
