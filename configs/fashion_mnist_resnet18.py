"""ResNet-18 on Fashion-MNIST: the concise multi-GPU chapter of Dive into Deep Learning.

    python run_train.py --config=fashion_mnist_resnet18 --data_dir=DATA --num_towers=2

Ten epochs of plain gradient descent, as there; the batch is 256 over all towers and the
rate 0.1, the chapter's for one GPU.
Not measured here, as its files were not available; cifar10_resnet18 is.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="fashion_mnist",
        model="resnet18",
        augment="none",
        optimizer="sgd",
        learning_rate=0.1,
        momentum=0.0,
        weight_decay=0.0,
        schedule="constant",
        warmup_epochs=0.0,
        ema_decay=0.0,
        batch_size=256,
        num_epochs=10.0,
    )
