"""The page of a report, from its content."""

import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from towers.evaluation.figures import frequent_mistakes, worst_confusion
from towers.evaluation.report import TITLES, headline, reported_figure, to_json
from towers.messages import program
from towers.reporting import charts, page
from towers.reporting.charts import Series
from towers.reporting.display import counted, duration

# Pairs of classes, and classes, that are listed.
MAX_PAIRS, MAX_ROWS = 15, 200

Content = Mapping[str, Any]


def report_page(
    content: Content,
    pixels: Mapping[int, np.ndarray],
    maps: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> str:
    """Return the page, from `report.json`, and images and activation maps by index."""
    result = content["result"]
    classes = reported_figure(result, "classes")
    parts = [_head(content), page.section("Curves", page.grid(*_curves(content)))]
    if classes:
        accuracy = reported_figure(result, "accuracy")
        title = "Calibration: how often a probability is right"
        parts += [
            page.section("Confusion matrix", *_confusion(result, classes)),
            page.section(
                "Classes and calibration",
                page.row(
                    _classes(classes, accuracy),
                    page.chart(title, charts.reliability(content["reliability"])),
                    *_precision_recall(content),
                ),
                _class_table(classes),
            ),
        ]
    for title, name in (
        ("Mistakes with the highest loss", "mistakes"),
        ("The most confident correct prediction of a class", "most_confident"),
    ):
        if rows := content[name]:
            title += _of_all(name, len(rows), result)
            parts.append(page.section(title, _pictures(rows, pixels)))
    if maps:
        rows = [row for row in content["mistakes"] if row["index"] in maps]
        legend = "Red: where the network finds the class that it predicts wrongly."
        pictures = page.paragraph(legend), _pictures(rows, maps)
        parts.append(page.section("Grad-CAM", *pictures))
    parts += [page.section("Run", *_run(content))]
    return page.page(f"{content['run']}: report", parts)


def _of_all(name, count, result):
    """Return how many mistakes, or classes, there are if the page shows fewer."""
    split = result["reported"].partition("_")[0]
    number, noun = result[f"{split}_images"] - reported_figure(result, "correct"), ""
    if name == "most_confident":
        classes = reported_figure(result, "classes")
        number, noun = sum(row["images"] > 0 for row in classes), " classes"
        if headline(result)[1] == "map":
            return ""
    return f", {count} of {number:,}{noun}" if count < number else ""


def _head(content):
    """The reported accuracy, and other figures."""
    result = content["result"]
    title = f"<h1>{page.text(content['run'])}</h1>"
    height, width, *_ = content["image_shape"]
    subject = f"{content['model']} on {content['dataset']}, {height}x{width} pixels"
    title += page.paragraph(f"{subject}; {content['written']}")
    accuracy = reported_figure(result, "accuracy")
    if accuracy is None:
        return title + page.paragraph("The run was not evaluated.") + _tiles(content)
    name, metric = headline(result)
    caption = f"{name.partition('_')[0]} {TITLES[metric]}"
    if interval := reported_figure(result, f"{metric}_interval"):
        caption += ", 95 % interval {:.4f} to {:.4f}".format(*interval)
    figure = f"{result[name]:.4f} <small>{page.text(caption)}</small>"
    figure = f'<div class="figure">{figure}</div>'
    return f"{title}{figure}{_about(content)}{_tiles(content)}"


def _about(content):
    result, sentences = content["result"], []
    name, metric = headline(result)
    split, _, suffix = name.partition(f"_{metric}")
    if (correct := reported_figure(result, "correct")) is not None:
        images = result[f"{split}_images"]
        what = "have all labels correct" if metric == "map" else "are correct"
        sentences.append(f"{correct:,} of {images:,} {split} images {what}.")
    if suffix:
        sentences.append(f"This is the {TITLES[metric]} of the EMA weights.")
        if (other := result.get(f"{split}_{metric}")) is not None:
            sentences.append(f"With the raw weights it is {other:.4f}.")
    if split == "validation":
        sentences.append("These images are held out of the training set;")
        sentences.append(f"{program('eval')} --report evaluates the test images.")
    elif not reported_figure(result, "classes"):
        sentences.append(f"{program('eval')} --report adds the confusion matrix.")
    return page.paragraph(" ".join(sentences))


def _tiles(content):
    result, curves, tiles = content["result"], content["curves"], []
    metric = headline(result)[1] if result["reported"] else "accuracy"
    for name, title in (TITLES | {"accuracy": "all labels correct"}).items():
        if name != metric and (value := reported_figure(result, name)) is not None:
            tiles.append((title, f"{value:.4f}", ""))
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


def metric_series(
    curves: Content, name: str, title: str, color: int = 0, is_faint: bool = False
) -> list[Series]:
    """A metric over the epochs as a series; none where it was not recorded."""
    if not (points := curves.get(name)):
        return []
    values = np.array(points["values"], float)  # NaN of None
    return [Series(title, points["epochs"], values, color, is_faint)]


def _curves(content):
    curves = content["curves"]
    if not curves:
        return [page.paragraph("metrics.jsonl has no records, so there are no curves.")]
    titled_series = []
    names = ["loss", "accuracy", "map"]
    names += [
        name.partition("_")[2].removesuffix("_ema")
        for name in curves
        if name.startswith(("test_", "validation_")) and "_tta" not in name
    ]
    for name in dict.fromkeys(names):
        series = metric_series(curves, name, "training, one step", 1, True)
        series += metric_series(curves, f"epoch_{name}", "training, epoch", 1)
        for split in ("validation", "test"):
            title = f"{split}, EMA weights"
            averages = metric_series(curves, f"{split}_{name}_ema", title)
            color = 2 if averages else 0
            series += metric_series(curves, f"{split}_{name}", split, color) + averages
        titled_series.append((name.capitalize(), series))
    rate = metric_series(curves, "learning_rate", "learning rate", 3)
    titled_series.append(("Learning rate", rate))
    return [curve_chart(*titled) for titled in titled_series if titled[1]]


def curve_chart(title: str, series: Sequence[Series]) -> str:
    """A chart of curves, with a legend where there are several."""
    is_share = title.removesuffix("_tta") in ("Accuracy", "Map", "Macro_f1")
    chart = charts.curves(title, series, is_share)
    return page.chart(title, chart, series if len(series) > 1 else ())


def _confusion(result, classes):
    if (entries := reported_figure(result, "confusion_matrix")) is None:
        return []
    entries = np.array(entries)
    worst, counts, images = worst_confusion(entries, len(classes), charts.MAX_CONFUSED)
    names = [row["name"] for row in classes]
    svg = charts.confusion(counts, images, [names[label] for label in worst])
    title = "Rows: classes. Columns: predictions. Shades: shares of a class"
    if len(worst) < len(classes):
        title = f"The {len(worst)} classes with the most mistakes. {title}"
    pairs = [
        (names[label], names[other], count, f"{count / classes[label]['images']:.1%}")
        for label, other, count in frequent_mistakes(entries, MAX_PAIRS).tolist()
    ]
    head = ["class", "predicted as", "images", "share of the class"]
    chart = page.chart(title, svg, wide=True)
    if not pairs:
        return [chart]
    table = f"<div><b>Most frequent mistakes</b>{page.table(head, pairs)}</div>"
    return [page.row(chart, table)]


def _classes(classes, accuracy):
    rows = sorted((r for r in classes if r["images"]), key=lambda row: row["recall"])
    title = "Accuracy of each class"
    if len(rows) > charts.MAX_CLASSES:
        rows = rows[: charts.MAX_CLASSES]
        title = f"The {len(rows)} least accurate of {len(classes)} classes"
    return page.chart(title, charts.class_accuracies(rows, accuracy))


def _class_table(classes):
    has_curves = "average_precision" in classes[0]
    rows = []
    for row in sorted(classes, key=lambda row: (not row["images"], row["recall"])):
        interval = "{:.4f} to {:.4f}".format(*row["recall_interval"])
        cells = row["name"], row["images"], row["recall"], interval, row["precision"]
        precision = [row["average_precision"]] if has_curves else []
        rows.append([*cells, row["f1"], *precision])
    title = f"All {len(classes)} classes"
    if len(rows) > MAX_ROWS:
        title = f"The {MAX_ROWS} least accurate of {len(rows)} classes"
    head = ["class", "images", "accuracy (recall)", "95 % interval", "precision", "F1"]
    head += ["average precision"] if has_curves else []
    return page.details(title, page.table(head, rows[:MAX_ROWS]))


def _precision_recall(content):
    if not (curves := content.get("precision_recall")):
        return []
    series = []
    for color, curve in enumerate(curves):
        name = f"{curve['name']} {curve['average_precision']:.3f}"
        series.append(Series(name, curve["recall"], curve["precision"], color))
    title = "Precision over recall, classes with the lowest average precision"
    return [page.chart(title, charts.precision_recall(series), series)]


def _pictures(rows, pixels):
    cells = []
    for row in rows:
        label, prediction = page.text(row["label"]), page.text(row["prediction"])
        lines = [f"<b>{label}</b>"]
        if row["label"] != row["prediction"]:
            lines.append(f'<span class="wrong">as {prediction}</span>')
        probability = f"probability {row['probability']:.3f}"
        lines.append(f'<span class="muted">{probability}</span>')
        place = row["path"] or f"image {row['index']}"
        about = f"{place}; loss {row['loss']:.3f}"
        if row["path"]:
            name = page.text(place.replace("\\", "/").rpartition("/")[2])
            lines.append(f'<span class="muted name">{name}</span>')
        cells.append((pixels[row["index"]], about, lines))
    return page.pictures(cells)


def _run(content) -> Sequence[str]:
    versions = ", ".join(f"{k} {v}" for k, v in content["versions"].items())
    machine = content["machine"] or "not recorded"
    rows = [("versions", versions), ("machine", machine)]
    rows.append(("written", content["written"]))
    parts = []
    if content["command"]:
        parts.append(f"<pre>{page.text(shlex.join(content['command']))}</pre>")
    options = [(name, str(value)) for name, value in content["options"].items()]
    table = page.table(["option", "value"], options)
    parts += [
        page.table(["", ""], rows),
        page.details("Options that are not defaults", table),
        page.download("Download these figures", "report.json", to_json(content)),
    ]
    speed = metric_series(content["curves"], "images_per_sec", "images per second", 4)
    if not speed:
        return parts
    chart = curve_chart("Images per second", speed)
    return [page.row(f"<div>{''.join(parts)}</div>", chart)]
