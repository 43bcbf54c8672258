"""AlexNet's two columns on CIFAR-10, each on its own device.

    python run_train.py --config=cifar10_alexnet_model_parallel --data_dir=DATA

Two devices hold one network: convolutions 2, 4 and 5 stay within a column and need no
transfer (Krizhevsky et al. 2012). No published figure for images of 32x32.
Measured on 2 CPU cores, on a JPEG copy of the images, 2026-11-21: 0.4842 after one
epoch (benchmarks/reports/2026-11-21-recipes.md).
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="cifar10",
        model="alexnet_two_columns",
        augment="pad_crop_flip",
        optimizer="sgd",
        learning_rate=0.01,
        momentum=0.9,
        weight_decay=0.0005,
        schedule="cosine",
        warmup_epochs=0.0,
        ema_decay=0.0,
        strategy="model_parallel",
        num_towers=2,
        group_size=2,
        batch_size=128,
        num_epochs=90.0,
    )
