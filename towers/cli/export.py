"""Exports the network of a run to a format that other programs load.

    python run_export.py --workdir=runs/quickstart --format=saved_model

See docs/export.md.
"""

from absl import flags

from towers.cli import flags as config_flags
from towers.exporting.export import FORMATS, TOLERANCES, export
from towers.run.signals import preemptible

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
FORMAT = flags.DEFINE_enum("format", None, FORMATS, "What to write.", required=True)
OUTPUT = flags.DEFINE_string(
    "output", None, "File or folder to write; default: in export/ of the run's folder."
)
PRECISION = flags.DEFINE_enum(
    "precision", "float32", TOLERANCES, "Of parameters; int8 of activations as well."
)
STEP = config_flags.define_step_flag()
IMAGES = flags.DEFINE_list(
    "images", [], "Image files, and folders of them, in place of the data set's."
)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace an earlier export.")
config_flags.define_config_flags(["data_dir"])


def main(_):
    with preemptible():
        export(
            WORKDIR.value,
            FORMAT.value,
            OUTPUT.value,
            precision=PRECISION.value,
            step=STEP.value,
            data_dir=config_flags.given_flags().get("data_dir", ""),
            images=IMAGES.value,
            overwrite=OVERWRITE.value,
        )


def run() -> None:
    config_flags.run(main)
