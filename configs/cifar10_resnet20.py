"""The residual network of 20 layers on CIFAR-10, trained as its authors did.

    python run_train.py --config=cifar10_resnet20 --data_dir=DATA --num_towers=2

Published: 8.75 % error, that is 0.9125, after 64,000 steps of 128 images (He et al.
2015, arXiv:1512.03385, section 4.2 and table 6). Not measured here at that length; see
cifar10_resnet20_short.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="cifar10",
        model="resnet20",
        augment="pad_crop_flip",
        optimizer="sgd",
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=0.0001,
        schedule="piecewise",
        epoch_factors="82:0.1,123:0.01",
        warmup_epochs=0.0,
        ema_decay=0.0,
        batch_size=128,
        num_epochs=164.0,
    )
