"""Export of a run's network to formats that other programs load.

Importing the package does not import TensorFlow.
"""

import dataclasses
import importlib.util
import os
import pathlib

from towers import quiet_imports
from towers.config import checks
from towers.config.options import check_path
from towers.data.paths import Paths
from towers.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Format:
    """A row of FORMATS.

    Attributes:
        writer: the module of this package that writes it.
        suffix: of the file's name; empty for a folder.
        precisions: of the arithmetic that it can be written with.
        packages: modules that it needs besides the dependencies of towers.
        extra: of towers, which installs them.
    """

    writer: str
    suffix: str
    precisions: tuple[str, ...] = ("float32",)
    packages: tuple[str, ...] = ()
    extra: str = ""


FORMATS = {
    "saved_model": Format("saved_model", ""),
    "keras": Format("keras_file", ".keras"),
    "tflite": Format("tflite_file", ".tflite", ("float32", "float16", "int8")),
    "onnx": Format(
        "onnx_file", ".onnx", packages=("tf2onnx", "onnxruntime"), extra="onnx"
    ),
}

# Largest difference of a logit from that of the trainer's network, as a share of the
# largest logit.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.25}


def export(
    workdir: str | os.PathLike,
    format: str,
    output: str | os.PathLike | None = None,
    *,
    precision: str = "float32",
    step: int = 0,
    data_dir: str = "",
    images: Paths = (),
    overwrite: bool = False,
) -> pathlib.Path:
    """Writes the network of a run, with its preprocessing and its class names, in the
    format of another program.

    The moving averages of the parameters are taken where the run keeps them. What is
    written is loaded in a new process and compared with the trainer's network in
    float32 before it gets its name. It uses no GPU, and where TensorFlow has made no
    devices in this process, it gets none.

    Args:
        workdir: the run's folder.
        format: in FORMATS.
        output: the file, or for "saved_model" the folder; by default `default_output`.
        precision: one of the format's.
        step: of the checkpoint; 0 for the newest one that is valid.
        data_dir: where the run's data set lies now; empty for where it was.
        images: image files, and folders of them, in place of the data set's images.
        overwrite: replace an earlier export.

    Returns:
        The path of the export.

    Raises:
        ConfigError: the options do not fit, a package is missing, or there is an
            earlier export.
        DataError: there are no such images.
        CheckpointError: as `towers.load_run`.
        ExportError: it cannot be written, or its logits differ too much.
    """
    check_options(format, precision)
    checks.check_environment()
    check_path("workdir", workdir)
    if output is None:
        output = default_output(workdir, format, precision)
    check_path("output", output)
    with quiet_imports():
        from towers.export import story
    return story.export(
        pathlib.Path(workdir),
        format,
        pathlib.Path(output),
        precision=precision,
        step=step,
        data_dir=data_dir,
        images=images,
        overwrite=overwrite,
    )


def default_output(
    workdir: str | os.PathLike, format: str, precision: str = "float32"
) -> pathlib.Path:
    """`export/saved_model`, `export/model.keras`, `export/model-int8.tflite` and so on
    in the run's folder."""
    suffix = FORMATS[format].suffix
    name = f"model{suffix}" if suffix else format
    if precision != "float32":
        name = f"model-{precision}{suffix}"
    return pathlib.Path(workdir) / "export" / name


def check_options(format: str, precision: str) -> None:
    """Refuses a format or precision that there is not, or whose packages are missing.

    Raises:
        ConfigError: see above.
    """
    if format not in FORMATS:
        raise ConfigError(f"format={format!r}: must be one of {', '.join(FORMATS)}")
    row = FORMATS[format]
    if precision not in row.precisions:
        raise ConfigError(
            f"precision={precision} with format={format}, which has "
            f"{', '.join(row.precisions)} only; --format=tflite has all"
        )
    missing = [name for name in row.packages if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"format={format} needs {' and '.join(missing)}, not installed here; they "
            f"are the extra {row.extra} of towers: python -m pip install "
            f"'.[{row.extra}]'"
        )
