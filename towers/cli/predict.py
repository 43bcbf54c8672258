"""Predicts the classes of images with the network of a run.

    python run_predict.py --workdir=runs/quickstart photo.jpg folder

Files and folders of images of any size; --features=LAYER writes activations instead.
"""

import functools

from absl import flags

import towers
from towers.cli import flags as config_flags
from towers.data.files.paths import check_paths
from towers.evaluation.ranking import RANKS
from towers.run.folder import RunFolder
from towers.run.stored_config import PREDICTION_BATCH_SIZE, prediction_config

# Flags that are arguments of `towers.write_predictions`.
OPTIONS = "step use_ema calibrated top features rank output heatmaps".split()


def define_flags() -> None:
    """Define the program's flags."""
    flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    config_flags.define_step_flag()
    flags.DEFINE_bool("use_ema", None, "Use EMA weights, or raw weights.")
    flags.DEFINE_integer("top", 5, "Classes per image; 0 for all, in order.", 0)
    flags.DEFINE_bool("json", False, "Print a line of JSON per image, not a table.")
    flags.DEFINE_bool("csv", False, "Print comma-separated values, not a table.")
    flags.mark_bool_flags_as_mutual_exclusive(["json", "csv"])
    flags.DEFINE_bool("calibrated", False, "Use the calibration of run_eval.py.")
    flags.DEFINE_enum("rank", "none", RANKS, "Order in which to label the images.")
    flags.DEFINE_string("features", "", "Layer whose activations are written.")
    flags.DEFINE_string("heatmaps", "", "New folder for pictures with heat maps.")
    flags.DEFINE_string("output", "", "File; default: standard output, features.npz.")
    config_flags.define_config_flags(
        ["device", "num_towers", "batch_size", "tta", "max_image_pixels"],
        batch_size=PREDICTION_BATCH_SIZE,
    )


parse = functools.partial(config_flags.parse, takes_paths=True)


def main(argv):
    """Write the predictions for the images of the command line."""
    values = flags.FLAGS
    if values.features:
        config_flags.refuse_with("features", ["top", "calibrated", "rank", "heatmaps"])
    paths, folder = check_paths(argv[1:]), RunFolder(values.workdir)
    options = {x: values[x].value for x in OPTIONS}
    towers.write_predictions(
        folder.path,
        paths,
        prediction_config(folder, values.step, **config_flags.given_flags()),
        form="json" if values.json else "csv" if values.csv else "table",
        **options,
    )
