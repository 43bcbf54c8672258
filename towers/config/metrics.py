"""Metrics of an evaluation: what each measures, when it is computed, how it is shown.

`towers/evaluation/figures.py` has the functions. `--best_by`, `metrics.jsonl`,
TensorBoard, `result.json`, the printed table, the report, comparisons and
cross-validation read this table.
"""

import dataclasses

from towers.config.rows import Choice

# An image has one label, or a set of labels.
ONE_LABEL, LABEL_SETS = "one label", "label sets"
ALL_TASKS = ONE_LABEL, LABEL_SETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricRow(Choice):
    """A metric of the predictions for all images of an evaluation."""

    title: str  # in tables and charts
    higher_is_better: bool = True  # then the highest value is 1
    tasks: tuple[str, ...] = ALL_TASKS
    recorded_for: tuple[str, ...] = ()  # tasks whose trainings record it
    selects: bool = False  # whether it is a choice of --best_by


# The first metric of a task is its result. A function returns a number, or whether each
# image counts, bool [n]: their share has an interval. None: it does not apply.
METRICS = {
    "map": MetricRow(
        "mean average precision of label sets",
        target="mean_average_precision",
        title="mAP",
        tasks=(LABEL_SETS,),
        recorded_for=(LABEL_SETS,),
        selects=True,
    ),
    "map_micro": MetricRow(
        "average precision of all pairs of an image and a class",
        title="AP of all pairs",
        tasks=(LABEL_SETS,),
    ),
    "accuracy": MetricRow(
        "correct predictions", title="accuracy", recorded_for=ALL_TASKS, selects=True
    ),
    "accuracy_tta": MetricRow(
        "correct predictions with test-time augmentation",
        title="accuracy with TTA",
        recorded_for=ALL_TASKS,
    ),
    "top5_accuracy": MetricRow(
        "labels among the five largest logits",
        title="top-5 accuracy",
        tasks=(ONE_LABEL,),
    ),
    "loss": MetricRow(
        "the lowest loss",
        title="loss",
        higher_is_better=False,
        recorded_for=ALL_TASKS,
        selects=True,
    ),
    "balanced_accuracy": MetricRow(
        "mean recall of the classes",
        title="mean recall",
        tasks=(ONE_LABEL,),
        selects=True,
    ),
    "macro_f1": MetricRow(
        "mean F1 of the classes",
        title="mean F1",
        recorded_for=(LABEL_SETS,),
        selects=True,
    ),
    "macro_f1_at_thresholds": MetricRow(
        "mean F1 at the thresholds of held-out images",
        title="mean F1, thresholds",
        tasks=(LABEL_SETS,),
    ),
    "micro_f1": MetricRow(
        "F1 of all pairs of an image and a class",
        title="F1 of all pairs",
        tasks=(LABEL_SETS,),
    ),
    "micro_f1_at_thresholds": MetricRow(
        "F1 of all pairs at the thresholds of held-out images",
        title="F1, thresholds",
        tasks=(LABEL_SETS,),
    ),
    "calibration_error": MetricRow(
        "mean distance of probability and accuracy",
        title="calibration error",
        higher_is_better=False,
    ),
}


def metrics_of(multi_label: bool, recorded: bool = False) -> list[str]:
    """Return the metrics of a task, or those that its trainings record, by name."""
    task = LABEL_SETS if multi_label else ONE_LABEL
    return [
        name
        for name, row in METRICS.items()
        if task in (row.recorded_for if recorded else row.tasks)
    ]


def title_of(name: str, multi_label: bool = False) -> str:
    """Return the title of a metric; the name if it is not in the table."""
    if multi_label and name == "accuracy":
        return "all labels correct"
    return METRICS[name].title if name in METRICS else name
