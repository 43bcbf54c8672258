"""Metrics of an evaluation, with their titles and the images that they are of.

`towers/metrics/metrics.py` has the functions. `--best_by`, `metrics.jsonl`,
TensorBoard, `result.json`, the printed table, the report, comparisons and
cross-validation read this table.
"""

import dataclasses

from towers.config.rows import Choice

# Tasks: an image has one label, or a set of labels.
ONE, SETS = ("one label",), ("label sets",)
BOTH = ONE + SETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricRow(Choice):
    """A metric of the predictions for all images of an evaluation."""

    title: str = ""  # in tables and charts; by default `help`
    higher_is_better: bool = True  # the best value is 1
    tasks: tuple[str, ...] = BOTH
    recorded: tuple[str, ...] = ()  # tasks whose trainings record it
    selects: bool = False  # whether --best_by takes it


# The first metric of a task is its result. A function returns a number, or whether each
# image counts, bool [n], whose share has an interval; None if it does not apply.
METRICS = {
    "map": MetricRow(
        "mean average precision of label sets",
        title="mAP",
        target="mean_average_precision",
        tasks=SETS,
        recorded=SETS,
        selects=True,
    ),
    "map_micro": MetricRow("AP of all pairs", tasks=SETS),
    "accuracy": MetricRow(
        "correct predictions", title="accuracy", recorded=BOTH, selects=True
    ),
    "accuracy_tta": MetricRow("accuracy with TTA", recorded=BOTH),
    "top5_accuracy": MetricRow("top-5 accuracy", tasks=ONE),
    "loss": MetricRow(
        "the lowest loss",
        title="loss",
        higher_is_better=False,
        recorded=BOTH,
        selects=True,
    ),
    "balanced_accuracy": MetricRow(
        "mean recall of the classes", title="mean recall", tasks=ONE, selects=True
    ),
    "macro_f1": MetricRow(
        "mean F1 of the classes", title="mean F1", recorded=SETS, selects=True
    ),
    "macro_f1_at_thresholds": MetricRow("mean F1, thresholds", tasks=SETS),
    "micro_f1": MetricRow("F1 of all pairs", tasks=SETS),
    "micro_f1_at_thresholds": MetricRow("F1, thresholds", tasks=SETS),
    "calibration_error": MetricRow("calibration error", higher_is_better=False),
}


def metrics_of(multi_label: bool, recorded: bool = False) -> list[str]:
    """Return the names of a task's metrics, or of those that trainings record."""
    [task] = SETS if multi_label else ONE
    rows = METRICS.items()
    return [k for k, row in rows if task in (row.recorded if recorded else row.tasks)]


def recorded_metrics() -> list[str]:
    """Return the names of the metrics that trainings of some task record."""
    return [name for name, row in METRICS.items() if row.recorded]


def title_of(name: str, multi_label: bool = False) -> str:
    """Return the title of a metric; the name if it is not in the table."""
    if multi_label and name == "accuracy":
        return "all labels correct"
    row = METRICS.get(name)
    return row.title or row.help if row else name
