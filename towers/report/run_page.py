"""The page of a report: a table of its figures, and how each is computed and drawn."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers.config.metrics import METRICS, title_of
from towers.messages import counted, duration, program
from towers.metrics import metrics
from towers.metrics.predictions import LabelSets, precision_recall, worst_mistakes
from towers.metrics.rejection import Answers
from towers.metrics.results import headline, reported_figure
from towers.report import charts, page
from towers.report.charts import Series
from towers.report.run_report import Evaluated

# Maximum number of pairs of classes, and of classes, in tables.
MAX_PAIRS, MAX_ROWS = 15, 200
# Maximum number of pictures of mistakes, and of correct predictions.
MAX_MISTAKES, MAX_RIGHT = 20, 10
# Maximum number of precision-recall curves, and of points of each.
MAX_CURVES, MAX_POINTS = 6, 200

Content = Mapping[str, Any]
Pictures = Mapping[int, np.ndarray]  # index -> uint8 [height, width, channels]


class Figure(NamedTuple):
    """A figure of the page, next to the other figures of its section."""

    section: str  # the title
    draw: Callable[[Content], page.Html]  # empty if it does not apply
    name: str = ""  # of the computed values in `report.json`
    compute: Callable[[Evaluated], Any] = lambda evaluated: ()


def computed_values(evaluated: Evaluated | None) -> dict[str, Any]:
    """Return the values of the figures in `report.json` by name."""
    return {
        figure.name: figure.compute(evaluated) if evaluated else ()
        for figure in FIGURES
        if figure.name
    }


def report_page(content: Content, pixels: Pictures, maps: Pictures) -> page.Html:
    """Return the page, from `report.json`, and images and activation maps by index."""
    drawn: dict[str, list[page.Html]] = {}
    content = {**content, "pixels": pixels, "maps": maps}
    for figure in FIGURES:
        if html := figure.draw(content):
            drawn.setdefault(figure.section, []).append(html)
    sections = [
        page.section(title, page.row(*parts) if len(parts) > 1 else parts[0])
        for title, parts in drawn.items()
    ]
    return page.page(f"{content['run']}: report", [_head(content), *sections])


def _head(content):
    result = content["result"]
    title = f"<h1>{page.text(content['run'])}</h1>"
    height, width, *_ = content["image_shape"]
    subject = f"{content['model']} on {content['dataset']}, {height}x{width} pixels"
    title += page.paragraph(f"{subject}; {content['written']}")
    accuracy = reported_figure(result, "accuracy")
    if accuracy is None:
        return title + page.paragraph("The run was not evaluated.") + _tiles(content)
    name, metric = headline(result)
    split, _, suffix = name.partition(f"_{metric}")
    caption = f"{split} {title_of(metric)}{' of the EMA weights' if suffix else ''}"
    if interval := reported_figure(result, f"{metric}_interval"):
        caption += ", 95 % interval {:.4f} to {:.4f}".format(*interval)
    figure = f"{result[name]:.4f} <small>{page.text(caption)}</small>"
    title += f'<div class="figure">{figure}</div>'
    if not reported_figure(result, "classes") or split == "validation":
        title += page.paragraph(
            f"{program('eval')} --report evaluates the test images."
        )
    return title + _tiles(content)


def _tiles(content):
    result, curves = content["result"], content["curves"]
    metric = headline(result)[1] if result["reported"] else "accuracy"
    values = {name: reported_figure(result, name) for name in METRICS if name != metric}
    tiles = [
        (title_of(name, metric == "map"), f"{value:.4f}", "")
        for name, value in values.items()
        if value is not None
    ]
    epochs = [max(curve["epochs"]) for curve in curves.values() if curve["epochs"]]
    length = counted(float(f"{max(epochs):.4g}"), "epoch") if epochs else ""
    tiles.append(("step", f"{result['step']:,}", length))
    if speed := result.get("images_per_sec"):
        tiles.append(("speed", f"{speed:,.0f}", "images/s"))
    waits = curves.get("input_wait_percent", {"values": []})["values"]
    if waits := [x for x in waits if isinstance(x, int | float)]:
        tiles.append(("input wait", f"{np.mean(waits):.0f} %", "mean"))
    tiles.append(("training", duration(content["train_secs"]), "in steps"))
    tiles.append(("first steps", f"{content['start_secs']:.1f} s", "compiling"))
    return page.tiles(tiles)


# Curves.


def metric_series(
    curves: Content, name: str, title: str, color: int = 0, is_faint: bool = False
) -> list[Series]:
    """Return a metric over the epochs as a series; none if it was not recorded."""
    if not (points := curves.get(name)):
        return []
    values = np.array(points["values"], float)  # NaN of None
    return [Series(title, points["epochs"], values, color, is_faint)]


def _curves(content):
    curves = content["curves"]
    if not curves:
        return page.paragraph("metrics.jsonl has no records, so there are no curves.")
    panels = []
    parts = (name.removesuffix("_ema").partition("_") for name in curves)
    names = [x for split, _, x in parts if split in ("test", "validation")]
    for name in dict.fromkeys(["loss", "accuracy", *names]):
        series = metric_series(curves, name, "training, one step", 1, True)
        series += metric_series(curves, f"epoch_{name}", "training, epoch", 1)
        for split in ("validation", "test"):
            title = f"{split}, EMA weights"
            averages = metric_series(curves, f"{split}_{name}_ema", title)
            color = 2 if averages else 0
            series += metric_series(curves, f"{split}_{name}", split, color) + averages
        if series:
            panels.append(curve_chart(title_of(name), series, name))
    if rate := metric_series(curves, "learning_rate", "learning rate", 3):
        panels.append(curve_chart("learning rate", rate))
    return page.grid(*panels)


def curve_chart(title: str, series: Sequence[Series], metric: str = "") -> page.Html:
    """Return a chart of curves, with a legend if there are several."""
    title = title if title[1:2].isupper() else title[:1].upper() + title[1:]  # mAP
    is_share = metric in METRICS and METRICS[metric].higher_is_better
    chart = charts.curves(title, series, is_share)
    return page.chart(title, chart, series if len(series) > 1 else ())


# Classes.


def _confusion(content):
    classes = reported_figure(content["result"], "classes")
    entries = reported_figure(content["result"], "confusion_matrix")
    if entries is None:
        return ""
    entries = np.array(entries)
    worst, counts, images = metrics.worst_confusion(
        entries, len(classes), charts.MAX_CONFUSED
    )
    names = [row["name"] for row in classes]
    svg = charts.confusion(counts, images, [names[label] for label in worst])
    title = "Rows: classes. Columns: predictions. Shades: shares of a class"
    if len(worst) < len(classes):
        title = f"The {len(worst)} classes with the most mistakes. {title}"
    pairs = [
        (names[label], names[other], count, f"{count / classes[label]['images']:.1%}")
        for label, other, count in metrics.frequent_mistakes(
            entries, MAX_PAIRS
        ).tolist()
    ]
    head = ["class", "predicted as", "images", "share of the class"]
    chart = page.chart(title, svg, wide=True)
    table = f"<div><b>Most frequent mistakes</b>{page.table(head, pairs)}</div>"
    return page.row(chart, table) if pairs else chart


def _class_accuracies(content):
    if not (classes := reported_figure(content["result"], "classes")):
        return ""
    rows = sorted((r for r in classes if r["images"]), key=lambda row: row["recall"])
    title = "Accuracy of each class"
    if len(rows) > charts.MAX_CLASSES:
        rows = rows[: charts.MAX_CLASSES]
        title = f"The {len(rows)} least accurate of {len(classes)} classes"
    accuracy = reported_figure(content["result"], "accuracy")
    return page.chart(title, charts.class_accuracies(rows, accuracy))


def _class_table(content):
    if not (classes := reported_figure(content["result"], "classes")):
        return ""
    columns = {
        "name": "class",
        "images": "images",
        "recall": "accuracy (recall)",
        "recall_interval": "95 % interval",
        "precision": "precision",
        "f1": "F1",
        "average_precision": "average precision",
    }
    keys = [key for key in columns if key in classes[0]]
    rows = sorted(classes, key=lambda row: (not row["images"], row["recall"]))
    title = f"All {len(classes)} classes"
    if len(rows) > MAX_ROWS:
        title = f"The {MAX_ROWS} least accurate of {len(rows)} classes"
    cells = [[row[key] for key in keys] for row in rows[:MAX_ROWS]]
    return page.details(title, page.table([columns[key] for key in keys], cells))


def _reliability_values(evaluated):
    return metrics.reliability(evaluated.predictions.reported)


def _reliability(content):
    title = "Calibration: how often a probability is right"
    rows = content["reliability"]
    return page.chart(title, charts.reliability(rows)) if rows else ""


def _sampled(**columns):
    """Return at most MAX_POINTS of the values of each column, evenly spaced."""
    count = len(next(iter(columns.values())))
    chosen = np.linspace(0, count - 1, min(count, MAX_POINTS)).astype(int)
    return {name: values[chosen].tolist() for name, values in columns.items()}


def _risk_coverage_values(evaluated):
    """Return the curve of risk over coverage, by the probability of the prediction."""
    predictions = evaluated.predictions.reported
    if isinstance(predictions, LabelSets):
        return ()
    answers = Answers(*predictions.decisions, len(predictions.labels))
    precision, coverage, _ = answers.curve()
    return [_sampled(coverage=coverage, risk=1 - precision)]


def _risk_coverage(content):
    curves = [
        Series("risk", x["coverage"], x["risk"]) for x in content["risk_coverage"]
    ]
    title = "Risk (share of wrong answers) over coverage (share of images answered)"
    chart = curves and charts.steps(curves, "coverage", "risk")
    return page.chart(title, chart) if chart else ""


def _precision_recall_values(evaluated):
    """Return the curves of the classes with the lowest average precision."""
    predictions, curves = evaluated.predictions.reported, []
    if not isinstance(predictions, LabelSets):
        return ()
    numbers = np.flatnonzero(predictions.labels.any(0))
    average_precisions = predictions.average_precisions
    numbers = numbers[np.argsort(average_precisions[numbers], kind="stable")]
    for number in numbers[:MAX_CURVES]:
        columns = predictions.labels[:, number], predictions.scores[:, number]
        precision, recall, _ = precision_recall(*columns)
        about = {"name": evaluated.class_names[number]}
        about["average_precision"] = float(average_precisions[number])
        curves.append(about | _sampled(recall=recall, precision=precision))
    return curves


def _precision_recall(content):
    series = []
    for color, curve in enumerate(content["precision_recall"]):
        name = f"{curve['name']} {curve['average_precision']:.3f}"
        series.append(Series(name, curve["recall"], curve["precision"], color))
    if not series:
        return ""
    title = "Precision over recall, classes with the lowest average precision"
    return page.chart(title, charts.steps(series), series)


# Pictures.


def _worst_mistakes(evaluated):
    worst = worst_mistakes(evaluated.predictions.reported, MAX_MISTAKES)
    return evaluated.image_rows(worst)


def _most_confident(evaluated):
    """Return rows of correct predictions, one of a class."""
    predictions = evaluated.predictions.reported
    right = np.flatnonzero(predictions.correct)
    right = right[np.argsort(-predictions.confidences[right], kind="stable")]
    labels = [predictions.texts(index, evaluated.class_names)[0] for index in right]
    _, first = np.unique(labels, return_index=True)
    return evaluated.image_rows(right[np.sort(first)[:MAX_RIGHT]])


def _activation_maps(content):
    rows = [row for row in content["mistakes"] if row["index"] in content["maps"]]
    legend = "Red: where the network finds the class that it predicts wrongly."
    return page.paragraph(legend) + _pictures(rows, content["maps"]) if rows else ""


def _pictures(rows, pixels):
    cells = []
    for row in rows:
        lines = [f"<b>{page.text(row['label'])}</b>"]
        if row["label"] != row["prediction"]:
            prediction = page.text(row["prediction"])
            lines.append(f'<span class="wrong">as {prediction}</span>')
        lines.append(f'<span class="muted">probability {row["probability"]:.3f}</span>')
        if row["path"]:
            name = page.text(row["path"].replace("\\", "/").rpartition("/")[2])
            lines.append(f'<span class="muted name">{name}</span>')
        place = row["path"] or f"image {row['index']}"
        about = f"{place}; loss {row['loss']:.3f}"
        cells.append((pixels[row["index"]], about, lines))
    return page.pictures(cells) if cells else ""


def _run(content):
    versions = ", ".join(f"{k} {v}" for k, v in content["versions"].items())
    rows = [("versions", versions), ("machine", content["machine"] or "not recorded")]
    html = page.table(["", ""], rows)
    if content["command"]:
        html = f"<pre>{page.text(shlex.join(content['command']))}</pre>{html}"
    options = [(name, str(value)) for name, value in content["options"].items()]
    table = page.table(["option", "value"], options)
    return f"<div>{html}{page.details('Options that are not defaults', table)}</div>"


def _speed(content):
    speed = metric_series(content["curves"], "images_per_sec", "images per second", 4)
    return curve_chart("images per second", speed) if speed else ""


# The figures of the page, in their order.
CALIBRATION = "Classes and calibration"
FIGURES = (
    Figure("Curves", _curves),
    Figure("Confusion matrix", _confusion),
    Figure(CALIBRATION, _class_accuracies),
    Figure(CALIBRATION, _reliability, "reliability", _reliability_values),
    Figure(CALIBRATION, _risk_coverage, "risk_coverage", _risk_coverage_values),
    Figure(
        CALIBRATION, _precision_recall, "precision_recall", _precision_recall_values
    ),
    Figure("Table of classes", _class_table),
    Figure(
        "Mistakes with the highest loss",
        lambda content: _pictures(content["mistakes"], content["pixels"]),
        "mistakes",
        _worst_mistakes,
    ),
    Figure(
        "The most confident correct prediction of a class",
        lambda content: _pictures(content["most_confident"], content["pixels"]),
        "most_confident",
        _most_confident,
    ),
    Figure("Heat maps", _activation_maps),
    Figure("Run", _run),
    Figure("Run", _speed),
)
