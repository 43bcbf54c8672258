"""Evaluates the best or last checkpoint of a run on all test images.

    python run_eval.py --workdir=runs/quickstart
    python run_eval.py --compare=runs/first,runs/second

With --eval_interval_secs it follows a run that is under way.
"""

from absl import flags

import towers
from towers.cli import flags as config_flags
from towers.run.folder import EVALUATION_BATCH_SIZE, RunFolder

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
COMPARE = flags.DEFINE_list("compare", None, "Folders of runs to compare instead.")
flags.register_multi_flags_validator(
    ["workdir", "compare"],
    lambda given: list(given.values()).count(None) == 1,
    "give --workdir or --compare",
)
STEP = config_flags.define_step_flag()
USE_EMA = flags.DEFINE_bool(
    "use_ema", None, "Only moving averages, or with --nouse_ema only raw parameters."
)
EVAL_INTERVAL_SECS = flags.DEFINE_float(
    "eval_interval_secs", 0.0, "Look for checkpoints this often; 0 for once.", 0.0, 1e6
)
REPORT = flags.DEFINE_bool("report", False, "Write report/index.html of the run.")
# The devices of an evaluation need not be those of the training.
config_flags.define_config_flags(
    ["data_dir", "device", "num_towers", "strategy", "group_size", "batch_size", "tta"],
    batch_size=EVALUATION_BATCH_SIZE,
)


def main(_):
    if COMPARE.value is not None:
        towers.compare(COMPARE.value)
        return
    folder = RunFolder(WORKDIR.value)
    towers.evaluate(
        folder.path,
        folder.evaluation_config(STEP.value, **config_flags.given_flags()),
        step=STEP.value,
        use_ema=USE_EMA.value,
        eval_interval_secs=EVAL_INTERVAL_SECS.value,
        report=REPORT.value,
    )


def run() -> None:
    config_flags.run(main)
