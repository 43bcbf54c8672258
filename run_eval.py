#!/usr/bin/env python3
"""Evaluates the last checkpoint of a run on all test images.

    python run_eval.py --workdir=runs/quickstart

It follows a run that is under way with --eval_interval_secs.
"""

from absl import flags

from towers import quiet_imports
from towers.config import flags as config_flags
from towers.config import replace
from towers.config.checks import check_environment
from towers.run import watchdog
from towers.run.folder import RunFolder

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
STEP = flags.DEFINE_integer("step", 0, "Checkpoint to evaluate; 0 for the last.", 0)
USE_EMA = flags.DEFINE_bool(
    "use_ema", None, "Moving averages; by default where the run keeps them."
)
EVAL_INTERVAL_SECS = flags.DEFINE_float(
    "eval_interval_secs", 0.0, "Look for new checkpoints this often; 0 for once.", 0.0
)
# Where an evaluation runs is its own affair, not the training's.
config_flags.define_config_flags(
    ["data_dir", "device", "num_towers", "strategy", "batch_size", "tta"],
    batch_size=500,
)
flags.adopt_module_key_flags(config_flags)


def main(_):
    watchdog.exit_on_signals()
    check_environment()
    folder = RunFolder(WORKDIR.value)
    stored = folder.stored_config()
    own = {
        "device": flags.FLAGS.device,
        "device_order": "",
        "parameter_device": "cpu",
        "batch_size": flags.FLAGS.batch_size,
        # One group where the network is split, else what the device has.
        "num_towers": stored.group_size if stored.group_size > 1 else 0,
    }
    config = replace(stored, own | config_flags.given_flags())
    with quiet_imports():
        from towers import evaluation
    evaluation.evaluate(
        config,
        folder.path,
        step=STEP.value,
        use_ema=USE_EMA.value,
        eval_interval_secs=EVAL_INTERVAL_SECS.value,
    )


if __name__ == "__main__":
    config_flags.run(main)
