"""ConvMixer-256/8 on CIFAR-10.

    python run_train.py --config=cifar10_convmixer --data_dir=DATA --num_towers=4

Published: over 0.94 in 100 epochs, 0.925 in 25 (README of the repository
locuslab/convmixer-cifar10, whose commands have the rate 0.05, RandAugment with two
operations at magnitude 12, and neither crops nor clipping).
Measured on 2 CPU cores, on a JPEG copy of the images, 2026-11-21: 0.4119 in a run of
0.3 epochs, 30 steps (benchmarks/reports/2026-11-21-recipes.md); not at full length.
"""

from towers.config import Config


def get_config() -> Config:
    return Config(
        dataset="cifar10",
        model="convmixer_256_8",
        augment="pad_crop_flip",
        color_jitter=0.2,
        random_erasing=0.25,
        optimizer="adamw",
        learning_rate=0.01,
        momentum=0.0,
        weight_decay=0.005,
        clip_norm=1.0,
        schedule="one_cycle",
        peak_fraction=0.4,
        warmup_epochs=0.0,
        ema_decay=0.0,
        batch_size=512,
        num_epochs=100.0,
    )
