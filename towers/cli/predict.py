"""Predicts the classes of images with the network of a run.

    python run_predict.py --workdir=runs/quickstart photo.jpg folder

Files and folders of images of any size; --features=LAYER writes activations instead.
"""

import functools

from absl import flags

import towers
from towers.cli import flags as config_flags
from towers.data.files.paths import check_paths
from towers.run.folder import EVALUATION_BATCH_SIZE, RunFolder

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
STEP = config_flags.define_step_flag()
USE_EMA = flags.DEFINE_bool("use_ema", None, "Moving averages, or raw parameters.")
TOP = flags.DEFINE_integer(
    "top", 5, "Classes of each image; 0 for all, in the order of the classes.", 0
)
JSON = flags.DEFINE_bool("json", False, "A line of JSON for each image, not a table.")
CSV = flags.DEFINE_bool("csv", False, "Comma-separated values, not a table.")
flags.mark_bool_flags_as_mutual_exclusive(["json", "csv"])
FEATURES = flags.DEFINE_string("features", "", "Layer whose activations are written.")
OUTPUT = flags.DEFINE_string(
    "output", "", "File of the results; default: standard output, or features.npz."
)
config_flags.define_config_flags(
    ["device", "num_towers", "batch_size", "tta", "max_image_pixels"],
    batch_size=EVALUATION_BATCH_SIZE,
)


def main(argv):
    paths, folder = argv[1:], RunFolder(WORKDIR.value)
    check_paths(paths)
    towers.predict(
        folder.path,
        paths,
        folder.prediction_config(STEP.value, **config_flags.given_flags()),
        step=STEP.value,
        use_ema=USE_EMA.value,
        top=TOP.value,
        form="json" if JSON.value else "csv" if CSV.value else "table",
        features=FEATURES.value,
        output=OUTPUT.value,
    )


def run() -> None:
    config_flags.run(main, functools.partial(config_flags.parse, takes_paths=True))
