"""Steps of `vit_tiny` on CIFAR-10 that PyTorch takes too, from the same parameters.

    python -m benchmarks.with_torch.exchange DATA FILE
    PYTHON benchmarks/with_torch/train.py --exchange=FILE

The recipe cifar10_vit_tiny without augmentation, in 32 steps, of which 8 are warm-up.
FILE gets the initial parameters, the batches, and the loss of each step.
"""

import dataclasses
import pathlib
import sys

import numpy as np
import tensorflow as tf

from benchmarks import trainers
from towers import build, build_trainer
from towers.config.recipes import load_recipe

RECIPES = pathlib.Path(__file__).resolve().parents[2] / "configs"
STEPS, WARMUP_STEPS, NUM_EXAMPLES = 32, 8, 50_000


def main(data_dir: str, path: str) -> None:
    config = load_recipe("cifar10_vit_tiny", RECIPES)
    epochs_per_step = config.batch_size / NUM_EXAMPLES
    config = dataclasses.replace(
        config,
        data_dir=data_dir,
        augment="none",
        num_epochs=STEPS * epochs_per_step,
        warmup_epochs=WARMUP_STEPS * epochs_per_step,
    )
    chosen = build_trainer.configure_devices(config)
    parts = build.build(config, device_kind=chosen.kind)
    arrays = {x.path: x.numpy() for x in parts.model.trainable_variables}
    batches = [parts.train_batches(tf.constant(i, tf.int64)) for i in range(STEPS)]
    trainer = trainers.create_trainer(config, parts, chosen)
    losses = [trainer.train(1)["loss"] for _ in batches]
    arrays |= {name: np.stack([x[name] for x in batches]) for name in batches[0]}
    np.savez(path, losses=losses, length=[STEPS, WARMUP_STEPS], **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
