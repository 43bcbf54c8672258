"""Wide ResNet-16-4 on CIFAR-10, in 20 epochs.

    python run_train.py --config=cifar10_wide_resnet_16_4 --data_dir=DATA --num_towers=2

No published figure for this length. Not measured here.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="cifar10",
        model="wide_resnet_16_4",
        augment="pad_crop_flip",
        optimizer="nesterov",
        learning_rate=0.2,
        momentum=0.9,
        weight_decay=0.0005,
        schedule="one_cycle",
        warmup_epochs=0.0,
        ema_decay=0.0,
        batch_size=128,
        num_epochs=20.0,
    )
