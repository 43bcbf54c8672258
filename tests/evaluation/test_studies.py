"""Calibration, suspected label errors, ensembles and means of runs."""

import csv
import dataclasses
import functools
import json
import shutil
import types

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from scipy import special
from sklearn import metrics

import towers
from towers import Config
from towers.build.restored import read_run
from towers.cluster.spec import Cluster
from towers.data.sources import Subset
from towers.errors import ConfigError, NumericError
from towers.evaluation.ensembles import mean_predictions
from towers.evaluation.label_errors import label_errors, label_set_errors
from towers.evaluation.split_predictions import SplitPredictions, predict_split
from towers.metrics.metrics import fit_temperature
from towers.parallel.copies import Weights

CONFIG = Config(
    model="cnn",
    augment="none",
    device="cpu",
    batch_size=20,
    num_epochs=2.0,
    optimizer="adamw",
    learning_rate=3e-3,
    ema_decay=0.0,
    validation_fraction=0.25,
    num_towers=1,
)
softmax = functools.partial(special.softmax, axis=1)


def images_of(labels):
    """Return images that are the brighter the higher the label is."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 100, (len(labels), 8, 8, 3))
    return (images + 50 * labels[:, None, None, None]).astype(np.uint8)


@pytest.fixture(scope="module", autouse=True)
def linear_network():
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        yield


@pytest.fixture(scope="module")
def data():
    labels = np.random.default_rng(0).integers(0, 3, 160)
    return images_of(labels), labels


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Folders of two runs that start from the same weights."""
    root = tmp_path_factory.mktemp("runs")
    towers.train(root / "start", CONFIG, data=data, report=False)
    config = dataclasses.replace(CONFIG, init_from=str(root / "start"), num_epochs=1.0)
    for seed in (1, 2):
        config = dataclasses.replace(config, seed=seed)
        towers.train(root / str(seed), config, data=data, report=False)
    return [root / "1", root / "2"]


# Temperature.


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_temperature_has_the_least_loss(multi_label):
    """Labels that are drawn from softened probabilities; a fine grid is not better."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((4000, 5))
    if multi_label:
        labels = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / 2.5))
    else:
        p = softmax(logits / 2.5)
        labels = (p.cumsum(1) < rng.random((4000, 1))).sum(1)

    def loss(temperature):
        if multi_label:
            z = logits / temperature
            return np.mean(np.logaddexp(0, z) - z * labels)
        return metrics.log_loss(labels, softmax(logits / temperature))

    temperature = fit_temperature(logits.astype(np.float32), labels)
    assert 2.2 < temperature < 2.8
    grid = np.linspace(temperature - 0.5, temperature + 0.5, 41)
    assert loss(temperature) <= min(map(loss, grid)) + 1e-7


def test_a_temperature_is_of_a_step_and_of_weights(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    result = towers.calibrate(run)
    temperature = result["temperature"]
    assert read_run(run, calibrated=True).temperature == temperature
    held_out = predict_split(run, "validation")
    assert result["images"] == len(held_out.labels)
    for suffix, value in (("", 1.0), ("_calibrated", temperature)):
        p = softmax(held_out.logits.astype(np.float64) / value)
        expected = metrics.log_loss(held_out.labels, p)
        assert result[f"loss{suffix}"] == pytest.approx(expected, rel=1e-4)
    for change in ({"step": result["step"] + 1}, {"weights": "ema"}):
        (run / "calibration.json").write_text(json.dumps(result | change))
        with pytest.raises(ConfigError, match=r"raw weights of step \d+ .*--calibrate"):
            read_run(run, calibrated=True)


@pytest.mark.slow
def test_predictions_and_exports_are_calibrated_on_request(runs, data, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    temperature = towers.calibrate(run)["temperature"]
    plain, calibrated = (
        towers.predict(run, data[0], calibrated=x).probabilities for x in (False, True)
    )
    powers = plain ** (1 / temperature)
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(calibrated, expected, rtol=1e-5)
    path = towers.export(run, "saved_model", tmp_path / "exported", calibrated=True)
    exported = tf.saved_model.load(path).signatures["serving_default"]
    outputs = exported(images=tf.constant(data[0]))
    np.testing.assert_allclose(outputs["probabilities"], expected, atol=1e-5)
    with pytest.raises(ConfigError, match="no probabilities"):
        towers.export(run, "keras", calibrated=True)


# Label errors.


def suspects_by_loops(labels, probabilities):
    classes = range(probabilities.shape[1])
    means = {}
    for c in classes:
        own = [
            p[c] for p, label in zip(probabilities, labels, strict=True) if label == c
        ]
        means[c] = np.mean(own) if own else 2.0
    rows = []
    for index, (p, label) in enumerate(zip(probabilities, labels, strict=True)):
        confident = [c for c in classes if p[c] >= means[c] - 1e-6]
        likeliest = max(classes, key=lambda c: p[c])
        best = confident[0] if len(confident) == 1 else likeliest
        if confident and best != label and p[likeliest] > p[label] + 1e-6:
            rows.append((p[label] - p[best], index, best))
    return [(index, best) for _, index, best in sorted(rows)]


def test_suspects_equal_plain_loops_and_find_flipped_labels():
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 4, 600)
    logits = rng.standard_normal((600, 5)) + 4 * np.eye(5)[truth]
    labels, flipped = truth.copy(), rng.choice(600, 30, replace=False)
    labels[flipped] = (labels[flipped] + 1) % 4
    probabilities = softmax(logits)
    indices, classes = label_errors(labels, probabilities)
    expected = suspects_by_loops(labels, probabilities)
    assert list(zip(indices, classes, strict=True)) == expected
    hits = np.isin(indices[:20], flipped)
    assert hits.mean() > 0.9 and (classes[:20][hits] == truth[indices[:20]][hits]).all()


def test_neither_ties_nor_images_predicted_as_their_label_are_suspects():
    """The indices are of cleanlab 2.9.0's find_label_issues by confident_learning."""
    labels = np.arange(30) % 2
    tied = np.full((30, 2), 0.5)
    assert label_errors(labels, tied)[0].tolist() == []
    tied[3] = 0.4, 0.6  # the only one that is not tied, and has label 1
    assert label_errors(labels, tied)[0].tolist() == []
    # Its own class is the likeliest, but below that class's mean.
    labels = np.array([0, 0, 0, 1, 1])
    first = np.array([0.95, 0.9, 0.52, 0.55, 0.6])
    indices, _ = label_errors(labels, np.column_stack([first, 1 - first]))
    assert indices.tolist() == []


def test_a_set_has_an_error_for_each_class():
    rng = np.random.default_rng(2)
    labels = rng.random((500, 3)) < 0.4
    probabilities = 1 / (1 + np.exp(-rng.standard_normal((500, 3)) - 6 * labels + 3))
    labels[7, 1] ^= True
    labels[9, 2] ^= True
    images, classes = label_set_errors(labels, probabilities)
    pairs = set()
    for number in range(3):
        p = probabilities[:, number]
        both = np.column_stack([1 - p, p])
        of_class = suspects_by_loops(labels[:, number].astype(int), both)
        pairs |= {(index, number) for index, _ in of_class}
    assert set(zip(images.tolist(), classes.tolist(), strict=True)) == pairs
    assert {(7, 1), (9, 2)} <= pairs
    own = np.where(labels, probabilities, 1 - probabilities)[images, classes]
    assert (np.diff(own) >= 0).all()


def test_suspects_of_a_run_are_listed(runs):
    rows = towers.find_suspects(runs[0], "validation")
    predicted = predict_split(runs[0], "validation")
    expected, _ = label_errors(predicted.labels, softmax(predicted.logits))
    assert [row["index"] for row in rows] == expected.tolist()
    with open(runs[0] / "suspects.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert [int(row["index"]) for row in written] == expected.tolist()
    test_size = len(predict_split(runs[0], "test").labels)
    assert (test_size, len(predict_split(runs[0], "train").labels)) == (16, 108)


def test_held_out_images_that_changed_are_not_studied(tmp_path, monkeypatch, capfd):
    small_runs.use(monkeypatch)
    held_out = {"validation_fraction": 0.4, "max_steps": 1}
    towers.train(tmp_path / "run", small_runs.small_config(**held_out))
    data = small_runs.small_data()
    data = dataclasses.replace(data, train=Subset(data.train, np.arange(45)))
    small_runs.use(monkeypatch, data_set=data)
    with pytest.raises(ConfigError, match="had 50 training images and has 45"):
        towers.calibrate(tmp_path / "run")
    towers.find_suspects(tmp_path / "run", "train")
    assert "not the data set of the run" in capfd.readouterr().out
    assert not (tmp_path / "run/calibration.json").exists()


# Ensembles and means.


def test_an_ensemble_has_the_mean_probabilities(runs, capfd):
    result = towers.evaluate_ensemble(runs)
    out = capfd.readouterr().out
    assert "  ensemble" in out and "raw weights" not in out
    members = [predict_split(run) for run in runs]
    mean = np.mean([softmax(x.logits.astype(np.float64)) for x in members], 0)
    labels = members[0].labels
    assert result["accuracy"] == np.mean(mean.argmax(1) == labels)
    expected = metrics.log_loss(labels, mean, labels=range(3))
    assert result["loss"] == pytest.approx(expected, rel=1e-5)


def test_an_ensemble_is_of_the_same_images_and_of_finite_probabilities():
    source, labels = types.SimpleNamespace(checksum=1), np.array([0, 1])
    logits = np.eye(2, dtype=np.float32)
    good = SplitPredictions(
        3, Weights.RAW, source, ("a", "b"), labels, logits, logits[:0]
    )
    assert mean_predictions("AB", [good, good]).correct.all()
    other = types.SimpleNamespace(checksum=2)
    with pytest.raises(ConfigError, match=r"B has other .*images than A"):
        mean_predictions("AB", [good, good._replace(source=other)])
    with pytest.raises(NumericError, match="B: "):
        mean_predictions("AB", [good, good._replace(logits=np.nan * logits)])
    # Probabilities that floats round to 0 and 1: half the probability of the second.
    far = good._replace(logits=2000 * logits, labels=labels[::-1])
    near = far._replace(logits=800 * logits)
    mean = mean_predictions("AB", [far, near])
    np.testing.assert_allclose(mean.losses, [800 + np.log(2)] * 2)
    sets = [x._replace(labels=~np.eye(2, dtype=bool)) for x in (far, near)]
    mean = mean_predictions("AB", sets)
    np.testing.assert_allclose(mean.losses, [400 + np.log(2)] * 2)


def test_the_mean_of_runs_is_a_run(runs, data, tmp_path):
    towers.average(runs, tmp_path / "mean")
    mean, *others = map(towers.load_run, [tmp_path / "mean", *runs])
    for name, value in mean.tensors.items():
        if name.startswith(("params/", "state/")):
            each = [run.tensors[name].astype(np.float64) for run in others]
            np.testing.assert_allclose(value, np.mean(each, 0), rtol=1e-6, atol=1e-7)
    assert towers.evaluate(tmp_path / "mean")["test_images"] == 16
    with pytest.raises(ConfigError, match="choose another folder"):
        towers.average(runs, tmp_path / "mean")
    scratch = dataclasses.replace(CONFIG, max_steps=1, seed=5)
    towers.train(tmp_path / "scratch", scratch, data=data, report=False)
    with pytest.raises(ConfigError, match=r"different weights.* --ensemble"):
        towers.average([runs[0], tmp_path / "scratch"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


# Folds.


def test_every_image_is_held_out_once(data, tmp_path):
    config = dataclasses.replace(CONFIG, validation_fraction=0.0, max_steps=2)
    table = towers.cross_validate(tmp_path, config, 2, data=data, report=False)
    assert json.loads((tmp_path / "folds.json").read_text()) == table
    with open(tmp_path / "out_of_fold.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    train_size = 160 - 16  # a tenth is for testing
    assert [int(row["index"]) for row in rows] == list(range(train_size))
    labels = np.array([int(row["label"]) for row in rows])
    predicted = [max("012", key=lambda name: float(row[name])) for row in rows]
    is_right = np.array(predicted).astype(int) == labels
    folds = np.array([int(row["fold"]) for row in rows])
    accuracies = [np.mean(is_right[folds == x]) for x in range(2)]
    np.testing.assert_allclose(table["accuracy"]["values"], accuracies)
    assert table["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert table["accuracy"]["std"] == pytest.approx(np.std(accuracies, ddof=1))
    counts = [np.bincount(labels[folds == x], minlength=3) for x in range(2)]
    assert np.ptp(counts, axis=0).max() <= 1  # of each class a half


def test_folds_that_cannot_be_are_refused(data, tmp_path):
    config = dataclasses.replace(CONFIG, validation_fraction=0.0, max_steps=1)
    labels = np.array([0, 0, 1, 1])
    few = (images_of(labels), labels), (images_of(labels), labels)
    with pytest.raises(ConfigError, match="validation_fold=0/5 of 4 images"):
        towers.cross_validate(tmp_path, config, 5, data=few, report=False)
    workers = Cluster(("a:1", "b:1"), 0, "--cluster")
    config = dataclasses.replace(config, strategy="multi_worker")
    with pytest.raises(ConfigError, match="2 workers, and folds=3 takes one process"):
        towers.cross_validate(tmp_path, config, 3, data=data, cluster=workers)
    for fold in ("5/5", "1", "0/1", "a/b"):
        with pytest.raises(ConfigError, match="FOLD/FOLDS"):
            dataclasses.replace(config, validation_fold=fold)
