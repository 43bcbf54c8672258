"""Trains an image classifier on every GPU of the machine.

    python run_train.py --config=quickstart
    python run_train.py --config=cifar10_cnn --data_dir=data --num_towers=4

The same command continues a run that was stopped. See docs/runs.md.
"""

from absl import flags

import towers
from towers import console
from towers.callbacks import tracker
from towers.cli import flags as config_flags
from towers.cli import train_flags
from towers.console import print_versions


def define_flags() -> None:
    """Define the program's flags."""
    train_flags.define_train_flags()
    train_flags.define_cluster_flags()
    config_flags.define_config_flags()
    flags.FLAGS["batch_size"].parser = config_flags.NumberParser("auto")


def main(_):
    """Train a run, or do what the flags ask for instead."""
    values, trackers = flags.FLAGS, []
    arguments = train_flags.arguments_of_flags() | train_flags.cluster_of_flags()
    command = train_flags.config_of_command(say=_say_of(arguments["cluster"]))
    config, workdir, arguments["origins"], remark = command
    arguments |= train_flags.cluster_of_flags(config)
    if _is_chief(arguments["cluster"]):
        trackers = [tracker(text) for text in values.track]
    say = _say_of(arguments["cluster"])
    say(remark or f"training {config.model} on {config.dataset}")
    if values.dry_run:
        towers.dry_run(workdir, config, **arguments)
    elif values.lr_range_test:
        if rate := towers.lr_range_test(workdir, config, **arguments).suggestion:
            command = train_flags.command_to_train(rate, __name__)
            console.line(f"suggested learning rate {rate:g}: {command}")
    elif values.folds:
        arguments["callbacks"] = trackers
        towers.cross_validate(workdir, config, values.folds, **arguments)
    else:
        towers.train(workdir, config, callbacks=trackers, **arguments)


def _is_chief(cluster):
    return cluster is None or cluster.index == 0


def _say_of(cluster):
    """Return a function that prints a line, on the chief alone."""
    return print_versions if _is_chief(cluster) else lambda *lines: None
