"""Export of a run's network for other programs; TensorFlow is imported late."""

import importlib.util
import os
import pathlib
from typing import Any

from towers import console, store
from towers.config.options import check_path
from towers.data.files.paths import Paths
from towers.errors import ConfigError, DoubtfulExport, did_you_mean
from towers.exporting.formats import FORMATS
from towers.messages import printable
from towers.run.folder import RunFolder


def export(
    workdir: str | os.PathLike,
    format: str,
    output: str | os.PathLike | None = None,
    *,
    precision: str = "float32",
    step: int | str = "best",
    data_dir: str = "",
    images: Paths = (),
    calibrated: bool = False,
    overwrite: bool = False,
) -> pathlib.Path:
    """Write the network of a run, with preprocessing and class names, for others.

    The EMA weights are taken if the run keeps them. The export is loaded in a new
    process and compared with the trained network in float32 before it gets its name.
    GPUs are not used, and hidden if TensorFlow has not initialized its devices yet.

    Args:
        workdir: The run's folder.
        format: "saved_model", "keras", "tflite", "onnx" or "safetensors".
        output: By default `export/saved_model`, `export/model.keras` and so on in the
            run's folder.
        precision: "float32"; with "tflite" also "float16" or "int8".
        step: Step of the checkpoint, "best" or "last", see `load_run`.
        data_dir: The folder of the run's data set, whose test images are compared.
        images: Image files and folders of them to compare instead.
        calibrated: Divide the logits by the temperature of `towers.calibrate` before
            the probabilities; for formats with probabilities.
        overwrite: Replace an earlier export.

    Returns:
        The path of the export.

    Raises:
        TowersError: Such as a ConfigError if the path is taken, an ExportError if it
            cannot be written, or a DoubtfulExport if it differs from the network; that
            is kept in the folder `doubtful` with its figures.
    """
    validate_format(format, precision)
    row = FORMATS[format]
    if calibrated and not row.has_probabilities:
        raise ConfigError(f"calibrated with format={format}: it has no probabilities")
    if output is None:
        name = "model" if precision == "float32" else f"model-{precision}"
        name = name + row.suffix if row.suffix else format
        output = RunFolder(workdir).path / "export" / name
    check_path("output", output)
    output = pathlib.Path(os.path.expanduser(output))
    from towers.build.restored import read_run
    from towers.exporting import comparison, staging, stock, writers
    from towers.parallel.devices import show_gpus

    staging.recover(output)
    staging.validate_output(output, row, overwrite)

    show_gpus()  # hides all: a run may be training on them
    run = read_run(workdir, step=step, calibrated=calibrated)
    weights = "EMA" if run.config.ema_decay else "raw"
    console.line(f"exporting the {weights} weights of step {run.step} of {run.path}")
    trained = comparison.trained_network(run)
    compared, labels, calibration, origin = comparison.images_of(
        run, precision, data_dir=data_dir, paths=images
    )
    if precision == "int8" and calibration is None:
        way = "name it with --data_dir, or files with --images"
        why = "precision=int8 needs images, and the run's data set cannot be read"
        raise ConfigError(f"{why}; {way}")
    expected = comparison.logits_of(run, trained, compared)

    write = getattr(writers, f"write_{format}")
    figures: dict[str, Any] = {"precision": precision, "step": run.step}
    figures["images"] = origin
    with staging.staged(output, row, overwrite, figures) as path:
        if row.has_network:
            network, how = stock.stock_network(trained), "Loaded in a new process"
            write(path, network, run, precision, calibration)
            results = comparison.predict_in_new_process(format, path, compared)
        else:
            how = "Read into a new network"
            write(path, trained, run)
            results = comparison.predict_with_variables(path, run, compared)
        num_bytes, (logits, class_names) = store.num_bytes(path), results
        numbers = comparison.figures_of(run, logits, expected, labels)
        figures |= {"num_images": len(logits), **numbers}
        faults = comparison.exceeded(numbers, precision, len(logits))
        if class_names != tuple(map(printable, run.class_names)):
            faults = ["class names differ from the run's"]
        if faults:
            why = f"{', '.join(faults)}, on {len(logits)} {origin}"
            raise DoubtfulExport(f"the {format} export is doubtful: {why}")
    text = ", ".join(f"{k.replace('_', ' ')} {x:.3g}" for k, x in numbers.items())
    how = f"{how}, compared with the run on {len(logits)} {origin}: {text}"
    console.line(f"{output}: {num_bytes:,} bytes. {how}")
    return output


def validate_format(format: str, precision: str) -> None:
    """Raise ConfigError for a format that is unknown, or cannot be written here."""
    if format not in FORMATS:
        way = f"{did_you_mean(format, FORMATS)}must be one of {', '.join(FORMATS)}"
        raise ConfigError(f"format={format!r}: {way}")
    row = FORMATS[format]
    if precision not in row.precisions:
        why = f"which has only {', '.join(row.precisions)}; --format=tflite has all"
        raise ConfigError(f"precision={precision} with format={format}, {why}")
    missing = [name for name in row.packages if not importlib.util.find_spec(name)]
    if missing:
        way = "install them in a separate environment: they may change other packages"
        command = f"python -m pip install '.[{format}]' (docs/export.md)"
        needed = " and ".join(missing)
        raise ConfigError(f"format={format} needs {needed}; {way}; {command}")
