"""Evaluates the best or last checkpoint of a run on all test images.

    python run_eval.py --workdir=runs/quickstart
    python run_eval.py --compare=runs/first,runs/second

With --eval_interval_secs it follows a run that is under way.
"""

from absl import flags

import towers
from towers.cli import flags as config_flags
from towers.run.folder import RunFolder
from towers.run.stored_config import EVALUATION_BATCH_SIZE, evaluation_config


def define_flags() -> None:
    """Defines the program's flags."""
    flags.DEFINE_string("workdir", None, "Folder of the run.")
    flags.DEFINE_list("compare", None, "Folders of runs to compare instead.")
    flags.register_multi_flags_validator(
        ["workdir", "compare"],
        lambda given: list(given.values()).count(None) == 1,
        "give --workdir or --compare",
    )
    config_flags.define_step_flag()
    flags.DEFINE_bool("use_ema", None, "Only moving averages, or only raw parameters.")
    about = "Look for checkpoints this often; 0 for once."
    flags.DEFINE_float("eval_interval_secs", 0.0, about, 0.0, 1e6)
    flags.DEFINE_bool("report", False, "Write report/index.html of the run.")
    # The devices of an evaluation need not be those of the training.
    config_flags.define_config_flags(["data_dir", "device", "num_towers", "strategy"])
    config_flags.define_config_flags(
        ["group_size", "batch_size", "tta"], batch_size=EVALUATION_BATCH_SIZE
    )


def main(_):
    values = flags.FLAGS
    if values.compare is not None:
        towers.compare(values.compare)
        return
    folder = RunFolder(values.workdir)
    towers.evaluate(
        folder.path,
        evaluation_config(folder, values.step, **config_flags.given_flags()),
        step=values.step,
        use_ema=values.use_ema,
        eval_interval_secs=values.eval_interval_secs,
        report=values.report,
    )


def run() -> None:
    define_flags()
    config_flags.run(main)
