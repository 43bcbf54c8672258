#!/usr/bin/env python3
"""Trains an image classifier on every GPU of the machine.

    python run_train.py --config=quickstart
    python run_train.py --config=cifar10_cnn --data_dir=data --num_towers=4

The same command continues a run that was stopped. See docs/runs.md.
"""

from towers.run.signals import exit_on_signals

if __name__ == "__main__":  # before the imports that take time
    exit_on_signals()

import pathlib

from towers import console, train
from towers.config import flags as config_flags
from towers.run import train_flags

RECIPES = pathlib.Path(__file__).resolve().parent / "configs"

train_flags.define_train_flags()


def main(_):
    command = train_flags.command_of_flags(RECIPES)
    if command.remark:
        console.line(command.remark)
    train(
        command.workdir,
        command.config,
        origins=command.origins,
        **train_flags.arguments_of_flags(),
    )


if __name__ == "__main__":
    config_flags.run(main)
