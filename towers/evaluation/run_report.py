"""The report of a run: a web page in one file, and the same as JSON."""

import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

from towers import console, store
from towers.config import Config, non_defaults, parse_json
from towers.data.sources import Source
from towers.errors import data_errors_of_tensorflow
from towers.evaluation.figures import Figures, figures, precision_recall, reliability
from towers.evaluation.predictions import LabelSets, Predictions, worst_mistakes
from towers.evaluation.report import image_rows, result_of, to_json
from towers.evaluation.restored import RestoredRun
from towers.messages import command_of, one_line, program
from towers.models.create import without_noise
from towers.parallel.devices import gpu_names, processor_name
from towers.parallel.evaluator import Evaluation
from towers.run.folder import RunFolder
from towers.run.progress import Stopwatch
from towers.threads import num_cores

# Pictures of each kind on a page.
MAX_MISTAKES, MAX_RIGHT = 20, 10
# Precision-recall curves, and points of each.
MAX_CURVES, MAX_POINTS = 6, 200

_OF_PREDICTIONS = ("reliability", "precision_recall", "mistakes", "most_confident")

# Metrics of the curves, besides metrics of evaluations, which have a prefix.
_METRICS = (
    *("loss", "accuracy", "epoch_loss", "epoch_accuracy", "learning_rate"),
    *("images_per_sec", "input_wait_percent"),
)


class Evaluated(NamedTuple):
    """An evaluation of all images of a source."""

    split: str  # "test" or "validation"
    source: Source
    predictions: Evaluation[Predictions | LabelSets]
    figures: Evaluation[Figures]

    @classmethod
    def from_counts(
        cls,
        split: str,
        source: Source,
        evaluation: Evaluation[Mapping[str, Any]],
        class_names: Sequence[str],
    ) -> "Evaluated":
        """Creates it from the `figures_of_counts` of an evaluation during training."""
        predictions = evaluation.map(lambda x: x["predictions"])
        results = predictions.map(lambda x: figures(x, class_names))
        for weights, counts in evaluation.by_weights.items():
            if "accuracy_tta" in counts:  # it is not in the predictions
                results.by_weights[weights]["accuracy_tta"] = counts["accuracy_tta"]
        return cls(split, source, predictions, results)


def try_to_write(write: Callable[[], None]) -> None:
    """Writes a report; where that fails for any reason, a warning says so."""
    try:
        write()
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        console.warn(f"the report could not be written: {reason}")


def write_report(
    folder: RunFolder,
    config: Config,
    class_names: Sequence[str],
    image_shape: Sequence[int],
    records: Sequence[Mapping[str, Any]],
    evaluated: Evaluated | None,
    *,
    step: int,
    images: int,
    stopwatch: Stopwatch,
    versions: Mapping[str, str],
    run: RestoredRun | None = None,
) -> pathlib.Path:
    """Writes `report/index.html` and `report.json` in a run's folder; the path of the
    page.

    Args:
        records: of `metrics.jsonl`.
        evaluated: the last evaluation; None where there was none.
        step, images: steps taken, and images trained on, until the evaluation.
        run: the network that was evaluated, for the activation maps of the worst
            mistakes; without it this process trained, and its command and machine take
            the place of the previous report's.
    """
    from towers.evaluation.run_page import report_page  # Matplotlib takes a while

    path = folder.report / "report.json"
    result = {"step": step, "images": images} | result_of_records(records)
    of_predictions = dict.fromkeys(_OF_PREDICTIONS, ())
    if evaluated is not None:
        progress = {"step": step, "images": images, "stopwatch": stopwatch}
        result = result_of(evaluated.figures, evaluated.split, **progress)
        classes = evaluated.figures.reported["classes"]
        of_predictions = _predictions(evaluated, class_names, classes)
    content = {
        "run": os.path.normpath(folder.path),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "model": config.model,
        "dataset": config.dataset,
        "image_shape": list(image_shape),
        "result": result,
        "curves": curves_of(records),
        **of_predictions,
        "train_secs": stopwatch.train_secs,
        "start_secs": stopwatch.start_secs,
        **(_process() if run is None else _process_before(path)),
        "versions": dict(versions),
        "options": {name: getattr(config, name) for name in non_defaults(config)},
    }
    pixels = {}
    for row in (*content["mistakes"], *content["most_confident"]):
        index = tf.constant([row["index"]], tf.int64)
        with data_errors_of_tensorflow(), tf.device("CPU:0"):
            pixels[row["index"]] = evaluated.source.read(index)[0][0].numpy()
    maps = {}
    if run is not None and content["mistakes"]:
        indices = [row["index"] for row in content["mistakes"]]
        maps = _activation_maps(run, evaluated.predictions, indices, pixels)
    page = folder.report / "index.html"
    texts = {path: to_json(content), page: report_page(content, pixels, maps)}
    store.make_folders(folder.report)
    for path, text in texts.items():
        store.write_aside(path, text.encode(errors="backslashreplace"))
    return page


def _activation_maps(run, evaluation, indices, pixels):
    """Return index -> image with its activation map, of the predicted class."""
    predictions = evaluation.reported
    classes = predictions.classes[indices]
    if isinstance(predictions, LabelSets):
        distance = np.abs(predictions.probabilities - predictions.labels)
        classes = distance[indices].argmax(1)
    with tf.device("CPU:0"):
        model = without_noise(run.network(evaluation.reported_weights))
        inputs = run.preprocess(np.stack([pixels[index] for index in indices]))
        maps = activation_maps(model, inputs, classes)
    if maps is None:
        return {}
    return {i: overlay(pixels[i], heat) for i, heat in zip(indices, maps, strict=True)}


def activation_maps(
    model: keras.Model, inputs: tf.Tensor, classes: np.ndarray
) -> np.ndarray | None:
    """Return Grad-CAM, float32 [n, h, w] from 0 to 1 (Selvaraju et al. 2017,
    arXiv:1610.02391), of the logits `classes` [n]; None if no layer has height and
    width.
    """
    outputs = [layer.output for layer in model.layers if _is_spatial(layer)]
    if not outputs:
        return None
    network = keras.Model(model.inputs, [outputs[-1], model.outputs[0]])
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        activations, logits = network(inputs, training=False)
        chosen = tf.gather(logits, classes, batch_dims=1)
    gradients = tf.cast(tape.gradient(chosen, activations), tf.float32)
    weights = tf.reduce_mean(gradients, [1, 2], keepdims=True)
    maps = tf.nn.relu(tf.reduce_sum(weights * tf.cast(activations, tf.float32), -1))
    most = tf.reduce_max(maps, [1, 2], keepdims=True)
    return tf.math.divide_no_nan(maps, most).numpy()


def _is_spatial(layer):
    is_input = isinstance(layer, keras.layers.InputLayer)
    output = getattr(layer, "output", None)
    has_one = isinstance(output, keras.KerasTensor) and len(output.shape) == 4
    return has_one and not is_input and max(output.shape[1:3]) > 1


def overlay(pixels: np.ndarray, activation_map: np.ndarray) -> np.ndarray:
    """Return an image in gray with a map in red, uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    size = width, height
    heat = Image.fromarray(activation_map).resize(size, Image.Resampling.BILINEAR)
    heat = np.clip(np.asarray(heat), 0, 1)[..., None]
    gray = pixels.mean(-1, keepdims=True).repeat(3, -1)
    return (gray * (1 - 0.6 * heat) + 0.6 * heat * [255, 40, 0]).astype(np.uint8)


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
    """Name of a metric in `metrics.jsonl` -> its "steps", "epochs" and "values"."""
    curves = {}
    for record in records:
        for name, value in record.items():
            if name in _METRICS or name.startswith(("test_", "validation_")):
                new = {"steps": [], "epochs": [], "values": []}
                curve = curves.setdefault(name, new)
                curve["steps"].append(record["step"])
                curve["epochs"].append(record.get("epoch", record["step"]))
                curve["values"].append(value)
    return curves


def _predictions(evaluated, class_names, classes):
    """The calibration, and images with their predictions."""
    predictions = evaluated.predictions.reported
    worst = worst_mistakes(predictions, MAX_MISTAKES)
    right = np.flatnonzero(predictions.correct)
    right = right[np.argsort(-predictions.confidences[right], kind="stable")]
    labels = [predictions.texts(index, class_names)[0] for index in right]
    _, first = np.unique(labels, return_index=True)
    confident = right[np.sort(first)[:MAX_RIGHT]]  # one of a class
    mistakes, most_confident = (
        image_rows(predictions, indices, evaluated.source, class_names)
        for indices in (worst, confident)
    )
    curves = _precision_recall(predictions, classes)
    values = reliability(predictions), curves, mistakes, most_confident
    return dict(zip(_OF_PREDICTIONS, values, strict=True))


def _precision_recall(predictions, classes):
    """Precision-recall curves of the classes with the lowest average precision."""
    if not isinstance(predictions, LabelSets):
        return []
    numbers = [number for number, row in enumerate(classes) if row["images"]]
    numbers.sort(key=lambda number: classes[number]["average_precision"])
    curves = []
    for number in numbers[:MAX_CURVES]:
        columns = predictions.labels[:, number], predictions.scores[:, number]
        precision, recall, _ = precision_recall(*columns)
        chosen = np.linspace(0, len(recall) - 1, min(len(recall), MAX_POINTS))
        chosen = chosen.astype(int)
        curve = {name: classes[number][name] for name in ("name", "average_precision")}
        curve["recall"] = recall[chosen].tolist()
        curve["precision"] = precision[chosen].tolist()
        curves.append(curve)
    return curves


def _process():
    """Command and machine of this process."""
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
    """Command and machine in the report of the training, if there is one."""
    try:
        content = parse_json(path.read_bytes())
        return {name: content[name] for name in ("command", "machine")}
    except (OSError, ValueError, LookupError, TypeError):
        return {"command": None, "machine": None}
