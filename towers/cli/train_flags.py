"""Flags of a training that are not options of a run."""

import functools
import shlex
import sys
from typing import Any

from absl import flags

from towers import console
from towers.callbacks import TRACKERS_TEXT
from towers.cli.flags import given_flags
from towers.cli.recipes import RECIPES, CommandLine, config_of_flags
from towers.cluster.spec import find_cluster
from towers.config import Config
from towers.data.sets.photos import photo_options
from towers.errors import ConfigError
from towers.messages import command_of
from towers.pretrained.hub import options_of_weights
from towers.run.stored_config import config_to_continue

flags.disclaim_key_flags()  # they are of the program that defines them


def define_train_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the program's flags, without options of a run and the cluster."""
    switch = functools.partial(flags.DEFINE_bool, flag_values=values)
    words = functools.partial(flags.DEFINE_list, default=[], flag_values=values)
    about = "Recipe: a name of --list, a Python file, a run folder, or a JSON or YAML "
    about += "file of options."
    flags.DEFINE_string("config", None, about, flag_values=values)
    about = "Run folder; default: runs/<recipe>."
    flags.DEFINE_string("workdir", None, about, flag_values=values)
    switch("overwrite", False, "Remove the earlier run and restart.")
    about = "Options that may differ from the stored options of the run."
    words("allow_change", help=about)
    switch("dry_run", False, "Validate everything, run a few steps, write nothing.")
    about = "Increase the learning rate until the loss diverges, and suggest one."
    switch("lr_range_test", False, about)
    about = "Number of folds of a cross-validation; trains a run for each."
    flags.DEFINE_integer("folds", 0, about, flag_values=values)
    about = "Time budget in minutes, in place of --num_epochs: steps are timed first."
    flags.DEFINE_float("minutes", 0.0, about, 0.0, flag_values=values)
    about = "Progress bar of a terminal (live), lines at intervals (plain) or none "
    about += "(off); auto: live on a terminal, else plain."
    flags.DEFINE_enum("progress", "auto", console.MODES, about, flag_values=values)
    about = "Profile a range of steps, such as 100,110, for TensorBoard."
    words("profile_steps", help=about)
    about = f"Also write options and metrics to a tracker: {TRACKERS_TEXT}."
    words("track", help=about)
    switch("report", True, "Write report/index.html in the run folder at the end.")
    about = "Print networks, data sets, strategies, optimizers and recipes."
    switch("list", False, about)


def define_cluster_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the flags of the cluster and of this process's number in it."""
    about = "Addresses of all workers, host:port separated by commas; by default from "
    about += "TF_CONFIG or Slurm, if any."
    flags.DEFINE_string("cluster", "", about, flag_values=values)
    about = "Index of this worker in --cluster; 0 is the chief."
    flags.DEFINE_integer("task_index", None, about, flag_values=values)
    about = "Allow public addresses of workers, which have no authentication."
    flags.DEFINE_bool("allow_public_address", False, about, flag_values=values)


def arguments_of_flags() -> dict[str, Any]:
    """Return arguments of `towers.train` or such; ConfigError if flags clash."""
    values = flags.FLAGS
    options = "dry_run", "lr_range_test", "folds", "minutes"
    chosen = [x for x in options if values[x].value]
    if values.batch_size == "auto" and chosen != ["minutes"]:
        chosen.append("batch_size=auto")
    if values.minutes and values["num_epochs"].present:
        chosen = ["minutes", "num_epochs"]
    if len(chosen) > 1:
        first, second, *_ = chosen
        raise ConfigError(f"--{first} with --{second}: give one of the two")
    profiled = values.profile_steps
    if len(profiled) not in (0, 2) or not all(map(str.isdecimal, profiled)):
        raise ConfigError("--profile_steps takes two numbers, such as 100,110")
    arguments = {}
    if not values.lr_range_test:  # which continues no run
        arguments["overwrite"] = values.overwrite
        arguments["allow_change"] = tuple(values.allow_change)
    if not values.dry_run:
        arguments["progress"] = values.progress
    if not (values.dry_run or values.lr_range_test):
        arguments["report"] = values.report
        arguments["minutes"] = values.minutes
        arguments["largest_batch"] = values.batch_size == "auto"
        arguments["profile_steps"] = tuple(map(int, profiled))
    return arguments


def cluster_of_flags(config: Config | None = None) -> dict[str, Any]:
    """Return the arguments of `towers.train` on workers, Slurm's with a config."""
    values = flags.FLAGS
    has_workers = config is not None and config.choice_of("strategy").processes
    place = values.cluster, values.task_index
    return {
        "cluster": find_cluster(*place, reads_slurm=has_workers),
        "allow_public_address": values.allow_public_address,
    }


def config_of_command(**options: Any) -> CommandLine:
    """Return the config of the command line; options are of `config_to_continue`."""
    values = flags.FLAGS
    options["overwrite"], given = values.overwrite, given_flags()
    if values.batch_size == "auto":
        del given["batch_size"]
    about = {"class_level": values.class_level, "is_named": "dataset" in given}
    return config_of_flags(
        *(values.config, RECIPES, given, values.workdir),
        functools.partial(config_to_continue, **options),
        functools.partial(photo_options, **about),
        options_of_weights,
    )


def command_to_train(learning_rate: float, module: str) -> str:
    """Return the command line, with a learning rate, without --lr_range_test."""
    own = flags.FLAGS.get_key_flags_for_module(module)
    left_out = "lr_range_test", "learning_rate"
    arguments = [f.serialize() for f in own if f.present and f.name not in left_out]
    arguments.append(f"--learning_rate={learning_rate:g}")
    return shlex.join(command_of(sys.argv[0], arguments))
