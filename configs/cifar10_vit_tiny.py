"""The smallest Vision Transformer on CIFAR-10, in patches of 4x4 pixels.

    python run_train.py --config=cifar10_vit_tiny --data_dir=DATA --num_towers=2

Not measured here on all images: 20 epochs of the first 1,024 reach 0.3239, the mean of
three seeds, and 0.3288 in PyTorch (benchmarks/reports/2026-11-25-vit_tiny.md). No
published figure for this length: trained from nothing on 50,000 images a Vision
Transformer is behind a convolutional network of that size.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="cifar10",
        model="vit_tiny",
        augment="pad_crop_flip",
        optimizer="adamw",
        learning_rate=0.001,
        momentum=0.0,
        weight_decay=0.05,
        clip_norm=1.0,
        schedule="cosine",
        warmup_epochs=2.0,
        ema_decay=0.0,
        batch_size=128,
        num_epochs=20.0,
    )
