"""Wide ResNet-28-10 on CIFAR-10.

    python run_train.py --config=cifar10_wide_resnet --data_dir=DATA --num_towers=4

Published: 4.00 % error, that is 0.9600 (Zagoruyko and Komodakis 2016, arXiv:1605.07146,
table 5).
Measured on 2 CPU cores, on a JPEG copy of the images, 2026-11-21: 0.1363 in a run of
0.04 epochs, 16 steps (benchmarks/reports/2026-11-21-recipes.md); not at full length.
"""

import dataclasses

from cifar100_wide_resnet import get_config as cifar100_wide_resnet

from towers.config import Config


def get_config() -> Config:
    return dataclasses.replace(
        cifar100_wide_resnet(),
        dataset="cifar10",
    )
