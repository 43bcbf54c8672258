"""An evaluation's figures as a short table, `result.json` and `mistakes.csv`."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from towers.data.sources import Source, place_of, shown
from towers.evaluation.figures import Outcomes

# Classes, and pairs of classes, that the table lists.
MOST_LISTED = 5
NAME_CHARACTERS = 24

_TITLES = {False: "parameters", True: "moving averages"}
_ROWS = {
    "accuracy": "accuracy",
    "accuracy_tta": "accuracy with TTA",
    "top5_accuracy": "top-5 accuracy",
    "loss": "loss",
    "macro_f1": "mean F1",
    "calibration_error": "calibration error",
}


def table(evaluations: Mapping[bool, Mapping[str, Any]]) -> list[str]:
    """The lines of the table.

    Args:
        evaluations: by whether they are of the moving averages, `figures.figures`; the
            last one is the one that is reported, also class by class.
    """
    titles = [_TITLES[kind] for kind in evaluations]
    *_, last = evaluations.values()
    class_lines = _class_lines(last, titles[-1])
    if len(titles) > 1:
        titles[-1] += ", reported"
    lines = [_line("", titles)]
    for name, title in _ROWS.items():
        if name in last:
            cells = [_cell(figures, name) for figures in evaluations.values()]
            lines.append(_line(title, cells))
    return [line.rstrip() for line in [*lines, *class_lines]]


def _line(title, cells):
    return "  " + f"{title:18}" + "".join(f"  {cell:25}" for cell in cells)


def _cell(figures, name):
    interval = figures.get(f"{name}_interval")
    text = f"{figures[name]:.4f}"
    return text if interval is None else "{} ({:.4f} to {:.4f})".format(text, *interval)


def _class_lines(figures, parameters):
    """The classes with the lowest F1, and the most frequent mistakes, of parameters of
    one kind."""
    rows = sorted(figures["classes"], key=lambda row: row["f1"])
    chosen = rows[:MOST_LISTED]
    title = "class" if len(rows) <= MOST_LISTED else f"lowest F1 of {len(rows)} classes"
    title += f" ({parameters})"
    width = max(len(title), *(len(_name(row)) for row in chosen))
    yield f"  {title:{width}}  images  precision  recall      F1"
    for row in chosen:
        yield (
            f"  {_name(row):{width}}  {row['images']:6}  {row['precision']:9.4f}  "
            f"{row['recall']:6.4f}  {row['f1']:6.4f}"
        )
    matrix = np.array(figures["confusion_matrix"])
    np.fill_diagonal(matrix, 0)
    pairs = np.argsort(-matrix, axis=None, kind="stable")[:MOST_LISTED]
    pairs = [divmod(pair, len(matrix)) for pair in pairs.tolist()]
    texts = [
        f"{_name(figures['classes'][label])} as {_name(figures['classes'][other])} "
        f"{matrix[label, other]}"
        for label, other in pairs
        if matrix[label, other]
    ]
    if texts:
        yield f"  most frequent mistakes ({parameters}): {', '.join(texts)}"


def _name(row):
    return shown(row["name"], NAME_CHARACTERS)


def to_json(result: Mapping[str, Any]) -> str:
    """The text of `result.json`, with a line for each row of a table; a figure that is
    not finite is null, because JSON has no other number for it."""
    entries = ",\n".join(
        f"  {json.dumps(name)}: {_value(value)}" for name, value in result.items()
    )
    return f"{{\n{entries}\n}}\n"


def _value(value):
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        rows = ",\n    ".join(map(json.dumps, value))
        return f"[\n    {rows}\n  ]"
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    return json.dumps(value)


def mistakes_csv(outcomes: Outcomes, source: Source, class_names: Sequence[str]) -> str:
    """The text of `mistakes.csv`: every test image that is predicted wrongly.

    Columns: index, the number of the image among those for testing; path, of the file
    where the image has one, or its place in the data set; label and prediction, names
    of classes; probability, of the prediction.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", "path", "label", "prediction", "probability"])
    for index in outcomes.mistakes.tolist():
        writer.writerow(
            [
                index,
                shown(place_of(source, index), most=4096),
                class_names[outcomes.labels[index]],
                class_names[outcomes.predictions[index]],
                f"{outcomes.probabilities[index]:.6f}",
            ]
        )
    return text.getvalue()
