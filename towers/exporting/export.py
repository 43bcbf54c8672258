"""Export of a run's network to formats of others; TensorFlow is imported late."""

import importlib.util
import os
import pathlib

from towers import console, store
from towers.config.options import check_path
from towers.data.files.paths import Paths
from towers.errors import ConfigError, DoubtfulExport
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
    """Writes the network of a run, with its preprocessing and its class names, in the
    format of another program.

    The EMA weights are taken where the run keeps them. What is
    written is loaded in a new process and compared with the trained network in float32
    before it gets its name. It uses no GPU, and where TensorFlow has made no devices in
    this process, it gets none.

    Args:
        workdir: the run's folder.
        format: "saved_model", "keras", "tflite", "onnx" or "safetensors".
        output: by default `export/saved_model`, `export/model.keras` and so on in the
            run's folder.
        precision: "float32"; with "tflite" also "float16" or "int8".
        step: of the checkpoint, "best" or "last", see `load_run`.
        data_dir: where the run's data set is, whose test images are compared.
        images: image files, and folders of them, in place of these.
        calibrated: divide the logits that become probabilities by the temperature that
            `towers.calibrate` has fitted; of formats with probabilities.
        overwrite: replace an earlier export.

    Returns:
        The path of the export.

    Raises:
        TowersError: such as a ConfigError if something stands at the path, an
            ExportError if it cannot be written, or a DoubtfulExport if it differs from
            the network: it is kept in the folder `doubtful` with its figures.
    """
    validate_format(format, precision)
    if calibrated and format in ("keras", "safetensors"):
        raise ConfigError(f"calibrated with format={format}: it has no probabilities")
    row = FORMATS[format]
    if output is None:
        name = "model" if precision == "float32" else f"model-{precision}"
        name = name + row.suffix if row.suffix else format
        output = RunFolder(workdir).path / "export" / name
    check_path("output", output)
    output = pathlib.Path(os.path.expanduser(output))
    from towers.evaluation.restored import read_run
    from towers.exporting import comparison, staging, stock, writers
    from towers.parallel.devices import show_gpus

    staging.recover(output)
    staging.validate_output(output, row, overwrite)

    show_gpus()  # none: they may be training
    run = read_run(workdir, step=step, calibrated=calibrated)
    weights = "EMA" if run.config.ema_decay else "raw"
    console.line(f"exporting the {weights} weights of step {run.step} of {run.path}")
    trained = comparison.trained_network(run)
    compared, labels, calibration, origin = comparison.images_of(
        run, precision, data_dir=data_dir, paths=images
    )
    if precision == "int8" and calibration is None:
        why = "precision=int8 needs images, and the run's data set cannot be read"
        raise ConfigError(f"{why}; name it with --data_dir, or files with --images")
    expected = comparison.logits_of(run, trained, compared)

    write = getattr(writers, f"write_{format}")
    figures = {"precision": precision, "step": run.step, "images": origin}
    with staging.staged(output, row, overwrite, figures) as path:
        if row.has_network:
            network, where = stock.stock_network(trained), "Loaded in a new process"
            if not row.is_trainable:
                network = stock.fold_normalizations(network)
            write(path, network, run, precision, calibration)
            results = comparison.predict_in_new_process(format, path, compared)
        else:
            where = "Read into a new network"
            write(path, trained, run)
            results = comparison.predict_with_variables(path, run, compared)
        num_bytes, (logits, class_names) = store.num_bytes(path), results
        numbers = comparison.figures_of(run, logits, expected, labels)
        figures |= {"num_images": len(logits)} | numbers
        faults = comparison.exceeded(numbers, precision, len(logits))
        if class_names != tuple(map(printable, run.class_names)):
            faults = ["class names differ from the run's"]
        if faults:
            why = f"{', '.join(faults)}, on {len(logits)} {origin}"
            raise DoubtfulExport(f"the {format} export is doubtful: {why}")
    text = ", ".join(f"{k.replace('_', ' ')} {x:.3g}" for k, x in numbers.items())
    on = f"compared with the run on {len(logits)} {origin}"
    console.line(f"{output}: {num_bytes:,} bytes. {where}, {on}: {text}")
    return output


def validate_format(format: str, precision: str) -> None:
    """Raise ConfigError for a format that is unknown, or cannot be written here."""
    if format not in FORMATS:
        raise ConfigError(f"format={format!r}: must be one of {', '.join(FORMATS)}")
    row = FORMATS[format]
    if precision not in row.precisions:
        why = f"which has {', '.join(row.precisions)} only; --format=tflite has all"
        raise ConfigError(f"precision={precision} with format={format}, {why}")
    missing = [name for name in row.packages if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"format={format} needs {' and '.join(missing)}, not installed here; in an "
            "environment of its own (docs/export.md), as they may change other "
            f"packages: python -m pip install '.[{format}]'"
        )
