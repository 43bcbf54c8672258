"""Evaluates the best or last checkpoint of a run on all test images.

    python run_eval.py --workdir=runs/quickstart
    python run_eval.py --compare=runs/first,runs/second
    python run_eval.py --ensemble=runs/first,runs/second

With --eval_interval_secs it follows a run that is under way.
"""

from absl import flags

import towers
from towers.cli import eval_flags
from towers.cli import flags as config_flags
from towers.run.folder import RunFolder
from towers.run.stored_config import evaluation_config

PRINTS_RESULTS = True  # see `flags.start`


def define_flags() -> None:
    """Define the program's flags."""
    eval_flags.define_flags()


def main(_):
    """Evaluate a run, or do what the flags ask for instead."""
    values = flags.FLAGS
    eval_flags.validate_flags()
    if values.compare is not None:
        towers.compare(values.compare)
        return
    options = {"step": values.step, "use_ema": values.use_ema}
    given = config_flags.given_flags()
    if values.ensemble is not None:
        towers.evaluate_ensemble(values.ensemble, values.split, **options, **given)
        return
    if values.average is not None:
        towers.average(values.average, values.workdir, step=values.step)
    folder = RunFolder(values.workdir)
    config = evaluation_config(folder, values.step, **given)
    if values.calibrate:
        towers.calibrate(folder.path, config=config, **options)
        return
    if values.reject:
        targets = {x: values[x].value for x in eval_flags.TARGETS}
        towers.reject(folder.path, config=config, **targets, **options)
        return
    if values.suspects:
        towers.find_suspects(folder.path, values.split, config=config, **options)
        return
    towers.evaluate(
        folder.path,
        config,
        **options,
        eval_interval_secs=values.eval_interval_secs,
        report=values.report,
    )
