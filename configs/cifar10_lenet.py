"""The from-scratch multi-GPU chapter's LeNet on CIFAR-10.

    python run_train.py --config=cifar10_lenet --data_dir=DATA --num_towers=2

No published figure: the chapter trains on Fashion-MNIST.
Measured on 2 CPU cores, on a JPEG copy of the images, 2026-11-21: 0.3568 after two
of its epochs with two towers (benchmarks/reports/2026-11-21-recipes.md).
"""

import dataclasses

from fashion_mnist_lenet import get_config as fashion_mnist_lenet

from towers.config import Config


def get_config() -> Config:
    return dataclasses.replace(
        fashion_mnist_lenet(),
        dataset="cifar10",
    )
