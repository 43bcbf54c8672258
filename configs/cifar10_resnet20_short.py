"""ResNet-20 on CIFAR-10 in fifteen epochs, with a one-cycle schedule.

    python run_train.py --config=cifar10_resnet20_short --data_dir=DATA --num_towers=2

Measured: 0.8538 with two towers on 2 CPU cores and a JPEG copy of the images,
2026-11-21 (benchmarks/reports/2026-11-21-recipes.md).
"""

import dataclasses

from cifar10_resnet20 import get_config as cifar10_resnet20

from towers.config import Config


def get_config() -> Config:
    return dataclasses.replace(
        cifar10_resnet20(),
        optimizer="nesterov",
        learning_rate=0.3,
        weight_decay=0.0005,
        schedule="one_cycle",
        epoch_factors="",
        peak_fraction=0.3,
        num_epochs=15.0,
    )
