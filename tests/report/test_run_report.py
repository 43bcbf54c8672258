"""The report of a run, and the comparison of runs."""

import base64
import csv
import dataclasses
import html.parser
import io
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats
import small_runs
from PIL import Image
from small_runs import NUM_TEST, arrays, small_config

from towers.config import to_json
from towers.evaluation.evaluate import evaluate
from towers.report import charts
from towers.report.comparison import compare, t_quantile
from towers.training import ending
from towers.training.train import train

NAMES = (
    "<script>alert(1)</script>",
    "quo\"te's & <b>",
    "日本語 $x^2$ ü",
    "#000001",
    "\x1b[31mred\n",
)
# What a page needs; no script, no frame, no form.
TAGS = set(
    "a b body br dd details div dl dt figcaption figure h1 h2 head html i img meta p "
    "pre section small span style summary table tbody td th thead title tr".split()
)
CONFIG = small_config(eval_every_epochs=1.0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_runs.use(monkeypatch)
    monkeypatch.setattr(small_runs, "CLASS_NAMES", NAMES)


class Page(html.parser.HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.texts = set(), [], []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_data(self, text):
        self.texts.append(text)

    def images(self, kind="png"):
        """Return the bytes of the images of a kind."""
        prefixes = tuple(f"data:image/{x};base64," for x in ("png", "svg+xml"))
        found = [v for k, v in self.attributes if k == "src"]
        assert all(source.startswith(prefixes) for source in found)
        parts = (source.split(",") for source in found if f"/{kind};" in source)
        return [base64.b64decode(code) for _, code in parts]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The folder of a run with a report."""
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        patch.setattr(small_runs, "CLASS_NAMES", NAMES)
        patch.setattr("towers.training.train.report_run", ending.report_run)
        return train(tmp_path_factory.mktemp("report") / "r<b>&'\"n", CONFIG).path


def test_a_run_ends_with_the_figures_of_run_eval(workdir):
    report = json.loads((workdir / "report/report.json").read_text())
    result = evaluate(workdir)
    for name, value in report["result"].items():
        if "accuracy" in name or "loss" in name or "calibration" in name:
            assert result[name] == pytest.approx(value, rel=1e-5), name
    assert report["result"]["test_confusion_matrix"] == result["test_confusion_matrix"]

    with open(workdir / "mistakes.csv", newline="") as file:
        wrong = sorted(int(row["index"]) for row in csv.DictReader(file))
    rows, images = report["mistakes"], arrays(NUM_TEST, 1)[0]
    assert sorted(row["index"] for row in rows) == wrong
    losses = [row["loss"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    codes = Page(workdir / "report/index.html").images()
    shown = [np.asarray(Image.open(io.BytesIO(code))) for code in codes]
    for row, image in zip(rows, shown[: len(rows)], strict=True):
        np.testing.assert_array_equal(image, images[row["index"]])


def test_names_are_texts_of_a_page_without_scripts_and_addresses(workdir):
    page = Page(workdir / "report/index.html")
    assert page.tags <= TAGS
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    links = [v for k, v in page.attributes if k in ("src", "href", "xlink:href")]
    assert all(link.startswith(("data:image/", "#")) for link in links)
    assert "url(http" not in (workdir / "report/index.html").read_text()
    drawings = [ElementTree.fromstring(code) for code in page.images("svg+xml")]
    elements = {x.tag.rpartition("}")[2] for chart in drawings for x in chart.iter()}
    assert not elements & {"script", "foreignObject", "a"}
    drawn = [text for chart in drawings for text in chart.itertext()]
    assert any(text.startswith("<script>alert(1)") for text in drawn)
    texts = "".join(page.texts)
    for name in (*NAMES[:4], "\\x1b[31mred\\n", "r<b>&'\"n"):
        assert name in texts


def test_runs_with_held_out_images_are_compared_split_by_split(tmp_path, capsys):
    folders = []
    for name, changes in ("a", {}), ("b", {"validation_fraction": 0.2}):
        folders.append(tmp_path / name)
        config = dataclasses.replace(CONFIG, **changes)
        train(folders[-1], config, report=False)
    results = {folder.name: evaluate(folder) for folder in folders}
    capsys.readouterr()
    path = compare(folders)
    head, *rows = (re.split("  +", x) for x in capsys.readouterr().out.splitlines())
    titles = "test accuracy", "test loss", "validation accuracy", "validation loss"
    assert [title for title in head if title in titles] == list(titles)
    column = head.index("validation accuracy")
    for name, row in zip("ab", rows, strict=False):
        assert row[0] == name
        assert row[1].startswith(f"{results[name]['test_accuracy_ema']:.4f} (")
    best = [
        json.loads(line)["validation_accuracy_ema"]
        for line in (folders[1] / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["step"] == results["b"]["step"]
    ]
    assert rows[1][column].startswith(f"{best[0]:.4f}")
    texts = Page(path).texts
    for title in "Test accuracy", "Validation accuracy", "Validation loss":
        assert title in texts


def test_paired_seeds_give_the_difference_and_its_interval(tmp_path, capsys):
    accuracies = {0.1: [0.71, 0.74, 0.70], 0.2: [0.75, 0.73, 0.79]}
    folders = []
    for rate, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            folder = tmp_path / f"{rate}-{seed}"
            folder.mkdir()
            folders.append(folder)
            config = small_config(
                learning_rate=rate, seed=seed, log_every_steps=len(folders)
            )
            (folder / "config.json").write_text(to_json(config))
            record = {"step": 5, "epoch": 1.0, "test_accuracy": 0.5, "test_loss": 1.0}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            result = {"reported": "test_accuracy", "test_accuracy": accuracy}
            (folder / "result.json").write_text(json.dumps(result | {"step": 10}))
    path = compare(folders)
    assert path == folders[0] / "report/compare.html"
    output = " ".join(capsys.readouterr().out.split())
    differences = np.subtract(accuracies[0.2], accuracies[0.1])
    mean, error = differences.mean(), scipy.stats.sem(differences)
    low, high = scipy.stats.t.interval(0.95, 2, mean, error)
    words = f"learning_rate=0.2 minus learning_rate=0.1: {mean:+.4f}"
    assert f"{words}, 95 % interval {low:+.4f} to {high:+.4f}" in output
    for freedom in (1, 9, 10, 30):
        expected = scipy.stats.t.ppf(0.975, freedom)
        assert t_quantile(freedom) == pytest.approx(expected, abs=0.003)
    assert "learning_rate: 0.1 | 0.1 | 0.1 | 0.2 | 0.2 | 0.2" in output
    page = Page(path)
    assert page.tags <= TAGS and words in "".join(page.texts)
    assert {"0.1-2", "0.7900"} <= set(page.texts)


def test_the_description_of_a_chart_turns_no_text_around():
    """U+202E would reverse the line of a page."""
    series = [charts.Series("a\u202eb<i>", [0, 1], [0, 1])]
    alt = re.match('<img alt="([^"]*)"', charts.curves("x", series))[1]
    assert "a\\u202eb&lt;i&gt;" in alt and "\u202e" not in alt
