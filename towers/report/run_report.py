"""The report of a run: a web page in one file, and the same as JSON."""

import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers import console, store
from towers.build.restored import RestoredRun
from towers.config import Config, non_defaults, parse_json
from towers.data.sources import DataSet, Source
from towers.errors import data_errors_of_tensorflow
from towers.messages import command_of, one_line, program
from towers.metrics.metrics import Figures
from towers.metrics.predictions import LabelSets, Predictions
from towers.metrics.results import image_rows, result_of, to_json
from towers.models.create import without_noise
from towers.models.grad_cam import class_maps, enlarged, overlay
from towers.parallel.devices import gpu_names, processor_name
from towers.parallel.evaluator import Evaluation
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.progress import Stopwatch
from towers.threads import num_cores

# Records of training steps that are drawn as curves.
_RECORDS = (
    *("loss", "accuracy", "epoch_loss", "epoch_accuracy", "learning_rate"),
    *("images_per_sec", "input_wait_percent"),
)


class Evaluated(NamedTuple):
    """An evaluation of all images of a source."""

    split: str  # "test" or "validation"
    source: Source
    class_names: Sequence[str]
    predictions: Evaluation[Predictions | LabelSets]
    figures: Evaluation[Figures]

    def image_rows(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """Return rows of some images with their predictions."""
        predictions = self.predictions.reported
        return image_rows(predictions, indices, self.source, self.class_names)


def try_to_write(write: Callable[[], None]) -> None:
    """Write a report; if that fails for any reason, warn."""
    try:
        write()
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        console.warn(f"the report could not be written: {reason}")


def write_report(
    folder: RunFolder,
    config: Config,
    data: DataSet | DatasetInfo,
    records: Sequence[Mapping[str, Any]],
    evaluated: Evaluated | None,
    *,
    step: int,
    images: int,
    stopwatch: Stopwatch,
    versions: Mapping[str, str],
    run: RestoredRun | None = None,
) -> pathlib.Path:
    """Write `report/index.html`, whose path is returned, and `report.json`.

    With the evaluated `run` the page has activation maps; without it this process has
    trained, and its command and machine are reported. `step` and `images` are of the
    evaluation.
    """
    # Importing Matplotlib takes a while.
    from towers.report.run_page import computed_values, report_page

    path = folder.report / "report.json"
    result = {"step": step, "images": images} | result_of_records(records)
    if evaluated is not None:
        result = result_of(
            evaluated.figures,
            evaluated.split,
            step=step,
            images=images,
            stopwatch=stopwatch,
        )
    values = computed_values(evaluated)
    content = {
        "run": os.path.normpath(folder.path),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "model": config.model,
        "dataset": config.dataset,
        "image_shape": list(data.image_shape),
        "result": result,
        "curves": curves_of(records),
        **values,
        "train_secs": stopwatch.train_secs,
        "start_secs": stopwatch.start_secs,
        **(_process() if run is None else _process_before(path)),
        "versions": dict(versions),
        "options": {name: getattr(config, name) for name in non_defaults(config)},
    }
    pixels, shown, maps = {}, {}, {}
    if evaluated is not None:
        pixels = _pixels(evaluated.source, values)
        shown = {index: data.pixels.to_bytes(x) for index, x in pixels.items()}
        if run is not None and values["mistakes"]:
            indices = [row["index"] for row in values["mistakes"]]
            maps = _activation_maps(run, evaluated.predictions, indices, pixels)
    page = folder.report / "index.html"
    texts = {path: to_json(content), page: report_page(content, shown, maps)}
    store.make_folders(folder.report)
    for path, text in texts.items():
        store.write_aside(path, text.encode(errors="backslashreplace"))
    return page


def _pixels(source, values):
    """Return index -> image [height, width, channels] of the rows of images."""
    rows = [x for rows in values.values() for x in rows if isinstance(x, dict)]
    pixels = {}
    for number in {row["index"] for row in rows if "index" in row}:
        index = tf.constant([number], tf.int64)
        with data_errors_of_tensorflow(), tf.device("CPU:0"):
            pixels[number] = source.read(index)[0][0].numpy()
    return pixels


def _activation_maps(run, evaluation, indices, pixels):
    """Return index -> image with its activation map, of the predicted class."""
    predictions = evaluation.reported
    classes = predictions.classes[indices]  # -1 of NaN, see `top_class`
    if isinstance(predictions, LabelSets):
        distance = np.abs(predictions.probabilities - predictions.labels)
        classes = distance[indices].argmax(1)
    chosen = classes[:, None] == np.arange(len(run.class_names))
    with tf.device("CPU:0"):
        model = without_noise(run.network(evaluation.reported_weights))
        inputs = run.preprocess(np.stack([pixels[index] for index in indices]))
        maps = class_maps(model, inputs, chosen)
    if maps is None:
        return {}
    size, box = run.image_shape[:2], run.input_box
    return {
        i: overlay(run.pixels.to_bytes(pixels[i]), enlarged(heat, size, box))
        for i, heat in zip(indices, maps, strict=True)
    }


def result_of_records(
    records: Sequence[Mapping[str, Any]], splits: Sequence[str] = ("test", "validation")
) -> dict[str, Any]:
    """Return the last evaluation in `metrics.jsonl`, in the form of `result.json`."""
    for record in reversed(records):
        for name in ("accuracy_ema", "accuracy"):
            for split in splits:
                if isinstance(record.get(f"{split}_{name}"), float):
                    figures = {
                        k: v for k, v in record.items() if k.startswith(f"{split}_")
                    }
                    step = record["step"]
                    return {"reported": f"{split}_{name}", **figures, "step": step}
    return {"reported": None}


def curves_of(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list]]:
    """Return the name of a record -> its "steps", "epochs" and "values"."""
    curves: dict[str, dict[str, list]] = {}
    for record in records:
        for name, value in record.items():
            if name in _RECORDS or name.startswith(("test_", "validation_")):
                curve = curves.setdefault(
                    name, {"steps": [], "epochs": [], "values": []}
                )
                curve["steps"].append(record["step"])
                curve["epochs"].append(record.get("epoch", record["step"]))
                curve["values"].append(value)
    return curves


def _process():
    path, *arguments = sys.argv or [""]
    name, command = os.path.basename(path), None
    if name == program("train"):
        command = command_of(name, arguments)
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpus = tf.config.get_visible_devices("GPU")
    machine = f"{num_cores()} cores of {processor_name()}, {gigabytes:.0f} GB memory"
    if gpus:
        machine = f"{len(gpus)} x {', '.join(gpu_names())}; {machine}"
    return {"command": command, "machine": machine}


def _process_before(path):
    """Return command and machine in the report of the training, if there is one."""
    try:
        content = parse_json(path.read_bytes())
        return {name: content[name] for name in ("command", "machine")}
    except (OSError, ValueError, LookupError, TypeError):
        return {"command": None, "machine": None}
