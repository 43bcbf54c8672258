"""Trains a recipe from the start, evaluates it, and reports accuracy and time.

    python -m benchmarks.recipe --config=cifar10_cnn --data_dir=DATA --num_towers=2

Takes `--config` and every option of a recipe. The matrix rate is measured before and
after.
"""

import pathlib
import sys
import tempfile
import time

from absl import flags

from towers import quiet_imports
from towers.config import flags as config_flags

RECIPES = pathlib.Path(__file__).resolve().parent.parent / "configs"
CONFIG = flags.DEFINE_string("config", None, "Recipe.", required=True)
config_flags.define_config_flags()


def main(_):
    config, name, _ = config_flags.config_of_flags(
        CONFIG.value, RECIPES, config_flags.given_flags()
    )
    with quiet_imports():
        from benchmarks import measure
        from towers import evaluation, training
        from towers.parallel import devices

    chosen = devices.configure(config.device, config.num_towers, config.device_order)
    before = measure.matrix_rate(devices=chosen.towers)
    with tempfile.TemporaryDirectory() as workdir:
        started = time.monotonic()
        training.train(config, workdir)
        secs = time.monotonic() - started
        result = evaluation.evaluate(config, workdir)
        averages = ""
        if config.ema_decay:
            raw = evaluation.evaluate(config, workdir, use_ema=False)["test_accuracy"]
            averages = f" with moving averages; {raw:.4f} with the raw parameters"
    after = measure.matrix_rate(devices=chosen.towers)

    print(measure.report_head(f"Training the recipe {name}"))
    print(
        f"- float32, {measure.told_rates(before, after)}\n"
        f"- test accuracy: {result['test_accuracy']:.4f} ({result['test_correct']} of "
        f"{result['test_images']}){averages}\n"
        f"- steps: {result['step']}, images: {result['images']:,}\n"
        f"- seconds: {result['train_secs']:.0f} in training steps, {secs:.0f} in all "
        "(data, tracing, evaluations and checkpoints included, imports not)\n"
        f"- images/s without the first step: {result['images_per_sec']:.0f}, that is "
        f"{result['images_per_sec'] / ((before + after) / 2e9):.2f} per GFLOP/s of the "
        "matrix rate"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    config_flags.run(main)
