"""The figures of an evaluation equal scikit-learn's, and formulas written anew."""

import csv
import json
import pathlib
import shutil
import warnings

import numpy as np
import pytest
import small_runs
from scipy import special
from sklearn import metrics
from small_runs import CLASS_NAMES, NUM_TEST, arrays, small_config

from towers import load_run
from towers.config.metrics import METRICS
from towers.evaluation.evaluate import evaluate
from towers.metrics.metrics import (
    confusion_entries,
    figures,
    wilson_interval,
    worst_confusion,
)
from towers.metrics.predictions import predictions_of
from towers.metrics.results import table
from towers.parallel.copies import Weights
from towers.parallel.evaluator import Evaluation


def random_batch(num_images, num_classes, seed, scale=3.0):
    """A batch as `Evaluator.predictions` gives it; the last class has no image, and the
    one before is never predicted."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.standard_normal((num_images, num_classes)).astype(np.float32)
    labels = rng.integers(0, num_classes - 1, num_images, dtype=np.int32)
    logits[np.arange(num_images), labels] += rng.choice([0, 2 * scale], num_images)
    logits[:, -2] = logits.min(1) - 1
    loss = -np.log(probabilities_of(logits)[np.arange(num_images), labels])
    return {"logits": logits, "labels": labels, "loss": loss}


def of_one_kind(batches):
    return predictions_of({Weights.RAW: batch} for batch in batches).reported


def probabilities_of(logits):
    return special.softmax(logits.astype(np.float64), axis=1)


def test_every_metric_is_described():
    docs = pathlib.Path(__file__).resolve().parents[2] / "docs"
    pages = [docs / f"{name}.md" for name in ("own_images", "label_sets")]
    text = "".join(page.read_text() for page in pages)
    assert not [name for name in METRICS if f"`test_{name}`" not in text]


def compare_with_sklearn(found, labels, logits, suffix="", prefix=""):
    """All figures of an evaluation that scikit-learn has."""

    def value(name):
        return found[f"{prefix}{name}{suffix}"]

    classes, predictions = np.arange(logits.shape[1]), logits.argmax(1)
    expected = metrics.confusion_matrix(labels, predictions, labels=classes)
    entries = np.array(value("confusion_matrix"))
    pairs = np.argwhere(expected)
    np.testing.assert_array_equal(entries, np.column_stack([pairs, expected[*pairs.T]]))
    columns = metrics.precision_recall_fscore_support(
        labels, predictions, labels=classes, zero_division=0
    )
    columns += (np.bincount(predictions, minlength=len(classes)),)
    for name, column in zip(
        ("precision", "recall", "f1", "images", "predictions"), columns, strict=True
    ):
        ours = [row[name] for row in value("classes")]
        np.testing.assert_allclose(ours, column, rtol=1e-12, err_msg=name)
    mean_f1 = metrics.f1_score(labels, predictions, average="macro", zero_division=0)
    assert value("macro_f1") == pytest.approx(mean_f1, rel=1e-12)
    with warnings.catch_warnings():  # of classes without images
        warnings.simplefilter("ignore")
        mean_recall = metrics.balanced_accuracy_score(labels, predictions)
    assert value("balanced_accuracy") == pytest.approx(mean_recall, rel=1e-12)
    accuracy = metrics.accuracy_score(labels, predictions)
    assert value("accuracy") == pytest.approx(accuracy, rel=1e-12)
    losses = metrics.log_loss(labels, probabilities_of(logits), labels=classes)
    assert value("loss") == pytest.approx(losses, rel=1e-5)
    if logits.shape[1] > 5:
        top = metrics.top_k_accuracy_score(labels, logits, k=5, labels=classes)
        assert value("top5_accuracy") == pytest.approx(top, rel=1e-12)


@pytest.mark.parametrize("num_classes", [3, 10, 100])
def test_random_predictions_equal_sklearn(num_classes):
    batches = [random_batch(count, num_classes, seed=count) for count in (70, 130, 1)]
    names = [f"class {i}" for i in range(num_classes)]
    found = figures(of_one_kind(batches), names)
    assert json.loads(json.dumps(found)) == found
    labels, logits = (
        np.concatenate([x[name] for x in batches]) for name in ("labels", "logits")
    )
    compare_with_sklearn(found, labels, logits)
    assert found["classes"][-1]["recall"] == found["classes"][-2]["precision"] == 0
    assert found["images"] == 201 and 0 < found["correct"] < 201


@pytest.mark.parametrize(
    "labels, predictions",
    [
        ([0, 0, 1], [0, 0, 1]),  # class 2 has neither images nor predictions
        ([0, 1, 1], [2, 2, 2]),  # nothing is right
    ],
)
def test_the_mean_f1_leaves_out_classes_without_images_and_predictions(
    labels, predictions
):
    logits = np.eye(4, dtype=np.float32)[predictions]
    batch = {"logits": logits, "labels": np.array(labels), "loss": np.zeros(2)}
    found = figures(of_one_kind([batch]), "abcd")
    expected = metrics.f1_score(labels, predictions, average="macro", zero_division=0)
    assert found["macro_f1"] == pytest.approx(expected, rel=1e-12)
    rows = [line.split()[0] for line in table(Evaluation({Weights.RAW: found}))[-5:]]
    assert set(rows) & set("abcd") == {"abcd"[x] for x in {*labels, *predictions}}


def test_the_worst_part_of_a_confusion_matrix_equals_a_plain_selection():
    labels, predicted = np.random.default_rng(0).integers(0, 30, (2, 400))
    whole = metrics.confusion_matrix(labels, predicted, labels=range(30))
    entries = confusion_entries(labels, predicted, 30)
    classes, counts, images = worst_confusion(entries, 30, 7)
    wrong = whole.sum(0) + whole.sum(1) - 2 * np.diag(whole)
    rest = [x for x in range(30) if x not in classes]
    assert len(classes) == 7 and wrong[classes].min() >= wrong[rest].max()
    np.testing.assert_array_equal(counts, whole[np.ix_(classes, classes)])
    np.testing.assert_array_equal(images, whole.sum(1)[classes])


@pytest.mark.parametrize("trials", [1, 7, 100, 10_000])
def test_the_wilson_interval_solves_its_equation(trials):
    """Its ends are the shares p with |observed - p| = z * sqrt(p (1 - p) / n)."""
    z = 1.959963984540054
    for successes in (0, 1, trials // 3, trials):
        share = successes / trials
        ends = np.roots([1 + z**2 / trials, -2 * share - z**2 / trials, share**2])
        np.testing.assert_allclose(
            wilson_interval(successes, trials), np.sort(ends.real), atol=1e-9
        )
    assert wilson_interval(0, 0) == [0, 1]


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_the_calibration_error_equals_a_plain_loop(scale):
    batch = random_batch(500, 7, seed=3, scale=scale)
    probabilities = probabilities_of(batch["logits"]).max(1)
    correct = batch["logits"].argmax(1) == batch["labels"]
    expected = 0.0
    for number in range(15):
        chosen = (number / 15 < probabilities) & (probabilities <= (number + 1) / 15)
        expected += abs(np.sum(correct[chosen] - probabilities[chosen])) / 500
    found = figures(of_one_kind([batch]), "abcdefg")["calibration_error"]
    assert found == pytest.approx(expected, rel=1e-9) and expected > 0.01


def test_the_last_bin_of_the_calibration_has_what_is_certain():
    """A wrong image of probability 1, and a right one of 0.95."""
    logits = np.array([[200, 0], [3, 0]], np.float32)
    batch = {"logits": logits, "labels": np.array([1, 0]), "loss": np.zeros(2)}
    found = figures(of_one_kind([batch]), "ab")["calibration_error"]
    assert found == pytest.approx(probabilities_of(logits)[1, 0] / 2)


def test_with_a_nan_logit_no_label_is_right():
    """Of 200 images 80 have a NaN logit, 20 of them only NaNs."""
    batch = random_batch(200, 8, seed=1) | {"logits_tta": np.zeros((200, 8))}
    logits, labels = batch["logits"], batch["labels"]
    labels[:20] = 0
    logits[:20] = batch["logits_tta"][:20] = np.nan
    logits[range(20, 80), labels[20:80] - np.arange(60) % 2] = np.nan
    predicted = of_one_kind([batch])
    ranks = np.argsort(np.argsort(-logits[80:], 1), 1)[range(120), labels[80:]]
    right = np.append(np.zeros(80, bool), ranks == 0)
    np.testing.assert_array_equal(predicted.correct, right)
    np.testing.assert_array_equal(predicted.in_top, np.append(right[:80], ranks < 5))
    assert not predicted.correct_tta[:20].any() and predicted.correct_tta[20:].any()
    found = figures(predicted, "abcdefgh")
    assert found["accuracy"] == right.mean() and found["images"] == 200
    matrix = np.zeros((8, 8), int)
    for label, other, count in found["confusion_matrix"]:
        matrix[label, other] = count
    expected = metrics.confusion_matrix(labels[80:], logits[80:].argmax(1))
    np.testing.assert_array_equal(matrix[:7, :], expected[:7])
    recalls = np.diag(matrix)[:7] / np.bincount(labels)
    assert found["balanced_accuracy"] == pytest.approx(recalls.mean(), rel=1e-12)
    assert predicted.texts(0, "abcdefgh") == ("a", "none")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    small_runs.use(monkeypatch)
    path = small_runs.uninterrupted(small_config()).path
    return shutil.copytree(path, tmp_path / "run")


def test_the_figures_of_a_run_equal_sklearn_and_mistakes_are_listed(trained):
    result = evaluate(trained)
    assert json.loads((trained / "result.json").read_text()) == result
    run = load_run(trained)
    images, labels = arrays(NUM_TEST, 1)
    for suffix, model in (("", run.model), ("_ema", run.model_ema)):
        logits = model(run.preprocess(images)).numpy()
        compare_with_sklearn(result, labels, logits, suffix, "test_")
    with open(trained / "mistakes.csv", newline="") as file:
        mistakes = list(csv.DictReader(file))
    wrong = np.flatnonzero(logits.argmax(1) != labels)
    assert 0 < len(wrong) == NUM_TEST - result["test_correct_ema"]
    for row, index in zip(mistakes, wrong, strict=True):
        assert (int(row["index"]), row["path"]) == (index, "")
        assert row["label"] == CLASS_NAMES[labels[index]]
        assert row["prediction"] == CLASS_NAMES[logits[index].argmax()]
        probability = probabilities_of(logits)[index].max()
        assert float(row["probability"]) == pytest.approx(probability, abs=1e-5)
