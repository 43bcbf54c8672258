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
from towers.config.installation import print_versions


def define_flags() -> None:
    """Defines the program's flags."""
    train_flags.define_train_flags()
    train_flags.define_cluster_flags()
    config_flags.define_config_flags()


def main(_):
    values = flags.FLAGS
    arguments = train_flags.arguments_of_flags() | train_flags.cluster_of_flags()
    trackers, cluster = [], arguments["cluster"]
    is_chief = cluster is None or cluster.index == 0
    say = print_versions if is_chief else lambda *lines: None
    if is_chief:
        trackers = [tracker(text) for text in values.track]
    command = train_flags.config_of_command(say=say)
    config, workdir, arguments["origins"], remark = command
    say(remark or f"training {config.model} on {config.dataset}")
    if values.dry_run:
        towers.dry_run(workdir, config, **arguments)
    elif values.lr_range_test:
        if rate := towers.lr_range_test(workdir, config, **arguments).suggestion:
            command = train_flags.command_to_train(rate, __name__)
            console.line(f"suggested learning rate {rate:g}: {command}")
    elif values.folds:
        towers.cross_validate(workdir, config, values.folds, **arguments)
    else:
        towers.train(workdir, config, callbacks=trackers, **arguments)
