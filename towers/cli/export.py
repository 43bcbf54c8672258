"""Exports the network of a run to a format that other programs load.

    python run_export.py --workdir=runs/quickstart --format=saved_model

See docs/export.md.
"""

from absl import flags

from towers.cli import flags as config_flags
from towers.exporting.export import export
from towers.exporting.formats import FORMATS, TOLERANCES
from towers.run.signals import preemptible


def define_flags() -> None:
    """Defines the program's flags."""
    flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    flags.DEFINE_enum("format", None, FORMATS, "Export format.", required=True)
    about = "Output file or folder; default: in export/ of the run's folder."
    flags.DEFINE_string("output", None, about)
    about = "Data type of the parameters; int8 also quantizes activations."
    flags.DEFINE_enum("precision", "float32", TOLERANCES, about)
    config_flags.define_step_flag()
    about = "Image files and folders, instead of the data set's."
    flags.DEFINE_list("images", [], about)
    flags.DEFINE_bool("calibrated", False, "Use the calibration of run_eval.py.")
    flags.DEFINE_bool("overwrite", False, "Replace an earlier export.")
    config_flags.define_config_flags(["data_dir"])


def main(_):
    values = flags.FLAGS
    with preemptible():
        export(
            values.workdir,
            values.format,
            values.output,
            precision=values.precision,
            step=values.step,
            data_dir=config_flags.given_flags().get("data_dir", ""),
            images=values.images,
            calibrated=values.calibrated,
            overwrite=values.overwrite,
        )
