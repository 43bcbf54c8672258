"""CIFAR-10 with a deeper network and more augmentation, for the higher accuracy.

    python run_train.py --config=cifar10_speedrun_96 --data_dir=DATA

The network is that of airbench96_faster (KellerJordan/cifar10-airbench), which reaches
0.9603 with SGD; epochs, rates and augmentation are those of airbench96_spectral
(KellerJordan/research-airbench). Theirs are for the summed loss, so that here the bias
of the whitening has 0.001146 * 1024, offsets 64 times that, and the head, whose logits
they divide by 9, the 81st part. The factors are those of this rate and batch. They cut
squares out within the image, of which parts may lie outside here.

Not measured here yet.
"""

import dataclasses

from cifar10_speedrun import get_config as cifar10_speedrun

from towers.config import Config


def get_config() -> Config:
    return dataclasses.replace(
        cifar10_speedrun(),
        model="speedrun_deep",
        augment="translate_4_flip",
        cutout_size=12,
        learning_rate=0.13,
        param_rates="whitening/bias:9.03:3,*/beta:577.9,logits/kernel:0.1115",
        weight_decay=0.012,  # 0.001565 for a step at the rate 0.13
        batch_size=1024,
        num_epochs=30.0,
        eval_every_epochs=5.0,
    )
