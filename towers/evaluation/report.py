"""The figures of an evaluation as lines, `result.json` and `mistakes.csv`."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from towers.data.sources import Source, location_of
from towers.evaluation.figures import (
    Figures,
    frequent_mistakes,
    mean_average_precision,
    mean_f1,
)
from towers.evaluation.predictions import LabelSets, Predictions, predictions_of_counts
from towers.evaluation.tables import MAX_CHARACTERS
from towers.messages import shown
from towers.parallel.copies import Weights
from towers.parallel.evaluator import Evaluation
from towers.reporting.display import duration
from towers.run.progress import Stopwatch

# The figures in `result.json`, in their order.
NAMES = (
    *("map", "map_micro", "accuracy", "accuracy_interval", "accuracy_tta"),
    *("top5_accuracy", "top5_accuracy_interval"),
    *("loss", "correct", "balanced_accuracy", "macro_f1", "micro_f1"),
    *("macro_f1_at_thresholds", "micro_f1_at_thresholds", "calibration_error"),
)
TABLES = ("classes", "confusion_matrix")

# Those that evaluations record in `metrics.jsonl` and TensorBoard.
RECORDED = ("map", "accuracy", "accuracy_tta", "loss", "macro_f1")

_FORMULA = re.compile(r"^([=+@\t\r-])(?![\d.]+$)")  # not -1 or +0.5

# Classes, and pairs of classes, that the table lists.
MAX_LISTED = 5

_WEIGHTS = {Weights.RAW: "raw weights", Weights.EMA: "EMA weights"}
TITLES = {
    "map": "mAP",
    "map_micro": "AP of all pairs",
    "accuracy": "accuracy",
    "accuracy_tta": "accuracy with TTA",
    "top5_accuracy": "top-5 accuracy",
    "loss": "loss",
    "macro_f1": "mean F1",
    "macro_f1_at_thresholds": "mean F1, thresholds",
    "micro_f1": "F1 of all pairs",
    "calibration_error": "calibration error",
}


def figures_of_counts(counts: Mapping[str, Any]) -> Figures:
    """Return counts of the trainer's `evaluate` with means and "predictions"."""
    predictions, images = predictions_of_counts(counts), int(counts["images"])
    result = {"correct": int(counts["correct"]), "images": images}
    means = {"accuracy": "correct", "accuracy_tta": "correct_tta", "loss": "loss"}
    result |= {k: counts[v] / images for k, v in means.items() if v in counts}
    if isinstance(predictions, LabelSets):
        result["map"] = mean_average_precision(predictions)
        result["macro_f1"] = mean_f1(predictions.labels, predictions.classes)
    return result | {"predictions": predictions}


def record_of(
    evaluation: Evaluation[Figures], split: str, names: Sequence[str] = RECORDED
) -> dict[str, Any]:
    """Return results by their names in `metrics.jsonl`, as "test_loss_ema"."""
    return {
        _name(split, name, weights): figures[name]
        for weights, figures in evaluation.by_weights.items()
        for name in dict.fromkeys(names)
        if name in figures
    }


def _name(split, name, weights):
    return f"{split}_{name}{'_ema' if weights is Weights.EMA else ''}"


def accuracy_line(
    at: str, evaluation: Evaluation[Figures], split: str, tta: str
) -> str:
    """A line that begins with `at`: the reported accuracy."""
    figures = evaluation.reported
    name, line = "accuracy", f"{at}: {split} accuracy "
    line += "{accuracy:.4f} ({correct} of {images})".format(**figures)
    if "map" in figures:
        name, line = "map", f"{at}: {split} mAP {figures['map']:.4f}"
    if len(evaluation.by_weights) > 1:
        raw = evaluation.by_weights[Weights.RAW]
        line += f", with the raw weights {raw[name]:.4f}"
    return line + _with_tta(figures, tta)


def epoch_line(
    epoch: float,
    evaluation: Evaluation[Figures],
    split: str,
    tta: str,
    metrics: Sequence[str],
    training_loss: float | None,
    secs: float,
    is_best: bool,
) -> str:
    """Return the line of an evaluation during the training."""
    figures = evaluation.reported
    name, title = ("map", "mAP") if "map" in figures else ("accuracy", "accuracy")
    line = f"epoch {epoch:g}: {split} {title} {figures[name]:.4f}"
    line += _with_tta(figures, tta)
    for other in metrics:
        line += f", {other} {figures[other]:.4f}"
    line += f", loss {figures['loss']:.4g}"
    if training_loss is not None:
        line += f", training loss {training_loss:.4g}"
    return f"{line}, {duration(secs)}{', best' * is_best}"


def _with_tta(figures, tta):
    with_tta = figures.get("accuracy_tta")
    return "" if with_tta is None else f", {with_tta:.4f} with tta={tta}"


def table(
    evaluation: Evaluation[Figures], columns: Mapping[Weights, str] = _WEIGHTS
) -> list[str]:
    """The lines of the table of an evaluation; class by class the reported figures."""
    reported, by_weights = evaluation.reported, evaluation.by_weights
    titles = {weights: columns[weights] for weights in by_weights}
    class_lines = _class_lines(reported, titles[evaluation.reported_weights])
    if len(titles) > 1:
        titles[evaluation.reported_weights] += " (reported)"
    rows = [["", *titles.values()]]
    names = dict(TITLES)
    if "map" in reported:
        names["accuracy"] = "all labels correct"
    for name, title in names.items():
        if name in reported:
            rows.append([title, *(_cell(x, name) for x in by_weights.values())])
    row_format = "  {:18}" + "  {:25}" * len(titles)
    lines = [row_format.format(*cells) for cells in rows]
    return [line.rstrip() for line in (*lines, *class_lines)]


def _cell(figures, name):
    interval = figures.get(f"{name}_interval")
    text = f"{figures[name]:.4f}"
    return text if interval is None else "{} ({:.4f} to {:.4f})".format(text, *interval)


def _class_lines(figures, kind):
    """The classes with the lowest F1, and the most frequent mistakes."""
    classes = figures["classes"]
    names = [shown(row["name"], MAX_CHARACTERS) for row in classes]
    present = [row for row in classes if row["images"] or row["predictions"]]
    lowest = sorted(present, key=lambda row: row["f1"])[:MAX_LISTED]
    title = f"class ({kind})"
    if len(classes) > MAX_LISTED:
        title = f"lowest F1 of {len(classes)} classes ({kind})"
    shortened = [shown(row["name"], MAX_CHARACTERS) for row in lowest]
    width = max(map(len, (title, *shortened)))
    yield f"  {title:{width}}  images  precision  recall      F1"
    for name, row in zip(shortened, lowest, strict=True):
        cells = "{images:6}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}"
        yield f"  {name:{width}}  {cells.format(**row)}"
    entries = np.array(figures.get("confusion_matrix", np.zeros((0, 3), np.int64)))
    mistakes = []
    for label, other, count in frequent_mistakes(entries, MAX_LISTED):
        mistakes.append(f"{names[label]} as {names[other]} {count}")
    if mistakes:
        yield f"  most frequent mistakes ({kind}): {', '.join(mistakes)}"


def result_of(
    evaluation: Evaluation[Figures],
    split: str,
    *,
    step: int,
    images: int,
    stopwatch: Stopwatch,
) -> dict[str, Any]:
    """The content of `result.json` after `step` steps on `images` images."""
    speed = None
    if stopwatch.timed_secs:
        steps_per_sec = stopwatch.timed_steps / stopwatch.timed_secs
        speed = steps_per_sec * images / max(step, 1)
    return {
        "reported": _name(split, "accuracy", evaluation.reported_weights),
        **record_of(evaluation, split, NAMES),
        "step": step,
        "images": images,
        f"{split}_images": evaluation.reported["images"],
        "train_secs": stopwatch.train_secs,
        "start_secs": stopwatch.start_secs,
        "images_per_sec": speed,
        **record_of(evaluation, split, TABLES),
    }


def reported_figure(result: Mapping[str, Any], name: str) -> Any:
    """Return a figure of the weights that a run reports, or None."""
    return result.get((result["reported"] or "accuracy").replace("accuracy", name))


def headline(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name in a result of the figure that a run reports, and its metric."""
    name = result["reported"]
    with_map = name.replace("accuracy", "map")
    return (with_map, "map") if with_map in result else (name, "accuracy")


def to_json(result: Mapping[str, Any]) -> str:
    """Return the text of `result.json`; a figure that is not finite is null."""

    def finite(value):
        if isinstance(value, Mapping):
            return {name: finite(x) for name, x in value.items()}
        if isinstance(value, list | tuple):
            return [finite(x) for x in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def text(value):
        if isinstance(value, list) and value and isinstance(value[0], list | dict):
            rows = ",\n    ".join(map(json.dumps, value))
            return f"[\n    {rows}\n  ]"
        return json.dumps(value)

    entries = (f"  {json.dumps(name)}: {text(x)}" for name, x in finite(result).items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def mistakes_csv(
    predictions: Predictions | LabelSets, source: Source, class_names: Sequence[str]
) -> str:
    """Return the text of `mistakes.csv`, a row of each wrong prediction."""
    rows = []
    wrong = np.flatnonzero(~predictions.correct)
    for row in image_rows(predictions, wrong, source, class_names):
        *cells, probability, _ = row.values()
        rows.append([*cells, f"{probability:.6f}"])
    return spreadsheet_csv(
        ["index", "path", "label", "prediction", "probability"], rows
    )


def spreadsheet_csv(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a CSV in which no text is a formula (OWASP, CSV injection)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(
            _FORMULA.sub(r"'\1", x) if isinstance(x, str) else x for x in row
        )
    return text.getvalue()


def image_rows(
    predictions: Predictions | LabelSets,
    indices: np.ndarray,
    source: Source,
    class_names: Sequence[str],
) -> list[dict[str, Any]]:
    """Return the rows of some images of a source with their predictions."""
    rows, confidences = [], predictions.confidences.tolist()
    for index in indices.tolist():
        label, prediction = predictions.texts(index, class_names)
        row = {"index": index, "path": shown(location_of(source, index), most=4096)}
        row |= {"label": label, "prediction": prediction}
        row["probability"] = confidences[index]
        row["loss"] = float(predictions.losses[index])
        rows.append(row)
    return rows
