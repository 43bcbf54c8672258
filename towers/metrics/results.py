"""Results of an evaluation as lines of text, `result.json` and `mistakes.csv`."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from towers.config.metrics import METRICS, metrics_of, recorded_metrics, title_of
from towers.data.sources import Source, location_of
from towers.messages import MAX_NAME, duration, shown
from towers.metrics.metrics import Figures, compute, counts_of, frequent_mistakes
from towers.metrics.predictions import LabelSets, Predictions, predictions_of_counts
from towers.parallel.copies import Weights
from towers.parallel.evaluator import Evaluation
from towers.run.progress import Stopwatch

# Tables in `result.json`, after the other figures.
TABLES = ("classes", "confusion_matrix")

_FORMULA = re.compile(r"^([=+@\t\r-])(?![\d.]+$)")  # not -1 or +0.5

# Maximum number of classes, and of pairs of classes, in the printed table.
MAX_LISTED = 5

_WEIGHTS = {Weights.RAW: "raw weights", Weights.EMA: "EMA weights"}


def figures_of_counts(counts: Mapping[str, Any]) -> Figures:
    """Return the figures that a training records, and its "predictions"."""
    predictions = predictions_of_counts(counts)
    names = metrics_of(predictions.multi_label, recorded=True)
    result = compute(predictions, names) | counts_of(predictions)
    return result | {"predictions": predictions}


def record_of(
    evaluation: Evaluation[Figures], split: str, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the recorded metrics, and some others, named such as "test_loss_ema"."""
    return _named(evaluation, split, [*recorded_metrics(), *also])


def _named(evaluation, split, names):
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
    """Return the line of an evaluation of a checkpoint."""
    figures, by_weights = evaluation.reported, evaluation.by_weights
    name = _result_metric(figures)
    line = f"{at}: {split} {title_of(name)} {figures[name]:.4f}"
    if name == "accuracy":
        line += " ({correct} of {images})".format(**figures)
    if len(by_weights) > 1:
        line += f", with the raw weights {by_weights[Weights.RAW][name]:.4f}"
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
    name = _result_metric(figures)
    line = f"epoch {epoch:g}: {split} {title_of(name)} {figures[name]:.4f}"
    line += _with_tta(figures, tta)
    line += "".join(f", {other} {figures[other]:.4f}" for other in metrics)
    line += f", loss {figures['loss']:.4g}"
    if training_loss is not None:
        line += f", training loss {training_loss:.4g}"
    return f"{line}, {duration(secs)}{', best' if is_best else ''}"


def _result_metric(figures):
    return next(name for name in METRICS if name in figures)


def _with_tta(figures, tta):
    with_tta = figures.get("accuracy_tta")
    return "" if with_tta is None else f", {with_tta:.4f} with tta={tta}"


def table(
    evaluation: Evaluation[Figures], columns: Mapping[Weights, str] = _WEIGHTS
) -> list[str]:
    """Return the lines of a table: metrics, then classes by the reported weights."""
    reported, by_weights = evaluation.reported, evaluation.by_weights
    titles = {weights: columns[weights] for weights in by_weights}
    class_lines = _class_lines(reported, titles[evaluation.reported_weights])
    if len(titles) > 1:
        titles[evaluation.reported_weights] += " (reported)"
    rows = [["", *titles.values()]]
    for name in filter(reported.__contains__, METRICS):
        cells = (
            with_interval(figures[name], figures.get(f"{name}_interval"))
            for figures in by_weights.values()
        )
        rows.append([title_of(name, "map" in reported), *cells])
    row_format = "  {:18}" + "  {:25}" * len(titles)
    lines = [row_format.format(*cells) for cells in rows]
    return [line.rstrip() for line in (*lines, *class_lines)]


def with_interval(value: float, interval: Sequence[float] | None) -> str:
    """Return a figure, and its interval if there is one, as a text."""
    text = f"{value:.4f}"
    return text if interval is None else "{} ({:.4f} to {:.4f})".format(text, *interval)


def _class_lines(figures, kind):
    classes = figures["classes"]
    names = [shown(row["name"], MAX_NAME) for row in classes]
    present = [n for n, x in enumerate(classes) if x["images"] or x["predictions"]]
    lowest = sorted(present, key=lambda number: classes[number]["f1"])[:MAX_LISTED]
    title = f"class ({kind})"
    if len(classes) > MAX_LISTED:
        title = f"lowest F1 of {len(classes)} classes ({kind})"
    width = max(map(len, [title, *(names[number] for number in lowest)]))
    yield f"  {title:{width}}  images  precision  recall      F1"
    cells = "{images:6}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}"
    for number in lowest:
        yield f"  {names[number]:{width}}  {cells.format(**classes[number])}"
    entries = np.array(figures.get("confusion_matrix", np.zeros((0, 3), np.int64)))
    mistakes = [
        f"{names[label]} as {names[other]} {count}"
        for label, other, count in frequent_mistakes(entries, MAX_LISTED)
    ]
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
    """Return the content of `result.json` after `step` steps on `images` images."""
    names = [x for x in evaluation.reported if x not in (*TABLES, "images")]
    speed = None
    if stopwatch.timed_secs:
        steps_per_sec = stopwatch.timed_steps / stopwatch.timed_secs
        speed = steps_per_sec * images / max(step, 1)
    return {
        "reported": _name(split, "accuracy", evaluation.reported_weights),
        **_named(evaluation, split, names),
        "step": step,
        "images": images,
        f"{split}_images": evaluation.reported["images"],
        "train_secs": stopwatch.train_secs,
        "start_secs": stopwatch.start_secs,
        "images_per_sec": speed,
        **_named(evaluation, split, TABLES),
    }


def reported_figure(result: Mapping[str, Any], name: str) -> Any:
    """Return a figure of the reported weights, or None."""
    return result.get((result["reported"] or "accuracy").replace("accuracy", name))


def headline(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name in a result of its main figure, and the metric."""
    name = result["reported"]
    with_map = name.replace("accuracy", "map")
    return (with_map, "map") if with_map in result else (name, "accuracy")


def to_json(result: Mapping[str, Any]) -> str:
    """Return the text of `result.json`; numbers that are not finite are null."""

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
        cells = (_FORMULA.sub(r"'\1", x) if isinstance(x, str) else x for x in row)
        writer.writerow(cells)
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
