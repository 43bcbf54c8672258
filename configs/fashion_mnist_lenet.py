"""LeNet on Fashion-MNIST, as in Dive into Deep Learning's multi-GPU training by hand.

    python run_train.py --config=fashion_mnist_lenet --data_dir=DATA --num_towers=2

Published: test accuracy 0.83 on one GPU and 0.84 on two after ten epochs (the chapter's
"Training on Multiple GPUs"; its numbers change a little between editions).
Not measured here, as its files were not available; cifar10_lenet is.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="fashion_mnist",
        model="lenet",
        augment="none",
        optimizer="sgd",
        learning_rate=0.2,
        momentum=0.0,
        weight_decay=0.0,
        schedule="constant",
        warmup_epochs=0.0,
        ema_decay=0.0,
        batch_size=256,
        num_epochs=10.0,
    )
