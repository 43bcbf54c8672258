"""`cifar10_speedrun` with images of 24x24 in the first half of the run.

    python run_train.py --config=cifar10_speedrun_fast --data_dir=DATA

The arithmetic of a step on small images is little more than half of that on whole ones.

Not measured here yet.
"""

import dataclasses

from cifar10_speedrun import get_config as cifar10_speedrun

from towers.config import Config


def get_config() -> Config:
    return dataclasses.replace(cifar10_speedrun(), early_sizes="24:0.5")
