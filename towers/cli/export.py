"""Exports the network of a run to a format that other programs load.

python run_export.py --workdir=runs/quickstart --format=saved_model
"""

from absl import flags

from towers.cli import flags as config_flags
from towers.errors import ConfigError, ExportError
from towers.exporting.export import export, validate_format
from towers.exporting.formats import FORMATS, LIMITS
from towers.signals import preemptible


def define_flags() -> None:
    """Define the program's flags."""
    flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    about = f"Export formats, separated by commas: {', '.join(FORMATS)}"
    flags.DEFINE_multi_string("format", None, about, required=True)
    about = "Output file or folder; default: in export/ of the run's folder."
    flags.DEFINE_string("output", None, about)
    about = "Data type of the parameters; int8 also quantizes activations."
    flags.DEFINE_enum("precision", "float32", LIMITS, about)
    config_flags.define_step_flag()
    about = "Image files and folders, instead of the data set's."
    flags.DEFINE_list("images", [], about)
    flags.DEFINE_bool("calibrated", False, "Use the calibration of run_eval.py.")
    flags.DEFINE_bool("overwrite", False, "Replace an earlier export.")
    config_flags.define_config_flags(["data_dir"])


def main(_):
    """Export the network in each of the formats."""
    values, errors = flags.FLAGS, []
    formats = [x.strip() for text in values.format for x in text.split(",")]
    for format in formats:
        validate_format(format, values.precision)
    if len(formats) > 1 and values.output:
        why = f"is one export, and --format names {len(formats)}; omit --output"
        raise ConfigError(f"output={values.output}: {why}")
    with preemptible():
        for format in dict.fromkeys(formats):
            try:
                export(
                    values.workdir,
                    format,
                    values.output,
                    precision=values.precision,
                    step=values.step,
                    data_dir=config_flags.given_flags().get("data_dir", ""),
                    images=values.images,
                    calibrated=values.calibrated,
                    overwrite=values.overwrite,
                )
            except ExportError as error:  # the other formats are still written
                errors.append(error)
    if errors:
        errors[0].lines = tuple(map(str, errors))
        raise errors[0]
