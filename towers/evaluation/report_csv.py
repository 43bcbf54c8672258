"""The figures of a report as a table, `report.csv`."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from towers.evaluation.report import of_reported


def report_csv(content: Mapping[str, Any]) -> str:
    """The text of `report.csv`, one figure a line.

    Columns: part, such as "result" or "class"; name; step, of a curve; value; low and
    high, its interval.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", "name", "step", "value", "low", "high"])
    writer.writerows(_csv_rows(content))
    return text.getvalue()


def _csv_rows(content) -> Iterable[Sequence[Any]]:
    result = content["result"]
    for name, value in result.items():
        if isinstance(value, list):
            continue
        interval = None
        if "accuracy" in name:
            interval = result.get(name.replace("accuracy", "accuracy_interval"))
        yield "result", name, "", value, *(interval or ["", ""])
    classes = of_reported(result, "classes") or []
    matrix = of_reported(result, "confusion_matrix") or []
    for row in classes:
        for name in ("images", "f1"):
            yield f"class {name}", row["name"], "", row[name], "", ""
        for name in ("precision", "recall"):
            interval = row[f"{name}_interval"]
            yield f"class {name}", row["name"], "", row[name], *interval
    for row, counts in zip(classes, matrix, strict=True):
        for other, count in zip(classes, counts, strict=True):
            if count:
                yield (
                    "confusion",
                    f"{row['name']} as {other['name']}",
                    "",
                    count,
                    "",
                    "",
                )
    for row in content["reliability"]:
        if row["images"]:
            interval = row["accuracy_interval"]
            yield "calibration", row["probability"], "", row["accuracy"], *interval
    for name, curve in content["curves"].items():
        for step, value in zip(curve["steps"], curve["values"], strict=True):
            yield "curve", name, step, value, "", ""
    for name, value in content["options"].items():
        yield "option", name, "", value, "", ""
