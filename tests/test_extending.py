"""docs/extending.md, followed: every file in it trains two steps from outside."""

import json
import pathlib
import re
import shlex

import numpy as np
import pytest
import small_runs
from marks import slow
from sklearn.metrics import cohen_kappa_score

from towers.cli.flags import define_config_flags, given_flags
from towers.config import Config, choices
from towers.config.metrics import BOTH, METRICS, MetricRow
from towers.evaluation.evaluate import evaluate
from towers.metrics import metrics
from towers.report import page, run_page
from towers.training.train import train

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "extending.md"
SECTION = re.compile(r"^## (.*?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```\npython run_train.py (.*?)\n```$", re.MULTILINE | re.DOTALL)

SECTIONS = dict(SECTION.findall(PAGE.read_text()))
EXAMPLES = {h: text for h, text in SECTIONS.items() if BLOCK.search(text)}

# Two steps on a few images, whatever the example leaves open.
SMALL = {
    "dataset": "synthetic",
    "augment": "none",
    "model": "lenet",
    "width": 0.1,
    "weight_decay": 0.01,
    "device": "cpu",
    "batch_size": 8,
    "max_steps": 2,
    "eval_every_epochs": 0.0,
    "summary_every_steps": 0,
}


def options_of(command):
    """The fields of Config that a command line sets."""
    from absl import flags

    values = flags.FlagValues()
    define_config_flags(values=values)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    values(["run_train.py", *shlex.split(command.replace("\\\n", " "))])
    return given_flags(values)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a user, with the images that the data set reads."""
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    arrays = {}
    for split, count in (("train", 20), ("test", 10)):
        shape = (count, 32, 32, 3)
        arrays[f"{split}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{split}_labels"] = rng.integers(0, 2, count, dtype=np.int32)
    np.savez(tmp_path / "data" / "my_images.npz", **arrays)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_an_example_of_every_open_table():
    options = [options_of(COMMAND.search(text)[1]) for text in EXAMPLES.values()]
    shown = {k for o in options for k, v in o.items() if ".py:" in str(v)}
    assert shown == set(choices.TABLES) - set(choices.CLOSED)


@pytest.mark.parametrize(
    "heading", [h if h == "A schedule" else slow(h) for h in EXAMPLES]
)
def test_an_example_trains_two_steps_from_outside(heading, folder):
    [(name, source)] = BLOCK.findall(EXAMPLES[heading])
    (folder / name).write_text(source)
    options = options_of(COMMAND.search(EXAMPLES[heading])[1])
    [example] = [option for option, value in options.items() if name in str(value)]
    result = train(folder / "run", Config(**SMALL | options))
    assert result.step == 2
    assert all(np.all(np.isfinite(tensor)) for tensor in result.state.values())
    usual = {
        k: v for k, v in options.items() if k not in (example, "optimizer_options")
    }
    plain = train(folder / "plain", Config(**SMALL | usual))
    if example in ("strategy", "best_by"):  # they change no parameter
        assert_close(result.state, plain.state)
    else:  # with the usual choice it is another run
        with pytest.raises(AssertionError):
            assert_close(result.state, plain.state)


def test_a_row_adds_a_metric_and_a_row_a_figure_of_the_report(
    tmp_path, monkeypatch, capsys
):
    def kappa(predictions):
        values.append(cohen_kappa_score(predictions.labels, predictions.classes))
        return values[-1]

    values = []
    monkeypatch.setattr(metrics, "kappa", kappa, raising=False)
    monkeypatch.setitem(METRICS, "kappa", MetricRow("Cohen's kappa", recorded=BOTH))
    figure = run_page.Figure(
        "Largest loss",
        lambda content: page.paragraph(f"it is {content['largest'][0]}"),
        "largest",
        lambda evaluated: [float(evaluated.predictions.reported.losses.max())],
    )
    monkeypatch.setattr(run_page, "FIGURES", (*run_page.FIGURES, figure))
    small_runs.use(monkeypatch)
    config = small_runs.small_config(eval_every_epochs=1.0, ema_decay=0.0)
    result = train(tmp_path, config)
    assert result.history["test_kappa"].values[-1] == values[-1]
    capsys.readouterr()
    found = evaluate(tmp_path, report=True)
    assert found["test_kappa"] == values[-1]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["Cohen's", "kappa", f"{values[-1]:.4f}"] in lines
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["curves"]["test_kappa"]["values"][-1] == values[-1]
    html = (tmp_path / "report" / "index.html").read_text()
    assert "Cohen&#x27;s kappa" in html and f"it is {content['largest'][0]}" in html


def assert_close(state, other):
    assert list(state) == list(other)
    for name, values in state.items():
        np.testing.assert_allclose(values, other[name], atol=1e-6, err_msg=name)
