"""ResNet-18 on a folder of images of your own, at 64x64.

    python run_train.py --config=image_folder_resnet18 --data_dir=ROOT --num_towers=4

ROOT/train/CLASS/*.jpg, and ROOT/test the same way or a part of train held out.
`python -m towers.check --dataset=image_folder --data_dir=ROOT` checks it first.
Not measured here at 64x64; a folder of CIFAR-10 with LeNet is, in
benchmarks/reports/2026-11-21-image_folder.md.
"""

import dataclasses

from cifar10_resnet18 import get_config as cifar10_resnet18

from towers.config import Config


def get_config() -> Config:
    return dataclasses.replace(
        cifar10_resnet18(),
        dataset="image_folder",
        image_size=64,
        num_epochs=90.0,
    )
