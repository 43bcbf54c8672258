"""ResNet-18 for small images on CIFAR-10.

    python run_train.py --config=cifar10_resnet18 --data_dir=DATA --num_towers=4

Published: 0.9302 for this network in the README of the repository
kuangliu/pytorch-cifar, whose command trains 200 epochs with a cosine schedule, as here.
Measured on 2 CPU cores, on a JPEG copy of the images, 2026-11-21: 0.3337 in a run of
one epoch with two towers (benchmarks/reports/2026-11-21-recipes.md), not at full
length.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="cifar10",
        model="resnet18",
        augment="pad_crop_flip",
        optimizer="sgd",
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=0.0005,
        schedule="cosine",
        warmup_epochs=0.0,
        ema_decay=0.0,
        batch_size=128,
        num_epochs=200.0,
    )
