"""The residual network of 56 layers on CIFAR-10, trained as its authors did.

    python run_train.py --config=cifar10_resnet56 --data_dir=DATA --num_towers=2

Published: 6.97 % error, that is 0.9303 (He et al. 2015, arXiv:1512.03385, table 6).
Measured on 2 CPU cores, on a JPEG copy of the images, 2026-11-21: 0.3791 after one
epoch with two towers (benchmarks/reports/2026-11-21-recipes.md).
"""

import dataclasses

from cifar10_resnet20 import get_config as cifar10_resnet20

from towers.config import Config


def get_config() -> Config:
    return dataclasses.replace(
        cifar10_resnet20(),
        model="resnet56",
    )
