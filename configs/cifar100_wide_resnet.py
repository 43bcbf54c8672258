"""Wide ResNet-28-10 on CIFAR-100.

    python run_train.py --config=cifar100_wide_resnet --data_dir=DATA --num_towers=4

Published: 19.25 % error, that is 0.8075 (Zagoruyko and Komodakis 2016,
arXiv:1605.07146, table 5), with these 200 epochs and rates.
Not measured here, as its files were not available; cifar10_wide_resnet is.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="cifar100",
        model="wide_resnet_28_10",
        augment="pad_crop_flip",
        optimizer="nesterov",
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=0.0005,
        schedule="piecewise",
        epoch_factors="60:0.2,120:0.04,160:0.008",
        warmup_epochs=0.0,
        ema_decay=0.0,
        batch_size=128,
        num_epochs=200.0,
    )
